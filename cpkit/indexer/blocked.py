"""The indexer with torch alone, on any device: scores in tiles that stay in the cache, and a top-k a block of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backends import Backend
from . import Space, select


class Budget(NamedTuple):
    """How much is scored at once: at most ``most`` queries, whose ``scores [queries, keys]`` are at most so many, and
    whose products with keys ``[queries * heads, keys]`` are made in ``tile``s of so many elements."""

    most: int
    scores: int
    tile: int

    def rows(self, keys: int) -> int:
        return max(1, min(self.most, self.scores // max(keys, 1)))


BUDGETS = {"cpu": Budget(64, 1 << 24, 1 << 18), "cuda": Budget(1024, 1 << 28, 1 << 27)}  # cpu: tiles of 1 MiB


def run(
    query: torch.Tensor,
    weights: torch.Tensor,
    key: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """See ``cpkit.indexer``."""
    budget = BUDGETS.get(query.device.type, BUDGETS["cuda"])
    query, key = query.float(), key.float()

    def scored(rows: slice, start: int, stop: int, space: Space) -> torch.Tensor:
        return score(query[rows], weights[rows], key[start:stop], budget.tile, space)

    return select(query, starts, ends, topk, budget.rows, scored)


def score(query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor, tile: int, space: Space) -> torch.Tensor:
    """``[rows, keys]`` scores of ``query [rows, heads, dim]``, in tiles of keys."""
    rows, heads, _ = query.shape
    scores = space.take("scores", rows, len(key))
    q, w, step = query.flatten(0, 1), weights.unsqueeze(1), max(1, tile // (rows * heads))
    for first in range(0, len(key), step):
        part = key[first : first + step]
        products = space.take("products", rows * heads, len(part))
        torch.mm(q, part.t(), out=products).clamp_min_(0)
        summed = space.take("summed", rows, 1, len(part))
        torch.bmm(w, products.view(rows, heads, len(part)), out=summed)
        scores[:, first : first + step] = summed[:, 0]
    return scores


BACKEND = Backend("torch", run, lambda device, dtype, head_dim: "")
