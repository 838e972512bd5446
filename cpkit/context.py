"""The facts of one context-parallel forward: built at the model's entry, handed to its layers as ``cp_context``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .attention import Piece, pieces
from .backends import Backend
from .batch import Batch
from .layout import Layout, Segment
from .rows import AllRows, ListedRows
from .topology import Groups

if TYPE_CHECKING:
    from .cache import PrefillCache

__all__ = ["ForwardContext", "Spans"]

Spans = Sequence[tuple[int, int]]  # for each request the first of its packed keys, and how many they are


@dataclass(eq=False)
class ForwardContext:
    """What this rank must know to run its part of a forward exactly.

    A rank without rows runs a stand-in row (global row 0) through the model, because transformers' modules refuse
    empty tensors; ``local_rows`` is then 0 and no verb ever sends it.
    """

    batch: Batch
    layout: Layout
    groups: Groups
    kernels: Mapping[str, Backend]  # by kind
    device: torch.device
    cache: PrefillCache = field(init=False)
    callers: frozenset[str] = frozenset()  # names of the caller's further arguments, which run through the layers

    @property
    def local_rows(self) -> int:
        """Real rows of this rank."""
        return self.layout.local_rows[self.groups.cp.rank]

    @property
    def longest(self) -> int:
        """Keys that the last row of the longest request sees."""
        return max(p + n for p, n in zip(self.batch.prefixes, self.batch.lengths, strict=True))

    @cached_property
    def held(self) -> torch.Tensor:
        """The global rows that run through the model here, in local order: ``[max(local_rows, 1)]`` on the CPU."""
        local = self.layout.local_to_global[self.groups.cp.rank]
        return local if len(local) else torch.zeros(1, dtype=torch.int64)

    @cached_property
    def all_rows(self) -> AllRows:
        """The plan that gives every rank all rows."""
        return AllRows(self.layout, self.groups.cp, self.device)

    def listed_rows(self, rows: torch.Tensor) -> ListedRows:
        """A plan that gives every rank the same ``rows`` ``[k]``."""
        return ListedRows(self.layout, [rows] * self.groups.cp.size, self.groups.cp, self.device)

    def rounds(self, spans: Spans, window: int | None) -> list[list[Piece]]:
        """How this rank's queries meet the packed keys; ``spans[request]`` is where its keys start, and how many."""
        kept = [keys - new for (_, keys), new in zip(spans, self.batch.lengths, strict=True)]
        wanted = (tuple(spans), window)
        if wanted not in self._rounds:
            starts = [start for start, _ in spans]
            self._rounds[wanted] = pieces(self.layout.segments[self.groups.cp.rank], starts, kept, window)
        return self._rounds[wanted]

    @cached_property
    def _rounds(self) -> dict:
        return {}

    def visible(self, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """The packed keys ``starts[row]`` to ``ends[row] - 1`` that each local row sees, int64 on the CPU."""
        requests = [torch.full((s.count,), spans[s.request][0]) for s in self.layout.segments[self.groups.cp.rank]]
        starts = torch.cat(requests) if requests else torch.empty(0, dtype=torch.int64)
        return starts, starts + self.layout.keys_seen(self.groups.cp.rank)

    def early(self, limit: int) -> tuple[list[Segment], list[range]]:
        """The parts of this rank's segments whose rows see at most ``limit`` keys, and which local rows those are."""
        found, runs, row = [], [], 0
        for s in self.layout.segments[self.groups.cp.rank]:
            room = limit - self.layout.prefixes[s.request] - s.start  # keys that the first row may still gain, plus one
            count = min(max(-(-room // s.step), 0), s.count)
            if count:
                found.append(Segment(s.request, s.start, count, s.step))
                runs.append(range(row, row + count))
            row += s.count
        return found, runs
