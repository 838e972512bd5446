"""``verify``: the same input with context parallelism and in plain transformers on one rank, compared."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import cpkit
from cpkit import ConfigurationError

from .checkpoint import config_of, dtype_of, load_cp, load_plain, quiet
from .peak import measured
from .ranks import Ranks
from .recipe import Loaded
from .run import forward, generated

__all__ = ["FP32_BOUND", "verify"]

FP32_BOUND = 2e-5  # legal reorderings stay far below it, mistakes far above
ERROR_RATIO = 1.5  # of a 16-bit run's error against fp32, to plain transformers' own
LOGIT_BYTES = 2**30  # up to this size all positions' logits are compared, else those of the last
LAST_POSITIONS = 1024
WARM_TOKENS = 64
TIMED = 2

Layers = list[dict[str, torch.Tensor]]


@dataclass
class Run:
    """What one run left behind, on the CPU but for the cache."""

    seconds: float
    peak: int
    bytes: dict[str, int]
    logits: torch.Tensor  # [positions, vocab] of the last positions
    cache: Layers
    tokens: torch.Tensor  # new ones
    step_logits: torch.Tensor  # [new, vocab]


def verify(loaded: Loaded, path: str, ids: torch.Tensor, tokenizer: Any, ranks: Ranks, progress) -> dict[str, Any]:
    """Run ``ids`` both ways and compare; ``passed`` says the result. All ranks call it and get the same figures.

    In fp32 the largest difference of logits and caches must be at most ``FP32_BOUND`` and the greedy tokens equal.
    In 16 bits the error of the logits against an fp32 run (root mean square: the largest jumps with any one row that
    is routed to another expert) must be at most ``ERROR_RATIO`` times plain transformers' own, and tokens may part only
    where its two candidates are nearer than the largest error.
    """
    keep = _positions(ids.shape[1], config_of(loaded).vocab_size)
    progress("loading with context parallelism")
    ours = _run(loaded, load_cp(loaded, path), ids, keep, ranks, True, progress)
    _free(ranks)
    progress("loading plain transformers on rank 0")
    plain = ranks.alone(lambda: _plain_run(loaded, path, ids, keep, ranks, progress))
    cache_difference = _cache_difference(ours.cache, plain and plain.cache, loaded, ranks)
    peak = max(ranks.gathered(ours.peak))
    found = ranks.shared(lambda: _compare(loaded, path, ids, keep, ours, plain, cache_difference, ranks))
    return found | {
        "recipe": loaded.name,
        "ranks": ranks.world,
        "topology": loaded.recipe.topology.model_dump(),
        "prompt_tokens": ids.shape[1],
        "cp_peak_bytes": peak,
        "wire": ours.bytes,
        "text": tokenizer.decode(ours.tokens.tolist(), skip_special_tokens=True),
    }


def _positions(tokens: int, vocab: int) -> int:
    """Of how many last positions the logits are compared."""
    return tokens if tokens * vocab * 4 <= LOGIT_BYTES else min(tokens, LAST_POSITIONS)


def _run(loaded: Loaded, model: nn.Module, ids: torch.Tensor, keep: int, ranks: Ranks, together: bool, progress) -> Run:
    progress(f"prefill of {ids.shape[1]} tokens")
    forward(model, ids[:, :WARM_TOKENS], 1)
    seconds = min(_timed(model, ids, ranks, together) for _ in range(TIMED))
    with measured(ranks.device) as peak, cpkit.trace() as trace:
        forward(model, ids, 1)
        ranks.finish()
    outputs = forward(model, ids, keep)
    progress(f"generating {loaded.recipe.generation.max_new_tokens} tokens")
    chunk = loaded.recipe.prefill_chunk_size if together else None
    new = generated(loaded, model, ids, do_sample=False, output_logits=True, prefill_chunk_size=chunk)
    return Run(
        seconds,
        peak.above,
        {name: int(entry["bytes"]) for name, entry in trace.totals().items()},
        outputs.logits[0].float().cpu(),
        _layers(outputs.cache),
        new.sequences[0, ids.shape[1] :].cpu(),
        torch.cat(new.logits).float().cpu(),
    )


def _timed(model: nn.Module, ids: torch.Tensor, ranks: Ranks, together: bool) -> float:
    """Seconds of a prefill, of the slowest rank where all take part."""
    if together:
        ranks.synchronize()
    started = time.perf_counter()
    forward(model, ids, 1)
    ranks.finish()
    seconds = time.perf_counter() - started
    return max(ranks.gathered(seconds)) if together else seconds


def _plain_run(loaded: Loaded, path: str, ids: torch.Tensor, keep: int, ranks: Ranks, progress) -> Run:
    try:
        return _run(loaded, load_plain(loaded, path, ranks), ids, keep, ranks, False, progress)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"plain transformers does not fit on one rank with {ids.shape[1]} tokens, so there is nothing to verify "
            f"against; shorten the prompt with --tokens ({str(error).splitlines()[0]})"
        ) from error


def _free(ranks: Ranks) -> None:
    gc.collect()
    if ranks.device == "cuda":
        torch.cuda.empty_cache()


def _layers(cache: Any) -> Layers:
    """Every tensor that a layer's cache holds, by name."""
    return [{n: t for n, t in vars(layer).items() if isinstance(t, torch.Tensor)} for layer in cache.layers]


