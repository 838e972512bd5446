"""``plan``: a dry run of a recipe from the config alone, without weights, devices or ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from cpkit import ConfigurationError, Topology
from cpkit.balance import Kept, choose_strategy, imbalance
from cpkit.communicators import choose_communicator, expected_copies
from cpkit.layout import Layout, layout
from cpkit.patch import family_of, open_session, shard
from cpkit.session import Options
from cpkit.topology import num_experts

from .checkpoint import config_of, dtype_of, quiet
from .recipe import Loaded

__all__ = ["plan"]

INDEX_BYTES = 4  # of an expert's or a key's number on the wire


def plan(loaded: Loaded, tokens: int | None = None) -> dict[str, Any]:
    """Rows, work, bytes on the wire, weights and cache of each rank for one prompt of ``tokens`` tokens.

    Without ``tokens``, the recipe's ``max_tokens`` or its prompt's. Bytes of ``all_to_all`` are expected values.
    """
    recipe, config, dtype = loaded.recipe, config_of(loaded), dtype_of(loaded)
    topology = recipe.topology.topology()
    family = family_of(config)
    topology.check_model(config)
    if topology.pp > 1:
        raise ConfigurationError(f"topology.pp = {topology.pp}: pipeline stages are not supported yet; use pp=1")
    tokens = tokens or recipe.max_tokens or (recipe.prompt.tokens if recipe.prompt else None)
    if tokens is None:
        raise ConfigurationError(f"{loaded.name} names no length; give --tokens, or max_tokens in the recipe")
    work = family.work(config)
    strategy, why = recipe.strategy, "asked for"
    if strategy == "auto":
        strategy, why = choose_strategy(work, (tokens,), (0,), topology.cp)
    placed = layout(strategy, (tokens,), (0,), topology.cp)
    flops = work.of_ranks(placed)
    communicator, communicator_why = choose_communicator(
        recipe.communicator,
        num_experts(config),
        getattr(config, "num_experts_per_tok", 0) or 0,
        topology.ep,
        recipe.hardware.device,
    )
    weights = _apart(_weight_bytes, config, topology, dtype)
    kept = family.kept(config)
    cache = sum(k.layers * int(min(tokens, k.last)) * _width(k, topology.tp) for k in kept) * dtype.itemsize
    return {
        "recipe": loaded.name,
        "model": loaded.model() or f"random {config.model_type}",
        "topology": vars(topology),
        "world": topology.world,
        "tokens": tokens,
        "strategy": {"choice": strategy, "why": why},
        "communicator": {"choice": communicator, "why": communicator_why},
        "balance": imbalance(flops),
        "ranks": [
            {"rank": rank, "rows": placed.local_rows[cp], "layer_flops": flops[cp] / topology.tp}
            for rank in range(topology.world)
            for cp in [rank // topology.tp % topology.cp]
        ],
        "wire": _wire(config, kept, topology, placed, communicator, dtype.itemsize),
        "weight_bytes": weights,
        "cache_bytes": cache,
        **_room(loaded, weights + cache),
    }


def _room(loaded: Loaded, needed: int) -> dict[str, Any]:
    """What the recipe's memory leaves for activations."""
    memory = loaded.recipe.hardware.memory_gib
    if memory is None:
        return {"memory_bytes": None, "left_bytes": None, "fits": None}
    left = int(memory * 2**30) - needed
    return {"memory_bytes": int(memory * 2**30), "left_bytes": left, "fits": left > 0}


def _width(kept: Kept, tp: int) -> int:
    """Elements that a rank keeps of a row in one layer."""
    return kept.width if kept.shared else kept.width // tp


def _in_layers(kept: list[Kept], name: str, layers: int) -> str:
    count = sum(k.layers for k in kept if k.name == name)
    return "every layer" if count == layers else f"{count} of {layers} layers"


