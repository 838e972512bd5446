"""Loading a checkpoint so that each rank reads and holds only its part.

transformers' own loader does the work: it builds the model without weights, shards the parameters by its TP and EP
plans, and then reads from the safetensors files just the slices that this rank keeps. cpkit puts its groups in place of
the meshes that transformers would make.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from .errors import CheckpointError
from .faults import agree
from .patch import family_of, open_session, plan_swaps, shard, swap
from .session import Options
from .topology import Topology

__all__ = ["from_pretrained"]


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    topology: Topology | None = None,
    strategy: str = "auto",
    attention: str = "auto",
    sparse_attention: str = "auto",
    indexer: str = "auto",
    communicator: str = "auto",
    cache: str = "replicated",
    check_inputs: bool = True,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Load a causal LM from a Hub name or a folder, sharded and patched; in eval mode, on this rank's device.

    The options are those of ``cpkit.apply``; ``device`` is "cuda" or "cpu" (by default what there is); ``kwargs`` go
    to transformers' ``from_pretrained``. Raises what ``apply`` raises before any weight is read.
    """
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(name_or_path, **_hub_arguments(kwargs))
    family_of(config)
    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    known = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    kernels = {"attention": attention, "sparse_attention": sparse_attention, "indexer": indexer}
    session = open_session(
        config,
        topology,
        Options(strategy, kernels, communicator, cache, check_inputs),
        known or config.dtype or torch.float32,
        device_type,
    )
    if "device_map" in kwargs:
        raise ValueError("device_map and cpkit.from_pretrained exclude each other: each rank loads to its own device")
    kwargs["device_map"] = torch.cuda.current_device() if device_type == "cuda" else "cpu"
    plain: Any = AutoModelForCausalLM._model_mapping[type(config)]

    class Sharded(plain):  # type: ignore[misc, valid-type]
        """``plain`` while it loads: transformers asks the class for its meshes and to distribute the model."""

        @classmethod
        def prepare_distribute_model(cls, distributed_config, device_map=None):
            return distributed_config, device_map, None

        @classmethod
        def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
            model.__class__ = plain
            shard(model, session)
            model._is_distributed_loading_by_transformers = True
            return model

    Sharded.__name__, Sharded.__qualname__ = plain.__name__, plain.__qualname__
    problem: CheckpointError | None = None
    model: Any = None
    try:
        model, report = Sharded.from_pretrained(
            name_or_path,
            config=config,
            dtype=dtype,
            distributed_config=DistributedConfig(),
            output_loading_info=True,
            **kwargs,
        )
        _check_report(report, name_or_path)
    except CheckpointError as error:
        problem = error
    except Exception as error:
        if session.groups.world.size == 1 and not isinstance(error, SafetensorError):
            raise
        problem = CheckpointError(f"{_broken_file(name_or_path)}: {type(error).__name__}: {error}")
        problem.__cause__ = error
    agree(session.groups.world, problem, 0, session.device)
    model.config.distributed_config = None
    session.config = model.base_model.config
    swap(plan_swaps(model, session), model, session)
    return model


def _check_report(report: dict[str, Any], name_or_path: str | os.PathLike[str]) -> None:
    """transformers fills what a checkpoint lacks with random weights and says so in a log; here it is an error."""
    for kind, said in {"missing_keys": "lacks", "mismatched_keys": "has other shapes for"}.items():
        if names := sorted(map(str, report[kind])):
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(
                f"{name_or_path} {said} {', '.join(names[:5])}{more}; use the checkpoint that belongs to this config"
            )


def _broken_file(name_or_path: str | os.PathLike[str]) -> str:
    """The first safetensors file of a folder that does not open, to name it; else the checkpoint's name."""
    for file in sorted(Path(name_or_path).glob("*.safetensors")):
        try:
            safe_open(file, framework="pt").__enter__()
        except SafetensorError:
            return f"{file} is damaged or cut short; copy it again"
    return f"cannot load {name_or_path}"


def _hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")
    return {name: kwargs[name] for name in names if name in kwargs}
