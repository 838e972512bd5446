"""``verify``: the same input with context parallelism and in plain transformers on one rank, compared."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import FineGrainedFP8Config

import cpkit
from cpkit import ConfigurationError
from cpkit.topology import num_experts

from .checkpoint import config_of, dtype_of, load_cp, load_plain
from .compare import Errors, Layers, across_ranks, errors, layers_of, of_layers
from .peak import measured
from .ranks import Ranks
from .recipe import Loaded
from .run import forward, generated

__all__ = ["FP32_BOUND", "verify"]

FP32_BOUND = 2e-5  # legal reorderings stay far below it, mistakes far above
ERROR_RATIO = 1.5  # of the error against a run of higher precision, to plain transformers' own
LARGEST_RATIO = 3.0  # the same, of the largest error in fp32: a mistake in one place hides in a mean
LOGIT_BYTES = 2**30  # up to this size all positions' logits are compared, else those of the last
LAST_POSITIONS = 1024
WARM_TOKENS = 64
TIMED = 4


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

    In fp32, logits and caches must agree within ``FP32_BOUND`` and the greedy tokens must be equal. Where they do not
    agree within it (large activations round more), and in 16 bits, both are held against a run of higher precision:
    the error may be ``ERROR_RATIO`` times plain transformers' own. In 16 bits tokens may part where plain
    transformers' two candidates are nearer than its error.
    """
    full = dtype_of(loaded) == torch.float32
    keep = _positions(ids.shape[1], config_of(loaded).vocab_size)
    progress("loading with context parallelism")
    ours = _run(loaded, load_cp(loaded, path), ids, keep, ranks, True, progress)
    _free(ranks)
    progress("loading plain transformers on rank 0")
    plain: Any = ranks.alone(lambda: _plain_run(loaded, path, ids, keep, ranks, progress))
    tp, peak = loaded.recipe.topology.tp, max(ranks.gathered(ours.peak))
    cache = across_ranks(ours.cache, plain and plain.cache, tp, ranks)
    logits = ranks.shared(lambda: errors(ours.logits, plain.logits))
    checks = []
    if full:
        checks = [_bound(n, e.largest, FP32_BOUND) for n, e in (("logits", logits), ("caches", cache))]
    error = 0.0
    if not checks or not all(check["passed"] for check in checks):
        precision = "float64" if full else "float32"
        progress(f"plain transformers in {precision}")
        exact: Any = ranks.alone(lambda: _exact(loaded, path, ids, keep, ranks, precision))
        distant = across_ranks(ours.cache, exact and exact.cache, tp, ranks)
        found = ranks.shared(lambda: _against(exact, ours, plain, distant, precision))
        checks = _decided(checks, found)
        error = 0.0 if full else found[0]["error"]
    checks.insert(0, ranks.shared(lambda: _tokens_check(ours, plain, error)))
    return ranks.shared(lambda: _figures(ours, plain, logits, cache)) | {
        "passed": all(check["passed"] for check in checks),
        "checks": checks,
        "recipe": loaded.name,
        "ranks": ranks.world,
        "topology": loaded.recipe.topology.model_dump(),
        "prompt_tokens": ids.shape[1],
        "positions": keep,
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
        layers_of(outputs.cache),
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
    with _fitting(ids):
        return _run(loaded, load_plain(loaded, path, ranks), ids, keep, ranks, False, progress)


@contextmanager
def _fitting(ids: torch.Tensor) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"plain transformers does not fit on one rank with {ids.shape[1]} tokens, so there is nothing to verify "
            f"against; shorten the prompt with --tokens ({str(error).splitlines()[0]})"
        ) from error


def _free(ranks: Ranks) -> None:
    gc.collect()
    if ranks.device == "cuda":
        torch.cuda.empty_cache()


@dataclass
class Exact:
    """A run of plain transformers in higher precision."""

    logits: torch.Tensor
    cache: Layers


def _exact(loaded: Loaded, path: str, ids: torch.Tensor, keep: int, ranks: Ranks, precision: str) -> Exact:
    """Plain transformers, an FP8 checkpoint's weights unpacked; experts one by one, as grouped kernels know no fp64."""
    _free(ranks)
    config, more = config_of(loaded), {}
    if num_experts(config):
        more["experts_implementation"] = "eager"
    if getattr(config, "quantization_config", None) is not None:
        more["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    with _fitting(ids):
        outputs = forward(load_plain(loaded, path, ranks, precision, **more), ids, keep)
        return Exact(outputs.logits[0].cpu(), layers_of(outputs.cache))


def _against(exact: Exact, ours: Run, plain: Run, distant: Errors, precision: str) -> list[dict[str, Any]]:
    """One check for logits and one for caches: our errors against plain transformers' own."""
    pairs = {
        "logits": (errors(ours.logits, exact.logits), errors(plain.logits, exact.logits)),
        "caches": (distant, of_layers(plain.cache, exact.cache)),
    }
    full = precision == "float64"
    return [_no_worse(f"{name}, error against {precision}", *pair, full) for name, pair in pairs.items()]


def _no_worse(name: str, ours: Errors, own: Errors, full: bool) -> dict[str, Any]:
    """By the root mean square. In fp32 by the largest too; in 16 bits that jumps with every row that rounding sends to
    another expert."""
    check = _bound(name, ours.root_mean_square, ERROR_RATIO * own.root_mean_square)
    if full and ours.largest > LARGEST_RATIO * own.largest:
        check = _bound(f"{name}, largest", ours.largest, LARGEST_RATIO * own.largest)
    return check | {"error": max(ours.largest, own.largest)}


def _decided(absolute: list[dict[str, Any]], relative: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each quantity the absolute check if it passed, else the relative one, with the figure that was above."""
    if not absolute:
        return relative
    return [
        first if first["passed"] else second | {"found": f"{second['found']} (largest difference {first['found']})"}
        for first, second in zip(absolute, relative, strict=True)
    ]


def _figures(ours: Run, plain: Run, logits: Errors, cache: Errors) -> dict[str, Any]:
    return {
        "new_tokens": ours.tokens.tolist(),
        "equal_tokens": _equal_tokens(ours.tokens, plain.tokens),
        "logit_difference": logits.largest,
        "cache_difference": cache.largest,
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


def _tokens_check(ours: Run, plain: Run, error: float) -> dict[str, Any]:
    """Equal tokens; or the first that differs was as good as a tie for plain transformers, given ``error``."""
    same, total = _equal_tokens(ours.tokens, plain.tokens), max(len(ours.tokens), len(plain.tokens))
    passed, found = same == total, f"{same} of {total} equal"
    if not passed and error and same < min(len(ours.tokens), len(plain.tokens)):
        step = plain.step_logits[same]
        gap = (step[plain.tokens[same]] - step[ours.tokens[same]]).item()
        passed, found = gap <= 2 * error, f"{found}, then a choice between two that lie {gap:.1e} apart"
    return {"name": "greedy tokens", "passed": bool(passed), "found": found, "bound": "equal"}


def _bound(name: str, value: float, bound: float) -> dict[str, Any]:
    return {"name": name, "passed": value <= bound, "found": f"{value:.2e}", "bound": f"<= {bound:.2e}"}