def _wire(
    config: Any, kept: list[Kept], topology: Topology, placed: Layout, communicator: str, itemsize: int
) -> dict[str, dict[str, Any]]:
    """Bytes that a rank receives in one layer, by the names that ``cpkit.trace`` uses; ``of`` says in which layers."""
    row = config.hidden_size * itemsize
    share = -(-placed.padded_rows // topology.tp)  # rows that a rank of a TP group brings
    wire: dict[str, dict[str, Any]] = {}

    def add(name: str, nbytes: float, of: str) -> None:
        if nbytes:
            wire[name] = {"bytes": round(nbytes), "of": of}

    for k in kept:
        nbytes = placed.padded_rows * (topology.cp - 1) * _width(k, topology.tp) * itemsize
        add(k.name, nbytes, _in_layers(kept, k.name, config.num_hidden_layers))
    topk = getattr(config, "index_topk", placed.rows)
    if topk < placed.rows:  # else all keys are selected, and nothing is scored
        selected = (topology.tp - 1) * share * topk * INDEX_BYTES
        add("selected keys", selected, _in_layers(kept, "index keys", config.num_hidden_layers))
    if topology.ep > 1:
        top_k, others = config.num_experts_per_tok, topology.ep - 1
        if communicator == "gather":
            names, copies = ("gather rows", "gather experts", "gather weights", "scatter expert sums"), float(others)
        else:
            names = ("dispatch rows", "dispatch experts", "dispatch weights", "combine rows")
            copies = expected_copies(num_experts(config), top_k, topology.ep)
            add("expert row counts", 8 * others, "expert layers")
        weight = 4 if "gate.weight" in _kept_in_fp32(config) else itemsize
        for name, width in zip(names, (row, top_k * INDEX_BYTES, top_k * weight, row), strict=True):
            add(name, share * copies * width, "expert layers")
        add("share expert sums", (topology.tp - 1) * share * row, "expert layers")
    reduced = 2 * placed.padded_rows * row * (topology.tp - 1) / topology.tp
    add("tensor parallel sums (transformers)", reduced, "every layer, once for attention")
    dense = getattr(config, "mlp_only_layers", None) or getattr(config, "first_k_dense_replace", None)
    if topology.ep == 1 or dense:
        of = "every layer" if topology.ep == 1 else "layers without experts"
        add("tensor parallel sums of the MLP (transformers)", reduced, of)
    if getattr(config, "n_shared_experts", 0):
        add("tensor parallel sums of shared experts (transformers)", reduced, "expert layers")
    return wire


def _kept_in_fp32(config: Any) -> list[str]:
    """Parts of the names of weights that transformers keeps in fp32, whatever the dtype; a router's among them."""
    return list(AutoModelForCausalLM._model_mapping[type(config)]._keep_in_fp32_modules_strict or ())


def _apart(function: Callable[..., int], *args: Any) -> int:
    """``function(*args)`` in a child process: torch remembers pretended process groups for as long as it lives."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as child:
        return child.submit(function, *args).result()


def _weight_bytes(config: Any, topology: Topology, dtype: torch.dtype) -> int:
    """Of rank 0, which holds the largest part, sharded by the code that shards real weights."""
    with _pretended_ranks(topology.world):
        session = open_session(config, topology, Options(check_inputs=False), dtype, "cpu")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with quiet(warnings=True):  # of rules that match no layer of this model
            shard(model, session)
        return _bytes_of(model, getattr(config, "quantization_config", None), _kept_in_fp32(config))


@contextmanager
def _pretended_ranks(world: int) -> Iterator[None]:
    """A process group of ``world`` ranks of which only this one exists."""
    if dist.is_initialized():
        raise ConfigurationError("plan pretends to be all ranks: run it in one process, without torchrun")
    if world == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _bytes_of(model: nn.Module, quantization: Any, in_fp32: list[str]) -> int:
    """Bytes of the parameters and buffers that this rank holds; those that an FP8 checkpoint stores in 8 bits count
    one byte an element and an fp32 scale a block, those named ``in_fp32`` four."""
    packed = _packed_names(model) if quantization else set()
    block = (quantization or {}).get("weight_block_size") or (128, 128)
    total, seen = 0, set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        count = local.numel()
        if name in packed:
            total += count + 4 * count // (block[0] * block[1])
        else:
            total += 4 * count if any(part in name for part in in_fp32) else local.nbytes
    return total


def _packed_names(model: nn.Module) -> set[str]:
    """Linear and expert weights; never the LM head, embeddings, routers and norms."""
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    return linear | {name for name, p in model.named_parameters() if p.ndim == 3}
