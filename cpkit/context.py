"""The facts of one context-parallel forward: built at the model's entry, handed to its layers as ``cp_context``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .attention import Backend, Piece, pieces
from .batch import Batch
from .layout import Layout
from .rows import AllRows, ListedRows
from .topology import Groups

if TYPE_CHECKING:
    from .cache import PrefillCache

__all__ = ["ForwardContext"]


@dataclass(eq=False)
class ForwardContext:
    """What this rank must know to run its part of a forward exactly.

    A rank without rows runs a stand-in row (global row 0) through the model, because transformers' modules refuse
    empty tensors; ``local_rows`` is then 0 and no verb ever sends it.
    """

    batch: Batch
    layout: Layout
    groups: Groups
    backend: Backend
    device: torch.device
    cache: PrefillCache = field(init=False)
    callers: frozenset[str] = frozenset()  # names of the caller's further arguments, which run through the layers

    @property
    def local_rows(self) -> int:
        """Real rows of this rank."""
        return self.layout.local_rows[self.groups.cp.rank]

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

    def rounds(self, key_lengths: Sequence[int], window: int | None) -> list[list[Piece]]:
        """How this rank's queries meet packed keys, of which request i has ``key_lengths[i]``, its new ones last."""
        starts = [sum(key_lengths[:i]) for i in range(len(key_lengths))]
        kept = [keys - new for keys, new in zip(key_lengths, self.batch.lengths, strict=True)]
        wanted = (tuple(key_lengths), window)
        if wanted not in self._rounds:
            self._rounds[wanted] = pieces(self.layout.segments[self.groups.cp.rank], starts, kept, window)
        return self._rounds[wanted]

    @cached_property
    def _rounds(self) -> dict:
        return {}
