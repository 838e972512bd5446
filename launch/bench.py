"""``bench``: a prefill under context parallelism against plain transformers and its own TP and EP, in one run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

import cpkit
from cpkit import ConfigurationError, Topology
from cpkit.topology import num_experts

from .checkpoint import config_of, load_alone, load_cp, load_native, load_plain
from .peak import measured
from .ranks import Ranks
from .recipe import Loaded
from .wire import WireCount

__all__ = ["bench"]

Progress = Callable[[str], None]
WARM_TOKENS = 64


@dataclass
class Entrant:
    """One way of running the model: on rank 0 alone, or on all ranks together."""

    name: str
    everywhere: bool
    load: Callable[[], nn.Module]
    model: Any = None
    missing: str = ""


def bench(
    loaded: Loaded,
    path: str,
    inputs: Sequence[torch.Tensor],
    rounds: int,
    ranks: Ranks,
    progress: Progress,
    only: str = "",
) -> dict[str, Any]:
    """Time the prefill that ``generate`` does of each of ``inputs`` (``[1, tokens]``), ``rounds`` times in turn.

    All ranks call it and get the same figures: for each length and entrant seconds (of the slowest rank), ratio to
    plain transformers, bytes that a rank receives and its peak memory above what it had (of the rank with most), and
    the largest difference of its last logits. ``only`` is what the names of the entrants must begin with.
    """
    everyone = entrants(loaded, path, ranks)
    field = [entrant for entrant in everyone if entrant.name.startswith(only)]
    if not field:
        raise ConfigurationError(f"--only {only!r} leaves nobody; there are {', '.join(e.name for e in everyone)}")
    for entrant in field:
        progress(f"loading {entrant.name}")
        _load(entrant, ranks)
    runs = [_bench_length(field, ids, rounds, ranks, progress) for ids in inputs]
    return {
        "recipe": loaded.name,
        "ranks": ranks.world,
        "device": ranks.device,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "runs": runs,
        "not_run": {e.name: e.missing for e in field if e.missing},
    }


def entrants(loaded: Loaded, path: str, ranks: Ranks) -> list[Entrant]:
    """Plain transformers, cpkit on one rank, the recipe, the recipe with experts over all ranks, and transformers' TP
    and TP+EP."""
    topology, world = loaded.recipe.topology.topology(), ranks.world
    alone = Topology(dp=world)  # rank 0 is a DP group of its own, which needs no other rank
    alone.connect(ranks.device)
    field = [
        Entrant("transformers", False, lambda: load_plain(loaded, path, ranks)),
        Entrant("cpkit one rank", False, lambda: load_alone(loaded, path, ranks, alone)),
    ]
    if world == 1:
        return field
    field.append(Entrant(f"cpkit {_sizes(topology)}", True, lambda: load_cp(loaded, path)))
    config = config_of(loaded)
    has_experts = num_experts(config) > 0
    spread = dataclasses.replace(topology, ep=world)
    if has_experts and spread != topology:
        field.append(Entrant(f"cpkit {_sizes(spread)}", True, lambda: load_cp(loaded, path, spread)))
    field.append(Entrant(f"transformers tp={world}", True, lambda: load_native(loaded, path, ranks, False)))
    if has_experts:
        name = f"transformers tp={world} ep={world}"
        field.append(Entrant(name, True, lambda: load_native(loaded, path, ranks, True)))
    return field


def _sizes(topology: Topology) -> str:
    return " ".join(f"{k}={v}" for k, v in dataclasses.asdict(topology).items() if v > 1)


def _load(entrant: Entrant, ranks: Ranks) -> None:
    """Load on the ranks that take part; where one of them cannot, nobody runs it and the reason is kept."""
    reason = ""
    if entrant.everywhere or ranks.first:
        try:
            entrant.model = entrant.load()
        except Exception as error:  # whatever another library raises for what it cannot do is a result here
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    entrant.missing = next((r for r in ranks.gathered(reason) if r), "")
    if entrant.missing:
        entrant.model = None


def _bench_length(
    field: Sequence[Entrant], ids: torch.Tensor, rounds: int, ranks: Ranks, progress: Progress
) -> dict[str, Any]:
    running = [e for e in field if not e.missing]
    first: dict[str, dict[str, Any]] = {}
    for entrant in running:
        progress(f"{ids.shape[1]} tokens: memory and bytes of {entrant.name}")
        first[entrant.name] = _turn(entrant, ranks, partial(_observe, entrant.model, ids, ranks))
    seconds: dict[str, list[float]] = {e.name: [] for e in running}
    for number in range(rounds):
        for entrant in running:
            progress(f"{ids.shape[1]} tokens: round {number + 1} of {rounds}, {entrant.name}")
            found = _turn(entrant, ranks, partial(_time, entrant.model, ids, ranks))
            seconds[entrant.name].append(found["seconds"])
    return {"tokens": ids.shape[1], "entrants": _compared(first, seconds)}


def _turn(entrant: Entrant, ranks: Ranks, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """``work`` on the ranks that take part: rank 0's findings, numbers the largest of any rank."""
    ranks.synchronize()
    found = ranks.gathered(work()) if entrant.everywhere else [ranks.shared(work)]
    return {k: max(f[k] for f in found) if isinstance(v, (int, float)) else v for k, v in found[0].items()}


def _prefill(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, logits_to_keep=1).logits


def _observe(model: nn.Module, ids: torch.Tensor, ranks: Ranks) -> dict[str, Any]:
    """Bytes, peak memory and last logits, in a forward of its own after a short one that warms up."""
    _prefill(model, ids[:, :WARM_TOKENS])
    with measured(ranks.device) as peak, WireCount() as wire, cpkit.trace() as trace:
        logits = _prefill(model, ids)
        ranks.finish()
    by_name = {name: entry["bytes"] for name, entry in trace.totals().items()}
    return {"bytes": wire.bytes, "by_name": by_name, "peak": peak.above, "logits": logits.float().cpu()}


def _time(model: nn.Module, ids: torch.Tensor, ranks: Ranks) -> dict[str, Any]:
    started = time.perf_counter()
    _prefill(model, ids)
    ranks.finish()
    return {"seconds": time.perf_counter() - started}


def _compared(first: dict[str, dict[str, Any]], seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One entry an entrant; ``ratio`` is plain transformers' time over its own, of the medians, above 1 is faster."""
    plain = seconds.get("transformers")
    reference = first["transformers"]["logits"] if plain else None
    return [
        {
            "name": name,
            "seconds_min": min(times),
            "seconds_median": median(times),
            "ratio": median(plain) / median(times) if plain else None,
            "ratio_min": min(plain) / min(times) if plain else None,
            "bytes": first[name]["bytes"],
            "bytes_by_name": first[name]["by_name"],
            "peak_bytes": first[name]["peak"],
            "logit_difference": (first[name]["logits"] - reference).abs().max().item() if plain else None,
        }
        for name, times in seconds.items()
    ]
