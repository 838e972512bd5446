"""FlashAttention on NVIDIA GPUs: the installed FlashAttention 3, 4 or 2, or the one inside torch.

All take packed queries ``[rows, heads, dim]`` with cumulative lengths and are causal from the bottom right, which is
just what a piece is: one launch a round. Where keys of several pieces overlap (zigzag's early and late block), the
torch kernel reads them through a page table; the others get their keys one after the other in a copy. Values are padded
to the keys' size, or keys to theirs, but for the sizes that the kernel takes as they are. Packages are bound by the
names of their parameters, never by version string, and only when used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, groupby

import torch

from ..backends import Backend
from . import Piece

PAGE = 256  # keys a page; FlashAttention-2 takes multiples of 256
DEEPSEEK = (192, 128)  # sizes of keys and values for which FlashAttention 3 and 4 have kernels


def run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Sequence[Piece],
    scale: float,
    *,
    kernel: Callable[[], Callable],
    paged: bool = False,
    unequal: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``cpkit.attention``. ``kernel()`` gives the varlen function to launch, once for each window size; it takes
    keys and values of one size, or of the two ``unequal`` ones."""
    launch, parts, start, value_dim = kernel(), [], 0, value.shape[-1]
    if (key.shape[-1], value_dim) != unequal:
        size = max(key.shape[-1], value_dim)
        query, key, value = (_padded(x, size) for x in (query, key, value))
    for left, group in groupby(pieces, key=lambda p: p.left):
        tiles = list(group)
        rows = sum(p.queries for p in tiles)
        q = query[start : start + rows]
        start += rows
        window = (-1, 0) if left is None else (left, 0)
        if not any(p.keys for p in tiles):
            parts.append(_blind(q, value))
            continue
        if paged and all(p.step == 1 and p.first % PAGE == 0 for p in tiles):
            out, lse = launch(q, *_pages(key, value, tiles), scale=scale, window=window)
        else:
            k, v = (_joined(x, tiles) for x in (key, value))
            out, lse = launch(q, k, v, _lengths(tiles, q.device), {}, scale=scale, window=window)
        parts.append((out, lse.masked_fill(lse == float("inf"), float("-inf"))))  # FA-2 marks blind rows with +inf
    out, lse = parts[0] if len(parts) == 1 else (torch.cat([o for o, _ in parts]), torch.cat([x for _, x in parts]))
    return out[..., :value_dim], lse


def _padded(heads: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - heads.shape[-1]
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def _blind(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    return out, torch.full(query.shape[:2], float("-inf"), dtype=torch.float32, device=query.device)


def _joined(keys: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """The pieces' keys one after the other; no copy for a single contiguous piece."""
    parts = [p.slice(keys) for p in pieces]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


def _lengths(pieces: Sequence[Piece], device: torch.device) -> dict:
    """Cumulative and largest lengths of queries and keys."""
    queries, keys = [p.queries for p in pieces], [p.keys for p in pieces]
    return {
        "cu_q": torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device),
        "cu_k": torch.tensor([0, *accumulate(keys)], dtype=torch.int32, device=device),
        "max_q": max(queries),
        "max_k": max(keys),
    }


def _pages(key: torch.Tensor, value: torch.Tensor, pieces: Sequence[Piece]):
    """Keys and values ``[pages, PAGE, kv_heads, dim]``, lengths, and the table of each piece's pages."""
    pad = -len(key) % PAGE
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(0, (-1, PAGE)) for x in (key, value))
    most = max(-(-p.keys // PAGE) for p in pieces)
    table = torch.tensor([[p.first // PAGE + i for i in range(most)] for p in pieces], dtype=torch.int32)
    lengths = _lengths(pieces, key.device)
    lengths["cu_k"] = None
    used = torch.tensor([p.keys for p in pieces], dtype=torch.int32, device=key.device)
    return k, v, lengths, {"seqused_k": used, "block_table": table.clamp_(max=len(k) - 1).to(key.device)}


def _torch_kernel() -> Callable:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    def launch(q, k, v, lengths, pages, *, scale, window):
        out, lse = varlen_attn(
            q,
            k,
            v,
            lengths["cu_q"],
            lengths["cu_k"],
            lengths["max_q"],
            lengths["max_k"],
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=window,
            enable_gqa=q.shape[1] != k.shape[-2],
            **pages,
        )
        return out, lse.transpose(0, 1)

    return launch


@lru_cache
def _package_kernel(module: str) -> Callable:
    """``flash_attn_varlen_func`` of FlashAttention 2 (``flash_attn``), 3 (``flash_attn_interface``) or 4
    (``flash_attn.cute``), whatever the snapshot calls its log-sum-exp switch."""
    function = importlib.import_module(module).flash_attn_varlen_func
    known = inspect.signature(function).parameters
    switch = next((s for s in ("return_lse", "return_softmax_lse", "return_attn_probs") if s in known), None)
    if switch is None:
        raise ImportError(f"{module}.flash_attn_varlen_func cannot return the log-sum-exp; install another release")

    def launch(q, k, v, lengths, pages, *, scale, window):
        arguments = {
            "cu_seqlens_q": lengths["cu_q"],
            "cu_seqlens_k": lengths["cu_k"],
            "max_seqlen_q": lengths["max_q"],
            "max_seqlen_k": lengths["max_k"],
            "softmax_scale": scale,
            "causal": True,
            "window_size": window if window[0] >= 0 else (None, None) if module.endswith("cute") else (-1, -1),
            switch: True,
        }
        out, lse, *_ = function(q, k, v, **arguments)
        return out, lse.transpose(0, 1)

    return launch


def _missing(
    module: str, capabilities: range, install: str, device_type: str, dtype: torch.dtype, head_dim: int
) -> str:
    if device_type != "cuda":
        return f"runs on CUDA, not {device_type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256:
        return f"takes head sizes up to 256, not {head_dim}"
    try:
        importlib.import_module(module) if module.startswith("torch.") else _package_kernel(module)
    except ImportError as error:
        return f"{error}; {install}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    major = torch.cuda.get_device_capability()[0]
    return "" if major in capabilities else f"not built for compute capability {major}.x"


def _backend(name: str, module: str, capabilities: range, install: str) -> Backend:
    of_torch = module.startswith("torch.")
    kernel = _torch_kernel if of_torch else partial(_package_kernel, module)
    missing = partial(_missing, module, capabilities, install)
    unequal = DEEPSEEK if name in ("flash3", "flash4") else None
    return Backend(name, partial(run, kernel=kernel, paged=of_torch, unequal=unequal), missing)


BACKENDS: tuple[Backend, ...] = (
    _backend("flash3", "flash_attn_interface", range(9, 10), "build it from the hopper folder of FlashAttention"),
    _backend("flash4", "flash_attn.cute", range(9, 13), "pip install --pre flash-attn-4"),
    _backend("flash2", "flash_attn", range(8, 13), "pip install flash-attn"),
    _backend("varlen", "torch.nn.attention.varlen", range(8, 13), "pip install 'torch>=2.13'"),
)
