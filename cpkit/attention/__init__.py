"""Exact causal attention of a rank's own queries over all keys of their requests.

A rank's segments become *pieces*: bottom-right causal attention of some query rows over a strided run of keys, which
is what every varlen kernel computes. A contiguous segment (zigzag) is one piece. In a segment of stride C
(interleave), the keys fall into C residue classes, and within each class the visible keys grow by one from query to
query: C pieces, merged by their log-sum-exp. So no mask of ``[local, all]`` ever exists and any backend serves any
layout:

    queries 1 3 5 (C = 2)     keys 1 3 5: 1 | 1 3 | 1 3 5      keys 0 2 4: 0 | 0 2 | 0 2 4

A backend is a function ``run(query, key, value, pieces, scale) -> (out, lse)``: ``query [rows, heads, dim]``,
``key [keys, kv_heads, dim]``, ``value [keys, kv_heads, value_dim]``, pieces that tile the query rows in order;
``out [rows, heads, value_dim]`` in the query's dtype or fp32, and ``lse [rows, heads]`` in fp32, natural logarithm,
``-inf`` for a query that sees no key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..backends import Backend, Registry
from ..layout import Segment

__all__ = ["ATTENTION", "Backend", "Piece", "attend", "merge", "pieces"]


@dataclass(frozen=True)
class Piece:
    """``queries`` rows over keys ``first, first + step, …`` (``keys`` of them), causal from the bottom right: the last
    query sees the last key, each query before it one key less. With ``left``, a query sees only its last key and the
    ``left`` before it."""

    queries: int
    first: int
    keys: int
    step: int = 1
    left: int | None = None

    def slice(self, keys: torch.Tensor) -> torch.Tensor:
        """This piece's part of ``[keys, …]``."""
        return keys[self.first : self.first + (self.keys - 1) * self.step + 1 if self.keys else self.first : self.step]


def pieces(
    segments: Sequence[Segment],
    key_starts: Sequence[int] | Mapping[int, int],
    kept: Sequence[int],
    window: int | None = None,
) -> list[list[Piece]]:
    """Rounds of pieces; each round tiles the segments' query rows in order, and a row's rounds are to be merged.

    ``key_starts[request]`` is where the request's keys begin in the packed keys, ``kept[request]`` how many cached
    keys come before its new ones there. With ``window``, a query sees itself and the ``window - 1`` keys before it.
    """
    rounds: list[list[Piece]] = [[] for _ in range(max((s.step for s in segments), default=1))]
    for segment in segments:
        start, base = key_starts[segment.request], kept[segment.request] + segment.start
        last = base + (segment.count - 1) * segment.step
        for behind in range(len(rounds)):  # keys whose distance to a query is a multiple of the step, plus `behind`
            if behind >= segment.step or (window is not None and behind >= window):
                rounds[behind].append(Piece(segment.count, start, 0))
                continue
            left = None if window is None else (window - 1 - behind) // segment.step
            first = (base - behind) % segment.step
            keys = (last - behind - first) // segment.step + 1
            if left is not None and keys > segment.count + left:  # no query's window reaches further back
                first += (keys - segment.count - left) * segment.step
                keys = segment.count + left
            rounds[behind].append(Piece(segment.count, start + first, keys, segment.step, left))
    return rounds


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over several disjoint sets of keys from the softmax over each: ``out = sum_i exp(lse_i - lse) out_i``
    with ``lse = logsumexp_i lse_i`` (Flash-Decoding's combination). Parts are ``(out [rows, heads, dim], lse [rows,
    heads])``."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().nan_to_num(0.0)  # -inf - -inf: no key in any part
    return sum(out.float() * weight.unsqueeze(-1) for (out, _), weight in zip(parts, weights, strict=True)), lse


ATTENTION = Registry("attention")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rounds: Sequence[Sequence[Piece]],
    scale: float,
    backend: Backend,
) -> torch.Tensor:
    """``[rows, heads, value_dim]``: attention of the local queries, rounds merged."""
    return merge([backend.run(query, key, value, tiles, scale) for tiles in rounds])[0].to(query.dtype)


from .flash import BACKENDS as _FLASH  # noqa: E402  (they need Piece and Backend)
from .sdpa import BACKEND as _SDPA  # noqa: E402

for _backend in (*_FLASH, _SDPA):
    ATTENTION.register(_backend)
