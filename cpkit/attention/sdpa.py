"""Attention with torch alone, on any device: the fused kernels behind ``scaled_dot_product_attention``, called so
that they return the log-sum-exp.

A piece is split where its queries start: keys that every query sees need no mask; the square that remains is plain
causal. With a window, blocks of queries meet a band of keys under one small mask ``[block, block + left]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends import Backend
from . import Piece

BLOCK = 256  # queries a masked call takes at once

Part = tuple[torch.Tensor, torch.Tensor]


def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: Sequence[Piece], scale: float) -> Part:
    """See ``cpkit.attention``."""
    if query.device.type == "cpu":  # parts are rounded once, after they have been merged
        wide = torch.promote_types(query.dtype, torch.float32)
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
    outs, lses, start = [], [], 0
    for piece in pieces:
        q = _heads(query[start : start + piece.queries])
        k, v = _heads(piece.slice(key)), _heads(piece.slice(value))
        out, lse = _causal(q, k, v, scale) if piece.left is None else _banded(q, k, v, scale, piece.left)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
        start += piece.queries
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))


def _heads(rows: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, dim]`` to ``[1, heads, rows, dim]``, the kernels' shape."""
    return rows.transpose(0, 1).unsqueeze(0)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
    """Bottom-right causal."""
    queries, keys = q.shape[2], k.shape[2]
    if keys < queries:  # the first queries see nothing
        out, lse = _causal(q[:, :, queries - keys :], k, v, scale) if keys else (q[:, :, :0], None)
        blind = q.new_zeros(*q.shape[:2], queries - keys, v.shape[-1])
        dark = torch.full(blind.shape[:-1], float("-inf"), dtype=torch.float32, device=q.device)
        return (torch.cat([blind, out], 2), torch.cat([dark, lse], 2)) if keys else (blind, dark)
    seen = keys - queries
    diagonal = _fused(q, k[:, :, seen:], v[:, :, seen:], scale, causal=True)
    if not seen:
        return diagonal
    return _merge_two(_fused(q, k[:, :, :seen], v[:, :, :seen], scale), diagonal)


def _banded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int) -> Part:
    """Bottom-right causal where a query sees its last key and the ``left`` before it."""
    parts = []
    shift = k.shape[2] - q.shape[2]  # query i's last key is i + shift
    for start in range(0, q.shape[2], BLOCK):
        stop = min(start + BLOCK, q.shape[2])
        low, high = max(start + shift - left, 0), stop + shift
        last = torch.arange(start + shift, high, device=q.device).unsqueeze(1)
        at = torch.arange(low, max(high, low), device=q.device)
        hidden = (at > last) | (at < last - left)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
        out, lse = _fused(q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high], scale, mask=mask)
        blind = hidden.all(1)
        parts.append((out.masked_fill(blind[:, None], 0.0), lse.masked_fill(blind, float("-inf"))))
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _merge_two(a: Part, b: Part) -> Part:
    """``merge`` for two parts that both see a key, in two passes over the rows instead of five."""
    weight = torch.sigmoid(b[1] - a[1]).unsqueeze(-1)
    return torch.lerp(a[0].float(), b[0].float(), weight).to(a[0].dtype), torch.logaddexp(a[1], b[1])


def _fused(q, k, v, scale: float, causal: bool = False, mask: torch.Tensor | None = None) -> Part:
    """torch's fused attention of ``[1, heads, rows, dim]`` with its log-sum-exp ``[1, heads, rows]``."""
    if k.shape[2] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), torch.full(
            q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device
        )
    if q.device.type == "cpu":
        dim = v.shape[-1]
        if dim < q.shape[-1]:  # the CPU kernel wants one head size
            v = torch.nn.functional.pad(v, (0, q.shape[-1] - dim))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out[..., :dim], lse
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    bias = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse[:, :, : q.shape[2]]


BACKEND: Backend = Backend("torch", run, lambda device, dtype, head_dim: "")
