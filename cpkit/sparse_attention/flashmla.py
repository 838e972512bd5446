"""Sparse attention on NVIDIA GPUs with FlashMLA's sparse prefill kernel, in bf16.

The kernel takes DeepSeek's latents (512 numbers, 64 more of the rope key), 64 or 128 heads and a multiple of 128
selected keys; heads and selections are padded. The package is bound by the names of its parameters, never by version
string, and tried on a few rows before it is used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn.functional import pad

from ..backends import Backend


def run(
    query: torch.Tensor, latent: torch.Tensor, selected: torch.Tensor, scale: float, value_dim: int
) -> torch.Tensor:
    """See ``cpkit.sparse_attention``."""
    counts = (selected >= 0).sum(1, dtype=torch.int32)
    keys, chosen = latent.contiguous().unsqueeze(1), pad(selected, (0, -selected.shape[1] % 128), value=-1).unsqueeze(1)
    parts = []
    for part in query.split(128, dim=1):
        heads = part.shape[1]
        part = pad(part, (0, 0, 0, (64 if heads <= 64 else 128) - heads))
        parts.append(kernel()(part, keys, chosen, counts, scale, value_dim)[:, :heads])
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@lru_cache
def kernel() -> Callable:
    """``attend(query, keys, chosen, counts, scale, value_dim) -> out`` of the installed FlashMLA."""
    function = importlib.import_module("flash_mla").flash_mla_sparse_fwd
    known = inspect.signature(function).parameters
    options = {"use_legacy": True} if "use_legacy" in known else {}  # there, the others have no rope numbers

    def attend(query, keys, chosen, counts, scale, value_dim):
        lengths = {"topk_length": counts} if "topk_length" in known else {}
        return function(query, keys, chosen, scale, d_v=value_dim, **options, **lengths)[0]

    return attend


def check(device: str) -> None:
    """Attend with a few rows whose result is known; raises ``ImportError`` where the kernel answers something else."""
    draw = torch.Generator().manual_seed(0)
    query, latent = (torch.randn(*shape, 576, generator=draw).bfloat16() for shape in ((2, 8), (5,)))
    latent[2] = float("nan")  # nobody selects it
    selected = torch.tensor([[1, 3, 4], [4, -1, -1]], dtype=torch.int32)
    found = run(query.to(device), latent.to(device), selected.to(device), 0.1, 512).float().cpu()
    for row, keys in enumerate(([1, 3, 4], [4])):
        chosen = latent[keys].float()
        expected = (query[row].float() @ chosen.t() * 0.1).softmax(-1) @ chosen[:, :512]
        if not (found[row] - expected).abs().max() < 0.05:
            raise ImportError("flash_mla_sparse_fwd does not compute what its documentation promises")


def _missing(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    if device_type != "cuda":
        return f"runs on CUDA, not {device_type}"
    if dtype != torch.bfloat16:
        return f"takes bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim != 576:
        return f"takes latents of 512 + 64 numbers, not {head_dim}"
    try:
        kernel()
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        major = torch.cuda.get_device_capability()[0]
        if major not in (9, 10):
            return f"not built for compute capability {major}.x"
        check(device_type)
    except Exception as error:  # a library that does not load, a kernel that this release has dropped: it cannot serve
        return f"{error}; pip install sgl-flash-mla"
    return ""


BACKEND = Backend("flashmla", run, _missing)
