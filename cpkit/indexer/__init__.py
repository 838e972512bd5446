"""Which keys a query attends to: exact top-k of an indexer's scores, without a prompt's ``[rows, keys]`` of them.

The score of a key is ``sum_h weights[h] * relu(query[h] . key)`` (DeepSeek-V3.2, section 2.1), in fp32. A query sees
one run of packed keys, ``starts[row]`` to ``ends[row] - 1``: its request's, up to itself. Of those the ``topk`` best
are selected; among equal scores the lower position wins.

A backend is a function ``run(query, weights, key, starts, ends, topk) -> selected``: ``query [rows, heads, dim]``,
``weights [rows, heads]`` fp32 with every scale in them, ``key [keys, dim]``, ``starts`` and ``ends`` ``[rows]`` int64
on the CPU; ``selected [rows, topk]`` int32 on the query's device: positions in the packed keys, ascending, ``-1`` after
the last where a row sees fewer than ``topk``. Rows that see no more than ``topk`` keys select them all, unscored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ..backends import Registry

__all__ = ["INDEXER", "Space", "blocks", "everything", "select", "top_positions"]

INDEXER = Registry("indexer")


def blocks(
    starts: torch.Tensor, ends: torch.Tensor, rows_for: Callable[[int], int]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Cut queries into ``(first, last, start, low, high)``: rows ``first`` to ``last - 1``, whose keys all begin at
    ``start`` and end between ``low`` and ``high``.

    ``rows_for(keys)`` says how many rows may meet so many keys. A block never spans requests, nor a jump in position
    that would make it score many keys for nothing.
    """
    if not len(starts):
        return
    jump = (starts.diff() != 0) | (ends.diff().abs() > rows_for(0))
    edges = [0, *(jump.nonzero().flatten() + 1).tolist(), len(starts)]
    for first, stop in zip(edges, edges[1:], strict=False):
        start = int(starts[first])
        while first < stop:
            last = min(first + rows_for(0), stop)
            last = min(first + rows_for(int(ends[last - 1]) - start), last)
            yield first, last, start, int(ends[first:last].min()), int(ends[first:last].max())
            first = last


def everything(starts: torch.Tensor, ends: torch.Tensor, topk: int) -> torch.Tensor:
    """``[rows, topk]`` int32: all keys from each row's start to its end, then ``-1``."""
    position = starts.unsqueeze(1) + torch.arange(topk)
    return torch.where(position < ends.unsqueeze(1), position, -1).int()


class Space:
    """Memory that all blocks use in turn: fresh pages for each would cost as much as the arithmetic."""

    def __init__(self, device: torch.device):
        self.device = device
        self.held: dict[str, torch.Tensor] = {}
        self.last: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of that shape, with anything in it; what was taken under the name before is given up."""
        if name not in self.last or self.last[name].shape != shape:
            size = math.prod(shape)
            if name not in self.held or len(self.held[name]) < size:
                self.held[name] = torch.empty(size, dtype=dtype, device=self.device)
            self.last[name] = self.held[name][:size].view(shape)
        return self.last[name]


def select(
    query: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    topk: int,
    rows_for: Callable[[int], int],
    score: Callable[[slice, int, int, Space], torch.Tensor],
) -> torch.Tensor:
    """What a backend returns, block by block. ``score(rows, start, stop, space)`` gives ``[rows, stop - start]`` fp32
    scores of those rows against the keys from ``start`` on, and anything for keys past a row's end; they may lie in
    ``space``, and are overwritten."""
    selected = query.new_empty((len(starts), topk), dtype=torch.int32)
    space = Space(query.device)
    for first, last, start, low, high in blocks(starts, ends, rows_for):
        rows = slice(first, last)
        if high - start <= topk:
            selected[rows] = everything(starts[rows], ends[rows], topk)
            continue
        scores = score(rows, start, high, space)
        limits = (ends[rows] - start).to(scores.device).unsqueeze(1)
        edge = low - start  # every row sees the columns before it
        columns = torch.arange(edge, high - start, device=scores.device)
        scores[:, edge:].masked_fill_(columns >= limits, float("-inf"))
        positions = top_positions(scores, topk, space)
        if edge < topk:  # some rows see fewer
            positions = positions.masked_fill(positions >= limits, -1 - start)
        selected[rows] = positions + start
    return selected


def top_positions(scores: torch.Tensor, topk: int, space: Space) -> torch.Tensor:
    """``[rows, topk]`` int64 columns of the largest of ``[rows, columns]`` fp32 scores, ascending; among equal ones the
    lower. NaN counts as larger than anything, as in ``torch.topk``.

    What is not below the ``topk``-th largest value is chosen by comparing (so at least ``topk`` in every row, NaN or
    not): cheaper than sorting, and in order. On the CPU numpy's vectorised partition finds that value about five times
    as fast as ``torch.topk``.
    """
    rows, columns = scores.shape
    chosen = space.take("chosen", rows, columns, dtype=torch.bool)
    if scores.device.type == "cpu":
        parted = space.take("parted", rows, columns).copy_(scores).numpy()
        parted.partition(columns - topk, axis=1)
        edge = torch.from_numpy(parted[:, columns - topk, None].copy())
        flat = torch.from_numpy(np.flatnonzero(torch.lt(scores, edge, out=chosen).logical_not_().numpy()))
    else:
        edge = _ordered(scores.topk(topk, dim=1, sorted=False).values).amin(1, keepdim=True)
        flat = torch.lt(scores, edge, out=chosen).logical_not_().flatten().nonzero().flatten()
    if len(flat) == rows * topk:
        return flat.view(rows, topk) - torch.arange(0, rows * columns, columns, device=flat.device).unsqueeze(1)
    # equal scores at the edge, or NaN: all above it, and the first of the equal ones that still find room
    scores, edge = _ordered(scores), _ordered(edge)
    above, equal = scores > edge, scores == edge
    room = topk - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= room))).nonzero()[:, 1].view(rows, topk)


def _ordered(scores: torch.Tensor) -> torch.Tensor:
    return scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))


from .blocked import BACKEND as _BLOCKED  # noqa: E402  (they need what is above)
from .deepgemm import BACKEND as _DEEPGEMM  # noqa: E402

INDEXER.register(_BLOCKED)
INDEXER.register(_DEEPGEMM)
