"""Where keys meet: the cache that a context-parallel forward hands to the model's layers.

Every family of transformers passes its new rows to ``cache.update`` (and an indexer's to ``update_indexer``) and
attends over what comes back. A prefill cache receives this rank's rows there, fetches the others', keeps what its
policy says in the caller's own cache, and returns each request's keys, packed in one row of keys. It returns them as
``Pending``: the fetch runs while the layer goes on with its queries, and whoever attends waits for it. Models know
nothing of the policy; a new one is a subclass in ``PREFILL_CACHES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from transformers import Cache

from .context import ForwardContext, Spans

__all__ = ["PREFILL_CACHES", "PrefillCache", "ReplicatedCache"]


class PrefillCache(Cache):
    """Base of the policies. ``store`` is the caller's cache, or None when nothing is to be kept.

    ``spans[layer][request]`` says where the request's keys start in that layer's packed keys, and how many they are;
    known once the layer's keys have been waited for.
    """

    def __init__(self, context: ForwardContext, store: Cache | None):
        super().__init__(layers=[])
        self.context, self.store = context, store
        self.spans: dict[int, Spans] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.context.batch.past


class ReplicatedCache(PrefillCache):
    """Every rank keeps the whole cache, so decoding needs no other rank."""

    def __init__(self, context: ForwardContext, store: Cache | None):
        super().__init__(context, store)
        self._places: dict[tuple[int, int], tuple[torch.Tensor | None, Spans]] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """``[1, kv_heads, held, dim]`` of this rank to packed ``[keys, kv_heads, dim]`` of all requests: keys and
        values as one ``Pending``, in each place of the pair."""
        dim = key_states.shape[-1]
        local = torch.cat((key_states, value_states), -1)[0].transpose(0, 1)[: self.context.local_rows]

        def keep(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if self.store is None:
                self.spans[layer_idx] = _consecutive(self.context.batch.lengths)
                packed = rows.transpose(0, 1).contiguous().transpose(0, 1)  # heads apart, as the kernels read them
                return packed[..., :dim], packed[..., dim:]
            new = self.context.batch.to_slots(rows).transpose(1, 2)
            # the slot of the first key that update returns
            _, first = self.store.get_mask_sizes(self.context.batch.shape[1], layer_idx)
            keys, values = self.store.update(new[..., :dim], new[..., dim:], layer_idx, *args, **kwargs)
            return tuple(self._packed(x.transpose(1, 2), first, layer_idx) for x in (keys, values))  # type: ignore

        pending = self.context.all_rows.fetch(local, "kv").then(keep)
        return pending, pending

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int):
        """``[1, held, dim]`` index keys of this rank to packed ``[keys, dim]`` of all requests, as ``Pending``."""

        def keep(rows: torch.Tensor) -> torch.Tensor:
            if self.store is None:
                self.spans[layer_idx] = _consecutive(self.context.batch.lengths)
                return rows
            return self._packed(self.store.update_indexer(self.context.batch.to_slots(rows), layer_idx), 0, layer_idx)

        return self.context.all_rows.fetch(indexer_key_states[0, : self.context.local_rows], "index keys").then(keep)

    def _packed(self, slots: torch.Tensor, first: int, layer_idx: int) -> torch.Tensor:
        """``[batch, slots, …]`` from slot ``first`` on to ``[keys, …]``: as it lies where the slots of each request are
        a run, without holes; else the real ones, one after the other."""
        kept = slots.shape[1]
        if (first, kept) not in self._places:
            self._places[first, kept] = self._place(first, kept)
        at, self.spans[layer_idx] = self._places[first, kept]
        flat = slots.flatten(0, 1)
        return flat if at is None else flat[at.to(flat.device)]

    def _place(self, first: int, kept: int) -> tuple[torch.Tensor | None, Spans]:
        """Which of the ``batch * kept`` flat slots are keys (None where they may stay), and each request's span."""
        batch, places, row = self.context.batch, [], 0
        for entry, length, prefix in zip(batch.entries, batch.lengths, batch.prefix_slots, strict=True):
            new = batch.past + batch.slots[row : row + length] - entry * batch.shape[1]
            seen = torch.cat([prefix, new]) - first
            places.append(entry * kept + seen[seen >= 0])
            row += length
        if all(len(p) == 0 or int(p[-1] - p[0]) + 1 == len(p) for p in places):
            return None, [(int(p[0]) if len(p) else 0, len(p)) for p in places]
        return torch.cat(places), _consecutive([len(p) for p in places])


def _consecutive(lengths: Sequence[int]) -> Spans:
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


PREFILL_CACHES: dict[str, type[PrefillCache]] = {"replicated": ReplicatedCache}
