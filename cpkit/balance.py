"""How evenly a strategy divides the work of a forward, and which one ``auto`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .layout import Layout, layout, strategies
from .topology import head_dim

__all__ = ["Kept", "Term", "Work", "choose_strategy", "imbalance"]


@dataclass(frozen=True)
class Term:
    """``flops`` for each pair of a row and a key that it meets: every key that it sees, or the ``most`` that a window
    or a selection leaves; none for a row that sees no more than ``above``."""

    flops: float
    most: float = float("inf")
    above: int = 0


@dataclass(frozen=True)
class Work:
    """What one average layer costs: ``row_flops`` for each row (twice the weights that it meets), and ``terms`` for
    what grows with the keys."""

    row_flops: float
    terms: tuple[Term, ...]

    @classmethod
    def of(cls, config: Any) -> Work:
        """Counted from a GQA model's config."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        head = head_dim(config)
        attention = hidden * head * 2 * (heads + getattr(config, "num_key_value_heads", heads))
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        mlp = 3 * hidden * width * (getattr(config, "num_experts_per_tok", None) or 1)
        window = getattr(config, "sliding_window", None)
        return cls(2.0 * (attention + mlp), (Term(4.0 * head * heads, window or float("inf")),))

    def of_ranks(self, placed: Layout) -> list[float]:
        """FLOPs of each rank in one layer."""
        costs = []
        for rank in range(placed.size):
            seen = placed.keys_seen(rank)
            grown = (t.flops * float(seen[seen > t.above].clamp(max=t.most).sum()) for t in self.terms)
            costs.append(len(seen) * self.row_flops + sum(grown))
        return costs


@dataclass(frozen=True)
class Kept:
    """What a row leaves in the caches of ``layers`` layers, and sends to the other ranks there under the ``name`` that
    ``cpkit.trace`` uses: ``width`` elements, divided over the TP ranks unless they are ``shared``. Of a window, the
    ``last`` rows stay in the cache."""

    name: str
    width: int
    layers: int
    shared: bool = False
    last: float = float("inf")

    @classmethod
    def of(cls, config: Any) -> list[Kept]:
        """Keys and values of a GQA model."""
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
        sliding = kinds.count("sliding_attention") * config.num_hidden_layers // len(kinds) if window else 0
        width = 2 * config.num_key_value_heads * head_dim(config)
        layers = {float("inf"): config.num_hidden_layers - sliding, float((window or 1) - 1): sliding}
        return [cls("kv", width, count, last=last) for last, count in layers.items() if count]


def imbalance(costs: Sequence[float]) -> float:
    """Largest over mean: 1.0 is perfect."""
    mean = sum(costs) / len(costs)
    return max(costs) / mean if mean else 1.0


def choose_strategy(work: Work, lengths: tuple[int, ...], prefixes: tuple[int, ...], size: int) -> tuple[str, str]:
    """The registered strategy whose busiest rank has the least work for these lengths, and the figures.

    Bytes on the wire are the same for all (every rank gets every key once), and contiguous blocks need fewer kernel
    launches, so within 0.1% the first registered, zigzag, wins.
    """
    return _choose(work, lengths, prefixes, size, tuple(strategies()))


@lru_cache(maxsize=64)
def _choose(
    work: Work, lengths: tuple[int, ...], prefixes: tuple[int, ...], size: int, names: tuple[str, ...]
) -> tuple[str, str]:
    found = {name: imbalance(work.of_ranks(layout(name, lengths, prefixes, size))) for name in names}
    name = next(n for n, value in found.items() if value <= min(found.values()) * 1.001)
    listed = ", ".join(f"{n} {value:.4f}" for n, value in found.items())
    return name, f"work of the busiest rank over the mean: {listed}; bytes are equal"