def _cache_difference(ours: Layers, plain: Layers | None, loaded: Loaded, ranks: Ranks) -> float:
    """The largest difference of any rank's cache from plain transformers', layer by layer, from rank 0 to all."""
    tp, worst = loaded.recipe.topology.tp, 0.0
    for layer, held in enumerate(ours):
        facts = ranks.shared(lambda at=layer: [(n, tuple(t.shape), t.dtype) for n, t in plain[at].items()])
        if any(ranks.gathered(sorted(n for n, _, _ in facts) != sorted(held))):
            return float("inf")
        for name, shape, dtype in facts:
            device = held[name].device
            whole = plain[layer][name] if plain else torch.empty(shape, dtype=dtype, device=device)
            if ranks.world > 1:
                whole = whole.contiguous()
                dist.broadcast(whole, 0)
            worst = max(worst, _slice_difference(held[name], whole, ranks.rank % tp, tp))
    return max(ranks.gathered(worst))


def _slice_difference(mine: torch.Tensor, whole: torch.Tensor, place: int, parts: int) -> float:
    """``mine`` against its share of the heads in ``whole`` ``[batch, heads, …]``."""
    if mine.shape != whole.shape and whole.ndim > 1 and mine.shape[1] * parts == whole.shape[1]:
        whole = whole.chunk(parts, dim=1)[place]
    if mine.shape != whole.shape:
        return float("inf")
    return difference(mine, whole)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite where one of them is not finite."""
    worst = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
    return worst if worst == worst else float("inf")


def root_mean_square(errors: torch.Tensor) -> float:
    """Infinite where one of them is not finite."""
    value = errors.double().square().mean().sqrt().item()
    return value if value == value else float("inf")


def _compare(
    loaded: Loaded, path: str, ids: torch.Tensor, keep: int, ours: Run, plain: Run, cache: float, ranks: Ranks
) -> dict[str, Any]:
    logits = difference(ours.logits, plain.logits)
    same = _equal_tokens(ours.tokens, plain.tokens)
    checks = [_tokens_check(ours, plain, same, 0.0)]
    if dtype_of(loaded) == torch.float32:
        checks += [_bound("logits", logits, FP32_BOUND), _bound("cache", cache, FP32_BOUND)]
    else:
        exact = _reference_logits(loaded, path, ids, keep, ranks)
        largest = max(difference(plain.logits, exact), difference(ours.logits, exact))
        own, error = (root_mean_square(run.logits - exact) for run in (plain, ours))
        checks = [_tokens_check(ours, plain, same, largest)]
        checks.append(_bound("logit error against fp32", error, ERROR_RATIO * own))
    return {
        "passed": all(check["passed"] for check in checks),
        "checks": checks,
        "positions": keep,
        "new_tokens": ours.tokens.tolist(),
        "equal_tokens": same,
        "logit_difference": logits,
        "cache_difference": cache,
        "cp_seconds": ours.seconds,
        "plain_seconds": plain.seconds,
        "ratio": plain.seconds / ours.seconds,
        "plain_peak_bytes": plain.peak,
    }


def _equal_tokens(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many tokens agree before the first that differs."""
    length = min(len(a), len(b))
    parted = (a[:length] != b[:length]).nonzero()
    return int(parted[0]) if len(parted) else length


def _tokens_check(ours: Run, plain: Run, same: int, error: float) -> dict[str, Any]:
    """Equal tokens; or the first that differs was as good as a tie for plain transformers, given ``error``."""
    total = max(len(ours.tokens), len(plain.tokens))
    passed, found = same == total, f"{same} of {total} equal"
    if not passed and error and same < min(len(ours.tokens), len(plain.tokens)):
        step = plain.step_logits[same]
        gap = (step[plain.tokens[same]] - step[ours.tokens[same]]).item()
        passed, found = gap <= 2 * error, f"{found}, then a choice between two that lie {gap:.1e} apart"
    return {"name": "greedy tokens", "passed": bool(passed), "found": found, "bound": "equal"}


def _bound(name: str, value: float, bound: float) -> dict[str, Any]:
    return {"name": name, "passed": value <= bound, "found": f"{value:.2e}", "bound": f"<= {bound:.2e}"}


def _reference_logits(loaded: Loaded, path: str, ids: torch.Tensor, keep: int, ranks: Ranks) -> torch.Tensor:
    """Logits of plain transformers in fp32, an FP8 checkpoint's weights unpacked."""
    _free(ranks)
    quantized = getattr(config_of(loaded), "quantization_config", None)
    if quantized is None:
        model = load_plain(loaded, path, ranks, "float32")
    else:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                path,
                dtype="float32",
                device_map={"": ranks.torch_device()},
                quantization_config=FineGrainedFP8Config(dequantize=True),
            ).eval()
    return forward(model, ids, keep).logits[0].float().cpu()
