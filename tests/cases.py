"""Requests in every form that transformers callers pass, and what each request gives alone.

The expectation is always the unpatched model, in one process, on each request by itself, through the same sequence of
calls. ``check`` runs the forms through a (patched) model and compares every real row and every cache entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from .tiny import tokens

TOLERANCE = 2e-5


@dataclass
class Case:
    """``chunks[call][request]`` is how many tokens of each request a call brings. ``form`` is "left", "right" (padding
    to a rectangle), "packed" (by position_ids), "cu_seqlens" or "embeds" (one request)."""

    chunks: Sequence[Sequence[int]]
    form: str = "left"
    keep: int | list[int] = 0
    seed: int = 0
    prompts: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        totals = [sum(call[i] for call in self.chunks) for i in range(len(self.chunks[0]))]
        self.prompts = [tokens(n, seed=self.seed * 100 + i) for i, n in enumerate(totals)]

    def __str__(self) -> str:
        return f"{self.form}{list(map(list, self.chunks))}keep{self.keep}"


@dataclass
class Alone:
    """What one request gives by itself: logits of each call ``[tokens, vocab]``, and the final cache's layers."""

    logits: list[torch.Tensor]
    cache: DynamicCache


@torch.no_grad()
def alone(model: PreTrainedModel, case: Case) -> list[Alone]:
    """The expectation, from the plain model."""
    found = []
    for i, prompt in enumerate(case.prompts):
        cache, logits, start = DynamicCache(config=model.config), [], 0
        for call in case.chunks:
            part = prompt[start : start + call[i]]
            start += call[i]
            logits.append(
                model(part.unsqueeze(0), cache=cache, use_cache=True).logits[0]
                if len(part)
                else torch.empty(0, model.config.vocab_size)
            )
        found.append(Alone(logits, cache))
    return found


def present(model: PreTrainedModel, case: Case, number: int, mask: torch.Tensor) -> tuple[dict, torch.Tensor, list]:
    """Call ``number`` of a case in its form: arguments, the mask including this call, and for each request the
    (entry, slots) of its new tokens."""
    starts = [sum(call[i] for call in case.chunks[:number]) for i in range(len(case.prompts))]
    lengths = case.chunks[number]
    parts = [p[s : s + n] for p, s, n in zip(case.prompts, starts, lengths, strict=True)]
    if case.form in ("packed", "cu_seqlens"):
        edges = torch.tensor([0, *lengths]).cumsum(0)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        where = [(0, torch.arange(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
        arguments = {"input_ids": torch.cat(parts).unsqueeze(0), "position_ids": positions.unsqueeze(0)}
        if case.form == "cu_seqlens":
            arguments |= {"cu_seq_lens_q": edges.int(), "cu_seq_lens_k": edges.int()}
            arguments |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        return arguments, mask, where
    width = max(lengths)
    ids = torch.zeros(len(parts), width, dtype=torch.int64)
    new = torch.zeros(len(parts), width, dtype=torch.int64)
    where = []
    for i, part in enumerate(parts):
        slots = torch.arange(len(part)) + (width - len(part) if case.form == "left" else 0)
        ids[i, slots], new[i, slots] = part, 1
        where.append((i, slots))
    mask = torch.cat([mask, new], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
    arguments = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    if bool(mask.all()):
        del arguments["attention_mask"], arguments["position_ids"]
    if case.form == "embeds":
        arguments["inputs_embeds"] = model.get_input_embeddings()(arguments.pop("input_ids"))
    return arguments, mask, where


def local_heads(model: PreTrainedModel) -> slice:
    """The key heads that a rank's cache holds of the plain model's: latents are all ranks'."""
    session = model.cp_session
    if hasattr(model.config, "kv_lora_rank"):
        return slice(None)
    heads = model.config.num_key_value_heads // session.groups.topology.tp
    return slice(session.groups.tp.rank * heads, (session.groups.tp.rank + 1) * heads)


@torch.no_grad()
def check(model: PreTrainedModel, case: Case, expected: list[Alone]) -> float:
    """Run the case through ``model``; the largest difference of any real row or cache entry. Asserts shapes."""
    kv_heads = local_heads(model)
    cache, worst = DynamicCache(config=model.config), 0.0
    mask = torch.zeros(len(case.prompts), 0, dtype=torch.int64)
    real: list[list[int]] = [[] for _ in case.prompts]  # cache slots of each request
    packed = case.form in ("packed", "cu_seqlens")
    for number in range(len(case.chunks)):
        arguments, mask, where = present(model, case, number, mask)
        tokens_in = arguments.get("input_ids", arguments.get("inputs_embeds"))
        past = cache.get_seq_length()
        keep = case.keep if isinstance(case.keep, int) else torch.tensor(case.keep)
        out = model(**arguments, cache=cache, use_cache=True, logits_to_keep=keep)
        assert out.cache is cache, "the caller's cache must come back"
        width = tokens_in.shape[1]
        kept = torch.arange(width)[-keep:] if isinstance(keep, int) else keep
        assert out.logits.shape == (tokens_in.shape[0], len(kept), model.config.vocab_size), out.logits.shape
        assert torch.isfinite(out.logits).all()
        for i, (entry, slots) in enumerate(where):
            real[i] += (past + slots).tolist()
            for column, slot in enumerate(kept.tolist()):
                row = (slots == slot).nonzero().flatten()
                if len(row):
                    difference = out.logits[entry, column] - expected[i].logits[number][int(row)]
                    worst = max(worst, float(difference.abs().max()))
        assert cache.get_seq_length() == past + width
    for i, slots in enumerate(real):
        for mine, theirs in zip(cache.layers, expected[i].cache.layers, strict=True):
            pairs = [(mine.keys, theirs.keys[:, kv_heads]), (mine.values, theirs.values[:, kv_heads])]
            if getattr(theirs, "is_indexer_initialized", False):
                pairs.append((mine.indexer_keys.unsqueeze(1), theirs.indexer_keys.unsqueeze(1)))
            for a, b in pairs:
                entry = a[0 if packed else i][:, slots]
                assert a.dtype == b.dtype
                if len(slots):
                    worst = max(worst, float((entry - b[0]).abs().max()))
    return worst


LENGTHS = (*range(1, 21), 33, 63, 64, 65, 97)
CASES = [
    *(Case([[n]], seed=n) for n in LENGTHS),
    *(Case([[21, n]], form, seed=n) for n in (5, 32, 64) for form in ("left", "right")),
    Case([[1, 1, 1, 1]], "left"),
    Case([[3, 13, 1]], "right"),
    Case([[9, 10]], "packed"),
    Case([[1, 1, 9]], "packed"),
    Case([[2, 1, 40, 17]], "packed", keep=1),
    Case([[3, 30, 8]], "cu_seqlens"),
    Case([[23]], "embeds"),
    Case([[40]], keep=1),
    Case([[40]], keep=3),
    Case([[40]], keep=[0, 17, 39]),
    Case([[21, 33]], "left", keep=2),
    *(Case([[n], [m], [1]], seed=n + m) for n, m in ((1, 2), (15, 1), (16, 3), (17, 20), (64, 7), (40, 4))),
    Case([[4], [5], [3], [1], [32]]),
    Case([[11, 16], [5, 3], [1, 1]], "left"),
    Case([[11, 16], [7, 7], [1, 1]], "right"),
    Case([[9, 2], [0, 6], [4, 4]], "right"),
]
