"""The indexer on NVIDIA GPUs with DeepGEMM's scores of 8-bit queries and keys, as DeepSeek serves it.

Scores near the edge of a selection differ from transformers' fp32 ones, so this backend runs only where it is asked for
by name. Each vector is rounded to e4m3 with a scale of its own: before or after the keys of other ranks arrive, the
bytes are the same. They arrive as they are in the cache, which transformers' caches keep in the model's dtype.

The package is bound by the names of its parameters, never by version string, and tried on a few rows before it is used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Container
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import pad

from ..backends import Backend
from ..errors import ConfigurationError
from . import Space, select

SCORES = 1 << 28  # at a time: 1 GiB
LARGEST = 448.0  # of e4m3

Rounded = tuple[torch.Tensor, torch.Tensor]  # e4m3 and what to multiply it with


def run(
    query: torch.Tensor,
    weights: torch.Tensor,
    key: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """See ``cpkit.indexer``."""
    keys = _rounded(key)

    def scored(rows: slice, start: int, stop: int, space: Space) -> torch.Tensor:
        ranges = torch.stack([starts[rows], ends[rows]]).int().to(query.device)
        return score(query[rows], weights[rows], keys, ranges, stop - start)

    return select(query, starts, ends, topk, _rows, scored)


def _rows(keys: int) -> int:
    """How many queries meet so many keys at once."""
    return max(1, min(4096, SCORES // max(keys, 1)))


def score(
    query: torch.Tensor, weights: torch.Tensor, keys: Rounded, ranges: torch.Tensor, columns: int
) -> torch.Tensor:
    """``[rows, columns]`` scores, fp32, of ``query [rows, heads, dim]``: those of a row's own keys, from ``ranges[0]``
    to ``ranges[1] - 1``, and after them anything."""
    heads = query.shape[1]
    if heads > 64:
        raise ConfigurationError(f"indexer backend 'deepgemm' takes up to 64 heads, not {heads}; use 'torch'")
    extra = (32 if heads <= 32 else 64) - heads
    query, scale = _rounded(pad(query, (0, 0, 0, extra)))
    return kernel()(query, keys, pad(weights, (0, extra)) * scale, *ranges, columns).float()


def _rounded(vectors: torch.Tensor) -> Rounded:
    """``[..., dim]`` in e4m3, and the fp32 scale of each vector ``[...]``."""
    vectors = vectors.float()
    scale = vectors.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LARGEST
    return (vectors / scale).to(torch.float8_e4m3fn).contiguous(), scale.squeeze(-1).contiguous()


@lru_cache
def kernel() -> Callable:
    """``logits(query, keys, weights, starts, ends, columns)`` of the installed DeepGEMM, whatever its release calls it:
    column ``j`` is a row's key ``starts + j``."""
    module = importlib.import_module("deep_gemm")
    plain = getattr(module, "fp8_mqa_logits", None)  # up to 2.6
    function: Any = plain or getattr(module, "fp8_fp4_mqa_logits", None)
    known = _parameters(function)
    if "max_seqlen_k" not in known:
        raise ImportError("deep_gemm has no MQA logits of each row's own keys (max_seqlen_k); install a newer release")
    options = {"clean_logits": False} if "clean_logits" in known else {}

    def logits(query, keys, weights, starts, ends, columns):
        query = query if plain else (query, None)  # no scales: e4m3, not fp4
        return function(query, keys, weights, starts, ends, max_seqlen_k=columns, **options)

    return logits


def _parameters(function: Callable | None) -> Container[str]:
    """The names of a function's parameters; of a compiled one, the docstring that begins with its signature."""
    try:
        return inspect.signature(function).parameters if function else ()
    except ValueError:
        return function.__doc__ or ""


def check(device: str) -> None:
    """Score a few rows that 8 bits hold exactly; raises ``ImportError`` where the kernel answers something else."""
    draw = torch.Generator().manual_seed(0)
    query, key = (torch.randn(*shape, generator=draw).sign() for shape in ((6, 32, 64), (300, 64)))
    key *= torch.arange(1, 301).unsqueeze(1)  # each with another scale
    query, key, weights = (x.to(device) for x in (query, key, torch.randn(6, 32, generator=draw)))
    ranges = torch.tensor([[0, 0, 3, 3, 40, 40], [1, 260, 4, 300, 41, 296]], dtype=torch.int32, device=device)
    found = score(query, weights, _rounded(key), ranges, 297)
    expected = torch.einsum("qhk,qh->qk", torch.einsum("qhd,kd->qhk", query, key).relu(), weights)
    for row, (start, end) in enumerate(ranges.t().tolist()):
        difference = (found[row, : end - start] - expected[row, start:end]).abs().max()
        if not difference < 0.01 * expected[row].abs().max():  # some kernels answer in bf16; NaN is not less
            raise ImportError("deep_gemm's MQA logits are not the scores that its documentation promises")


def _missing(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    if device_type != "cuda":
        return f"runs on CUDA, not {device_type}"
    if head_dim not in (32, 64, 128):
        return f"takes head sizes 32, 64 and 128, not {head_dim}"
    try:
        kernel()
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        major = torch.cuda.get_device_capability()[0]
        if major < 9:
            return f"needs compute capability 9.0 or newer (Hopper), not {major}.x"
        check(device_type)
    except Exception as error:  # a library that does not load, a compiler that is not found: it cannot serve
        return f"{error}; pip install sgl-deep-gemm"
    return ""


BACKEND = Backend("deepgemm", run, _missing, exact=False)
