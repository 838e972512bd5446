"""``prefill`` and ``generate``: run a recipe's model on a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from transformers import TextStreamer, set_seed

import cpkit
from cpkit.trace import Trace

from .peak import Peak, measured
from .ranks import Ranks
from .recipe import Loaded

__all__ = ["forward", "generate", "generated", "prefill"]

Result = tuple[dict[str, Any], Trace]  # the figures, and what went over the wire
BEST = 5  # next tokens that prefill shows


def prefill(loaded: Loaded, model: nn.Module, ids: torch.Tensor, tokenizer: Any, ranks: Ranks) -> Result:
    """Fill the cache with the prompt, in chunks where the recipe says so; the likeliest next tokens and the figures."""
    chunk = loaded.recipe.prefill_chunk_size
    ranks.synchronize()
    shown = bool(chunk) and ranks.first
    with prompt_progress(model, ids.shape[1], shown), measured(ranks.device) as peak, cpkit.trace() as trace:
        started = time.perf_counter()
        outputs = forward(model, ids, 1, chunk)
        ranks.finish()
        seconds = time.perf_counter() - started
    chances = outputs.logits[0, -1].float().log_softmax(-1).topk(BEST)
    best = [
        {"id": int(i), "text": tokenizer.decode([int(i)]), "log_probability": float(c)}
        for c, i in zip(chances.values, chances.indices, strict=True)
    ]
    found = {"seconds": seconds, "tokens_per_second": ids.shape[1] / seconds, "next": best}
    return _figures(loaded, model, ids, ranks, trace, peak) | found, trace


def forward(model: nn.Module, ids: torch.Tensor, keep: int, chunk: int | None = None) -> Any:
    """The forward that ``generate`` prefills with: logits of the last ``keep`` tokens (of the last chunk, if there
    are several) and the cache."""
    outputs, cache = None, None
    with torch.no_grad():
        for part in ids.split(chunk or ids.shape[1], dim=1):
            outputs = model(input_ids=part, cache=cache, use_cache=True, logits_to_keep=min(keep, part.shape[1]))
            cache = outputs.cache
    return outputs


def generate(loaded: Loaded, model: nn.Module, ids: torch.Tensor, tokenizer: Any, ranks: Ranks, stream: bool) -> Result:
    """Prefill and decode; the new tokens, their text and the figures. ``stream`` prints the text as it comes."""
    chunk = loaded.recipe.prefill_chunk_size
    beams = (loaded.recipe.generation.num_beams or 1) > 1
    shown = bool(chunk) and ranks.first
    streamer = TextStreamer(tokenizer, skip_prompt=True) if stream and ranks.first and not beams else None
    set_seed(loaded.recipe.generation.seed)
    ranks.synchronize()
    with (
        prompt_progress(model, ids.shape[1], shown),
        measured(ranks.device) as peak,
        cpkit.trace() as trace,
        first_decode(model, ids.shape[1]) as clock,
    ):
        started = time.perf_counter()
        new = generated(loaded, model, ids, streamer=streamer, prefill_chunk_size=chunk)
        ranks.finish()
        seconds = time.perf_counter() - started
    tokens = new.sequences[0, ids.shape[1] :].tolist()
    found = {
        "new_tokens": tokens,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "seconds": seconds,
        "prefill_seconds": clock[0] - started if clock else seconds,
        "streamed": streamer is not None,
    }
    return _figures(loaded, model, ids, ranks, trace, peak) | found, trace


def generated(loaded: Loaded, model: nn.Module, ids: torch.Tensor, **more: Any) -> Any:
    """transformers' ``generate`` with the recipe's arguments, and those in ``more`` that are not None."""
    arguments = loaded.recipe.generation.arguments() | {k: v for k, v in more.items() if v is not None}
    if arguments.get("do_sample") is False:  # so that greedy runs are not told that sampling's words are idle
        arguments = {k: v for k, v in arguments.items() if k not in ("temperature", "top_k", "top_p", "min_p")}
    pad = model.generation_config.pad_token_id
    if pad is None:  # one prompt has no padding; this keeps generate from saying so
        arguments["pad_token_id"] = 0
    return model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **arguments)


@contextmanager
def first_decode(model: nn.Module, tokens: int) -> Iterator[list[float]]:
    """Collects the time at which the first forward after a prompt of ``tokens`` tokens began."""
    times: list[float] = []

    def note(_module, _args, kwargs):
        cache = kwargs.get("cache")
        if not times and cache is not None and cache.get_seq_length() >= tokens:
            times.append(time.perf_counter())

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield times
    finally:
        handle.remove()


@contextmanager
def prompt_progress(model: nn.Module, tokens: int, shown: bool) -> Iterator[None]:
    """A bar on stderr of the prompt's tokens that went through ``model``."""
    columns = (TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) if shown else nullcontext() as bar:
        if bar is None:
            yield
            return
        task = bar.add_task("prefill", total=tokens)
        left = [tokens]

        def advance(_module, _args, kwargs, _outputs):
            done = min(kwargs["input_ids"].shape[1], left[0])
            left[0] -= done
            bar.advance(task, done)
            if not left[0]:  # the text that follows goes to the same terminal
                bar.stop()

        handle = model.register_forward_hook(advance, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _figures(
    loaded: Loaded, model: nn.Module, ids: torch.Tensor, ranks: Ranks, trace: Trace, peak: Peak
) -> dict[str, Any]:
    return {
        "recipe": loaded.name,
        "ranks": ranks.world,
        "topology": loaded.recipe.topology.model_dump(),
        "prompt_tokens": ids.shape[1],
        "peak_bytes": max(ranks.gathered(peak.above)),
        "wire": trace.totals(),
        "resolved": cpkit.describe(model).as_dict()["resolved"],
    }
