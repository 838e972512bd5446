"""From a recipe to a config, a checkpoint and loaded models."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

import cpkit
from cpkit import ConfigurationError, Topology
from cpkit.kernels import KINDS

from .ranks import Ranks
from .recipe import Loaded
from .schema import nearest

__all__ = ["checkpoint", "config_of", "dtype_of", "load_alone", "load_cp", "load_native", "load_plain"]

_LEGACY = {"model_type", "rope_theta", "rope_scaling", "quantization_config", "torch_dtype", "dtype"}


def config_of(loaded: Loaded) -> Any:
    """The model's config: the recipe's own fields if it gives them, else the checkpoint's. No weights are needed."""
    fields = loaded.recipe.random_model or loaded.recipe.config
    if fields is not None:
        return _made(dict(fields), loaded)
    return _found(loaded)


def _made(fields: dict[str, Any], loaded: Loaded) -> Any:
    key = "random_model" if loaded.recipe.random_model else "config"
    kind = fields.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigurationError(f"{key}.model_type {kind!r} is not known{nearest(kind, list(CONFIG_MAPPING))}")
    known = set(CONFIG_MAPPING[kind]().to_dict()) | set(CONFIG_MAPPING[kind].attribute_map) | _LEGACY
    for name in fields.keys() - known:
        if name not in _source_words(CONFIG_MAPPING[kind]):
            raise ConfigurationError(
                f"{loaded.path.name}: unknown key {key + '.' + name!r}{nearest(name, sorted(known), key + '.')}"
            )
    return AutoConfig.for_model(kind, **fields)


def _source_words(config_class: type) -> set[str]:
    """Every word in the family's sources: they also read fields that the config class does not declare."""
    config = config_class.__module__
    modules = (importlib.import_module(m) for m in (config, config.replace(".configuration_", ".modeling_")))
    return {word for module in modules for word in re.findall(r"\w+", inspect.getsource(module))}


def _found(loaded: Loaded) -> Any:
    name = loaded.model()
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model {name!r} could not be read: it is neither a folder beside {loaded.path} or in the working "
            f"directory, nor a Hub name that answers ({str(error).strip().splitlines()[0]})"
        ) from error


def dtype_of(loaded: Loaded) -> torch.dtype:
    """The dtype that weights will have: the recipe's, or the checkpoint's where it says auto."""
    name = loaded.recipe.dtype
    return (config_of(loaded).dtype or torch.float32) if name == "auto" else getattr(torch, name)


@contextmanager
def checkpoint(loaded: Loaded, ranks: Ranks) -> Iterator[str]:
    """The folder or Hub name to load. For a random model, a seeded checkpoint that rank 0 writes and removes."""
    if loaded.recipe.random_model is None:
        _check_config(loaded)
        yield str(loaded.model())
        return
    folder = ranks.shared(lambda: _write_random(loaded))
    try:
        yield folder
    finally:
        if ranks.first:
            shutil.rmtree(folder, ignore_errors=True)


def _check_config(loaded: Loaded) -> None:
    """The recipe's own config fields, which plans are made from, must be those of the checkpoint."""
    fields, found = loaded.recipe.config, _found(loaded)
    if fields is None:
        return
    ours = _made(dict(fields), loaded)
    for name in fields.keys() - {"quantization_config", "model_type"}:
        if getattr(ours, name, None) != getattr(found, name, None):
            raise ConfigurationError(
                f"{loaded.path.name}: config.{name} is {getattr(ours, name, None)!r} and {loaded.model()} has "
                f"{getattr(found, name, None)!r}; correct the recipe, or leave its config out"
            )


def _write_random(loaded: Loaded) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(loaded), dtype=dtype_of(loaded))
    folder = tempfile.mkdtemp(prefix="cpkit-random-")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    with quiet():
        model.save_pretrained(folder)
    return folder


@contextmanager
def quiet(warnings: bool = False) -> Iterator[None]:
    """Without transformers' progress bars, which several ranks would mix up; with ``warnings``, without those too."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    if warnings:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def load_cp(loaded: Loaded, path: str, topology: Topology | None = None) -> nn.Module:
    """The model as the recipe says, or with another topology; every rank calls it."""
    recipe = loaded.recipe
    options = {name: getattr(recipe, name) for name in ("strategy", *KINDS, "communicator", "cache", "dtype")}
    with quiet():
        return cpkit.from_pretrained(
            path,
            topology=topology or recipe.topology.topology(),
            device=recipe.hardware.device,
            **options,
        )


def load_plain(loaded: Loaded, path: str, ranks: Ranks, dtype: str | None = None, **more: Any) -> nn.Module:
    """transformers' own model, whole, on this rank's device."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or loaded.recipe.dtype, device_map={"": ranks.torch_device()}, **more
        )
    return model.eval()


def load_alone(loaded: Loaded, path: str, ranks: Ranks, topology: Topology) -> nn.Module:
    """The model under cpkit, whole on this rank; ``topology`` is connected and makes each rank a DP group."""
    options = {name: getattr(loaded.recipe, name) for name in ("strategy", *KINDS, "cache")}
    return cpkit.apply(load_plain(loaded, path, ranks), topology, **options)


def load_native(loaded: Loaded, path: str, ranks: Ranks, experts: bool) -> nn.Module:
    """transformers' own tensor parallelism over all ranks, with or without its expert parallelism."""
    sizes = {"tp_size": ranks.world, **({"ep_size": ranks.world} if experts else {})}
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=loaded.recipe.dtype, distributed_config=DistributedConfig(**sizes)
        )
    return model.eval()
