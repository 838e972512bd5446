"""How far tensors and caches lie apart, on one rank and over all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .ranks import Ranks

__all__ = ["Errors", "Layers", "across_ranks", "errors", "layers_of", "of_layers"]

Layers = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Errors:
    """The largest absolute difference, and the root mean square; infinite where a value is not finite."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0

    @property
    def root_mean_square(self) -> float:
        return (self.squares / self.count) ** 0.5 if self.count else 0.0

    def __add__(self, other: Errors) -> Errors:
        return Errors(max(self.largest, other.largest), self.squares + other.squares, self.count + other.count)


INFINITE = Errors(float("inf"), float("inf"), 1)


def errors(a: torch.Tensor, b: torch.Tensor) -> Errors:
    """Of two tensors; infinite for different shapes."""
    if a.shape != b.shape:
        return INFINITE
    if not a.numel():
        return Errors()
    apart = a.double() - b.to(a.device).double()
    found = Errors(apart.abs().max().item(), apart.square().sum().item(), apart.numel())
    return found if found.squares < float("inf") else INFINITE  # NaN is not less than anything


def layers_of(cache: Any) -> Layers:
    """Every tensor that a layer's cache holds, by name."""
    return [{n: t for n, t in vars(layer).items() if isinstance(t, torch.Tensor)} for layer in cache.layers]


def of_layers(mine: Layers, whole: Layers) -> Errors:
    """Of two caches that hold all heads."""
    total = Errors()
    for a, b in zip(mine, whole, strict=True):
        total = sum((errors(a[name], b[name]) for name in a), total) if a.keys() == b.keys() else INFINITE
    return total


def across_ranks(mine: Layers, whole: Layers | None, tp: int, ranks: Ranks) -> Errors:
    """Of every rank's cache, which holds its heads of ``tp`` parts, from rank 0's ``whole`` one (None elsewhere).
    Every rank calls it; layers travel one by one."""
    total = Errors()
    for layer, held in enumerate(mine):
        facts = ranks.shared(partial(_facts, whole, layer))
        if any(ranks.gathered(sorted(n for n, _, _ in facts) != sorted(held))):
            return INFINITE
        for name, shape, dtype in facts:
            device = held[name].device
            sent = whole[layer][name].contiguous() if whole else torch.empty(shape, dtype=dtype, device=device)
            if ranks.world > 1:
                dist.broadcast(sent, 0)
            total += errors(held[name], share_of_heads(held[name], sent, ranks.rank % tp, tp))
    return sum(ranks.gathered(total), Errors())


def _facts(whole: Layers | None, layer: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of the tensors in a layer's cache."""
    return [(name, tuple(t.shape), t.dtype) for name, t in whole[layer].items()] if whole else []


def share_of_heads(mine: torch.Tensor, whole: torch.Tensor, place: int, parts: int) -> torch.Tensor:
    """The part ``place`` of the heads in ``whole`` ``[batch, heads, …]`` where ``mine`` holds just a part."""
    partial = whole.ndim > 1 and mine.shape != whole.shape and mine.shape[1] * parts == whole.shape[1]
    return whole.chunk(parts, dim=1)[place] if partial else whole
