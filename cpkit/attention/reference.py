"""The specification of attention in a few lines: dense, fp64, for tests alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import Piece


def run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: Sequence[Piece], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``cpkit.attention``; computed in float64 with an explicit mask."""
    groups = query.shape[1] // key.shape[1]
    outs, lses, start = [], [], 0
    for piece in pieces:
        q = query[start : start + piece.queries].double()
        k = piece.slice(key).double().repeat_interleave(groups, 1)
        v = piece.slice(value).double().repeat_interleave(groups, 1)
        last = torch.arange(piece.queries).unsqueeze(1) + piece.keys - piece.queries
        at = torch.arange(piece.keys)
        visible = (at <= last) & (at >= last - (piece.keys if piece.left is None else piece.left))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype))
        lses.append(lse.transpose(0, 1).float())
        start += piece.queries
    return torch.cat(outs), torch.cat(lses)
