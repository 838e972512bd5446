"""Attention over selected latents: multi-head latent attention in absorbed form, at a cost per query of ``topk``.

A latent is what all heads share of a key and its value; queries have been multiplied into its space (DeepSeek-V2,
section 2.1.2), so heads of a query attend to the same vectors, whose first ``value_dim`` numbers are also the values.

A backend is a function ``run(query, latent, selected, scale, value_dim) -> out``: ``query [rows, heads, dim]``,
``latent [keys, dim]``, ``selected [rows, topk]`` int32 keys, ``-1`` after the last; ``out [rows, heads, value_dim]`` in
fp32 or the query's dtype, with the softmax in fp32. Every row selects at least one key.
"""

from __future__ import annotations

from ..backends import Registry

__all__ = ["SPARSE_ATTENTION"]

SPARSE_ATTENTION = Registry("sparse_attention")

from .flashmla import BACKEND as _FLASHMLA  # noqa: E402
from .gathered import BACKEND as _GATHERED  # noqa: E402

SPARSE_ATTENTION.register(_FLASHMLA)
SPARSE_ATTENTION.register(_GATHERED)
