"""Loading a checkpoint so that each rank reads and holds only its part.

transformers' own loader does the work: it builds the model without weights, shards the parameters by its TP and EP
plans, and then reads from the safetensors files just the slices that this rank keeps. cpkit puts its groups in place of
the meshes that transformers would make.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from .patch import _planned_swaps, _swap, family_of, open_session, shard
from .topology import Topology

__all__ = ["from_pretrained"]


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    topology: Topology | None = None,
    strategy: str = "auto",
    attention: str = "auto",
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
    session = open_session(
        config,
        topology,
        strategy=strategy,
        attention=attention,
        communicator=communicator,
        cache=cache,
        check_inputs=check_inputs,
        dtype=known or config.dtype or torch.float32,
        device_type=device_type,
    )
    if "device_map" in kwargs:
        raise ValueError("device_map and cpkit.from_pretrained exclude each other: each rank loads to its own device")
    kwargs["device_map"] = torch.cuda.current_device() if device_type == "cuda" else "cpu"
    plain = AutoModelForCausalLM._model_mapping[type(config)]

    class Sharded(plain):
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
    model = Sharded.from_pretrained(
        name_or_path, config=config, dtype=dtype, distributed_config=DistributedConfig(), **kwargs
    )
    model.config.distributed_config = None
    session.config = model.base_model.config
    _swap(_planned_swaps(model, session), model, session)
    return model


def _hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")
    return {name: kwargs[name] for name in names if name in kwargs}
