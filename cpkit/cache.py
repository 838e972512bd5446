"""Where keys meet: the cache that a context-parallel forward hands to the model's layers.

Every family of transformers passes its new rows to ``cache.update`` and attends over what comes back. A prefill cache
receives this rank's rows there, fetches the others', keeps what its policy says in the caller's own cache, and returns
the keys of each request packed one after the other. Models know nothing of the policy; a new one is a subclass in
``PREFILL_CACHES``.
"""

from __future__ import annotations

import torch
from transformers import Cache

from .context import ForwardContext

__all__ = ["PREFILL_CACHES", "PrefillCache", "ReplicatedCache"]


class PrefillCache(Cache):
    """Base of the policies. ``store`` is the caller's cache, or None when nothing is to be kept.

    ``key_lengths[layer]`` says how many of the packed keys of that layer belong to each request.
    """

    def __init__(self, context: ForwardContext, store: Cache | None):
        super().__init__(layers=[])
        self.context, self.store = context, store
        self.key_lengths: dict[int, list[int]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.context.batch.past


class ReplicatedCache(PrefillCache):
    """Every rank keeps the whole cache, so decoding is transformers' own."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[1, kv_heads, held, dim]`` of this rank to packed ``[1, kv_heads, keys, dim]`` of all requests."""
        batch, dim = self.context.batch, key_states.shape[-1]
        local = torch.cat((key_states, value_states), -1)[0].transpose(0, 1)[: self.context.local_rows]
        rows = self.context.all_rows.fetch(local, "kv").wait()
        if self.store is None:
            self.key_lengths[layer_idx] = list(batch.lengths)
            packed = rows.transpose(0, 1).contiguous().unsqueeze(0)
            return packed[..., :dim], packed[..., dim:]
        new = batch.to_slots(rows).transpose(1, 2)
        _, first = self.store.get_mask_sizes(batch.shape[1], layer_idx)  # the slot of the first key that update returns
        keys, values = self.store.update(new[..., :dim], new[..., dim:], layer_idx, *args, **kwargs)
        return self._pack(keys, values, first, layer_idx)

    def _pack(
        self, keys: torch.Tensor, values: torch.Tensor, first: int, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, kv_heads, slots, dim]`` from slot ``first`` to ``[1, kv_heads, keys, dim]``, packed by request."""
        batch = self.context.batch
        count, slots = batch.shape
        everything_real = batch.whole and all(prefix == batch.past for prefix in batch.prefixes)
        if everything_real and keys.shape[2] == batch.past + slots - first:
            self.key_lengths[layer_idx] = [keys.shape[2]] * count
            return tuple(x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (keys, values))
        index, lengths, row = [], [], 0
        for entry, length, prefix in zip(batch.entries, batch.lengths, batch.prefix_slots, strict=True):
            new = batch.past + batch.slots[row : row + length] - entry * slots
            seen = torch.cat([prefix, new]) - first
            seen = seen[seen >= 0]
            index.append(entry * keys.shape[2] + seen)
            lengths.append(len(seen))
            row += length
        self.key_lengths[layer_idx] = lengths
        at = torch.cat(index).to(keys.device)
        return tuple(x.transpose(0, 1).flatten(1, 2)[:, at].unsqueeze(0) for x in (keys, values))


PREFILL_CACHES: dict[str, type[PrefillCache]] = {"replicated": ReplicatedCache}
