"""From what transformers callers pass to requests and rows, and back to the caller's shapes.

A caller passes ``[batch, slots]``; a *slot* is a place in that rectangle and may be padding. A *request* is a run of
real tokens that attend to each other: one a batch entry for padded input, several for packed input. Its new tokens are
the *rows*. Everything here is host integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import UnsupportedInput

__all__ = ["Batch", "read_batch"]


@dataclass(frozen=True, eq=False)
class Batch:
    """The requests of one forward.

    ``shape`` is the caller's ``(batch, slots)`` of new tokens and ``past`` the cached slots before them. For each
    request: ``entries`` the batch entry it lies in, ``lengths`` its new tokens, ``prefixes`` its cached tokens.
    ``slots`` ``[rows]`` is the flat slot (entry * slots + place) of each row, ``positions`` ``[rows]`` its RoPE
    position; ``prefix_slots`` the cached slots ``[prefix]`` that each request really has.
    """

    shape: tuple[int, int]
    past: int
    entries: tuple[int, ...]
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    slots: torch.Tensor
    positions: torch.Tensor
    prefix_slots: tuple[torch.Tensor, ...]

    @property
    def whole(self) -> bool:
        """Whether slots and rows are the same thing: one request an entry, no padding."""
        return len(self.slots) == self.shape[0] * self.shape[1] and len(self.entries) == self.shape[0]

    @property
    def prefix_has_holes(self) -> bool:
        """Whether padding lies among or after some request's cached tokens."""
        return any(len(s) and int(s[-1]) + 1 - int(s[0]) != len(s) for s in self.prefix_slots) or any(
            len(s) and int(s[-1]) + 1 != self.past for s in self.prefix_slots
        )

    def to_slots(self, rows: torch.Tensor) -> torch.Tensor:
        """``[rows, …]`` to the caller's ``[batch, slots, …]``, zeros for padding."""
        batch, slots = self.shape
        if len(rows) == batch * slots:  # rows come in slot order, so nothing is missing and nothing moves
            return rows.view(batch, slots, *rows.shape[1:])
        full = rows.new_zeros(batch * slots, *rows.shape[1:])
        full[self.slots.to(rows.device)] = rows
        return full.view(batch, slots, *rows.shape[1:])

    def rows_of_slots(self, places: torch.Tensor) -> torch.Tensor:
        """The row in each of ``places`` (``[k]`` places within the entries), -1 for padding: ``[batch, k]``."""
        row_of = torch.full((self.shape[0] * self.shape[1],), -1)
        row_of[self.slots] = torch.arange(len(self.slots))
        return row_of.view(self.shape)[:, places]


def read_batch(
    shape: tuple[int, int],
    past: int,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None = None,
    cached: bool = True,
) -> Batch:
    """Find the requests in ``shape = (batch, slots)`` new tokens after ``past`` cached slots.

    ``attention_mask`` ``[batch, past + slots]`` (1 = real) marks padding on either side, also inside the cache.
    Without it, ``cu_seq_lens`` ``[requests + 1]`` (cumulative, over the flattened batch of one) or ``position_ids``
    ``[batch, slots]`` that start again mark the edges of packed requests; without a cache (``cached`` False) any jump
    does, as in transformers. Positions are the caller's, or else ``past, past + 1, …`` as in transformers. Raises
    ``UnsupportedInput``.
    """
    batch, slots = shape
    _check(shape, past, attention_mask, position_ids)
    positions = torch.arange(past, past + slots).expand(batch, slots)
    edges: list[list[int]] = [[0, slots]] * batch  # of packed requests, for each entry
    if position_ids is not None:
        given = position_ids.cpu().expand(batch, slots)
        if attention_mask is None and cu_seq_lens is None:
            edges = [_jumps(entry, cached) for entry in given]
        positions = given
    if cu_seq_lens is not None and attention_mask is None:
        edges = [cu_seq_lens.tolist()]
        if batch != 1 or edges[0][0] != 0 or edges[0][-1] != slots or sorted(edges[0]) != edges[0]:
            raise UnsupportedInput(
                f"cu_seq_lens {edges[0]} must go up from 0 to the {slots} tokens of a batch of one (batch is {batch})"
            )
    if past and any(len(e) > 2 for e in edges):
        raise UnsupportedInput(
            f"packed sequences on top of a cache with {past} tokens: a cached prefix belongs to one request; pass the "
            "requests padded with an attention_mask, or without a cache"
        )
    real = torch.ones(batch, past + slots, dtype=torch.bool)
    if attention_mask is not None:
        real = attention_mask.cpu().bool()
    entries, lengths, prefixes, new_slots, prefix_slots = [], [], [], [], []
    for entry in range(batch):
        before = real[entry, :past].nonzero().flatten()
        for first, last in zip(edges[entry], edges[entry][1:], strict=False):
            new = real[entry, past + first : past + last].nonzero().flatten() + first
            entries.append(entry)
            lengths.append(len(new))
            prefixes.append(len(before))
            new_slots.append(entry * slots + new)
            prefix_slots.append(before)
    flat = torch.cat(new_slots)
    if len(flat) == 0:
        raise UnsupportedInput(f"no real token among {batch} x {slots} new ones: a forward needs at least one")
    return Batch(
        shape,
        past,
        tuple(entries),
        tuple(lengths),
        tuple(prefixes),
        flat,
        positions.reshape(-1)[flat],
        tuple(prefix_slots),
    )


def _check(shape: Sequence[int], past: int, mask: torch.Tensor | None, position_ids: torch.Tensor | None) -> None:
    batch, slots = shape
    if mask is not None:
        if mask.ndim != 2:
            raise UnsupportedInput(
                f"attention_mask has {mask.ndim} dimensions {tuple(mask.shape)}: context parallelism takes the 2-D "
                "padding mask [batch, cached + new tokens] and builds the causal mask itself"
            )
        if tuple(mask.shape) != (batch, past + slots):
            raise UnsupportedInput(
                f"attention_mask has shape {tuple(mask.shape)}, expected {(batch, past + slots)}: {past} cached and "
                f"{slots} new tokens for {batch} batch entries"
            )
    if position_ids is not None and (
        position_ids.ndim != 2 or position_ids.shape[1] != slots or position_ids.shape[0] not in (1, batch)
    ):
        raise UnsupportedInput(
            f"position_ids has shape {tuple(position_ids.shape)}, expected {(batch, slots)}: the positions of the "
            "whole batch, not of one rank's part"
        )


def _jumps(positions: torch.Tensor, gaps_allowed: bool) -> list[int]:
    """Edges of the runs in ``[slots]`` positions that go up, by one unless ``gaps_allowed``."""
    steps = positions.diff()
    jumps = (steps <= 0 if gaps_allowed else steps != 1).nonzero().flatten() + 1
    return [0, *jumps.tolist(), len(positions)]
