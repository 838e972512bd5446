"""Sparse attention with torch alone, on any device: the selected latents of a block of queries, gathered, then fused
attention of one query's heads over them, as if the heads were a sequence."""

from __future__ import annotations

import torch

from ..backends import Backend

ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 27}  # of gathered latents at a time; cpu: 2 MiB


def run(
    query: torch.Tensor, latent: torch.Tensor, selected: torch.Tensor, scale: float, value_dim: int
) -> torch.Tensor:
    """See ``cpkit.sparse_attention``."""
    kind = query.device.type
    if kind == "cpu":  # rounded once, by the caller
        wide = torch.promote_types(query.dtype, torch.float32)
        query, latent = query.to(wide), latent.to(wide)
    (rows, heads, dim), topk = query.shape, selected.shape[1]
    out = query.new_empty(rows, heads, value_dim)
    some_missing = bool((selected[:, -1] < 0).any())
    step = min(rows, max(1, ELEMENTS.get(kind, ELEMENTS["cuda"]) // (topk * dim)))
    gathered = latent.new_empty(step * topk, dim)  # one memory for all blocks: fresh pages cost as much as the copy
    for first in range(0, rows, step):
        chosen = selected[first : first + step]
        mask = None
        if some_missing:
            missing = chosen < 0
            mask = torch.zeros(missing.shape, dtype=query.dtype, device=query.device)
            mask = mask.masked_fill_(missing, float("-inf")).view(len(chosen), 1, 1, topk)
            chosen = torch.where(missing, chosen[:, :1], chosen)  # a NaN would show through the mask: of its own keys
        keys = torch.index_select(latent, 0, chosen.flatten(), out=gathered[: chosen.numel()])
        keys = keys.view(len(chosen), 1, topk, dim)
        out[first : first + step] = _attend(query[first : first + step].unsqueeze(1), keys, mask, scale, value_dim)
    return out


def _attend(query, keys, mask, scale: float, value_dim: int) -> torch.Tensor:
    """``[rows, 1, heads, dim]`` over ``[rows, 1, topk, dim]`` to ``[rows, heads, value_dim]``."""
    if query.device.type == "cpu":
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, keys, 0.0, False, attn_mask=mask, scale=scale
        )
        return out[:, 0, :, :value_dim]
    weights = (query @ keys.transpose(2, 3)).float() * scale
    weights = (weights if mask is None else weights + mask).softmax(-1)
    return (weights.to(keys.dtype) @ keys[..., :value_dim])[:, 0]


BACKEND = Backend("torch", run, lambda device, dtype, head_dim: "")
