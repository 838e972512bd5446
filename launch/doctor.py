"""``doctor``: what a machine and an environment can serve, and why not."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch
import torch.distributed as dist
import transformers

import cpkit
from cpkit.kernels import KINDS

__all__ = ["doctor"]

_PACKAGES = (
    "torch", "transformers", "accelerate", "safetensors", "numpy", "flash-attn", "flash-attn-3", "sgl-flash-mla",
    "sgl-deep-gemm",
)  # fmt: skip
HEAD_DIMS = {"attention": 128, "sparse_attention": 576, "indexer": 128}  # of the published models


def doctor() -> dict[str, Any]:
    """Versions, devices, backends of every kind of kernel and of process groups, each with what is wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return {
        "versions": {"python": platform.python_version(), "cpkit": cpkit.__version__} | _versions(),
        "devices": _devices(),
        "kernels": {kind: _kernels(kind, device, dtype) for kind in KINDS},
        "process_groups": _process_groups(),
        "families": _families(),
    }


def _kernels(kind: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """For the kind's head size: why a backend cannot serve, '' for nothing; and those that ``auto`` never takes."""
    size, known = HEAD_DIMS[kind], KINDS[kind].known
    return {
        "asked": f"{device}, {str(dtype).removeprefix('torch.')}, head size {size}",
        "backends": {name: backend.missing(device, dtype, size) for name, backend in known.items()},
        "by_name_only": [name for name, backend in known.items() if not backend.exact],
    }


def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: list[dict[str, Any]] = [
        {
            "name": "cpu",
            "cores": cores,
            "memory_bytes": psutil.virtual_memory().total,
            "threads_a_rank": torch.get_num_threads(),
        }
    ]
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        found.append(
            {
                "name": facts.name,
                "index": number,
                "capability": f"{facts.major}.{facts.minor}",
                "memory_bytes": facts.total_memory,
            }
        )
    return found


def _process_groups() -> dict[str, str]:
    """What is wrong with each backend of torch.distributed, '' for nothing."""
    if not dist.is_available():
        return dict.fromkeys(("gloo", "nccl"), "this torch was built without torch.distributed")
    gloo = "" if dist.is_gloo_available() else "this torch was built without gloo"
    nccl = "" if dist.is_nccl_available() else "this torch was built without NCCL"
    if not nccl and not torch.cuda.is_available():
        nccl = "no CUDA device"
    return {"gloo": gloo, "nccl": nccl}


def _families() -> dict[str, str]:
    """Why a model family cannot be served with what is installed, '' for nothing."""
    import cpkit.models  # noqa: F401  (fills the registry)
    from cpkit.patch import _FAMILIES, SpecifierSet

    return {
        name: ""
        if SpecifierSet(family.versions).contains(transformers.__version__, prereleases=True)
        else f"checked with transformers {family.versions}, and {transformers.__version__} is installed"
        for name, family in sorted(_FAMILIES.items())
    }
