"""``translate``: SGLang's launch flags as a topology and a recipe; what has no counterpart is listed, never dropped."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from cpkit import ConfigurationError, Topology
from cpkit.kernels import KINDS
from cpkit.layout import strategies

from .schema import nearest, validated

__all__ = ["translate"]

_FLAGS = {
    "tp": ("--tp", "--tp-size", "--tensor-parallel-size"),
    "ep": ("--ep", "--ep-size", "--expert-parallel-size"),
    "cp": ("--attn-cp-size", "--attention-context-parallel-size"),
    "dp": ("--dp", "--dp-size", "--data-parallel-size"),
    "pp": ("--pp", "--pp-size", "--pipeline-parallel-size"),
    "strategy": ("--cp-strategy",),
    "attention": ("--attention-backend", "--prefill-attention-backend"),
    "sparse_attention": ("--dsa-prefill-backend", "--nsa-prefill-backend"),
    "model": ("--model-path", "--model"),
    "dtype": ("--dtype",),
    "chunk": ("--chunked-prefill-size",),
    "max_tokens": ("--context-length",),
}
_NAMES = {flag: name for name, flags in _FLAGS.items() for flag in flags}
_NUMBERS = {"tp", "ep", "cp", "dp", "pp", "chunk", "max_tokens"}
_SWITCHES = {"--enable-dp-attention": "dp_attention", "--enable-prefill-cp": "prefill_cp"}
_DSA = {"dsa": "auto", "nsa": "auto"}  # SGLang's attention of families that select keys
_BACKENDS = {
    "attention": {"fa3": "flash3", "fa4": "flash4", "fa2": "flash2", "torch_native": "torch", **_DSA},
    "sparse_attention": dict.fromkeys(("flashmla_sparse", "flashmla_kv", "flashmla_auto"), "flashmla"),
}
_DTYPES = {"half": "float16", "float": "float32"}


def translate(words: Sequence[str]) -> dict[str, Any]:
    """``topology``, ``recipe`` (checked data), ``yaml``, ``world``, ``unknown`` flags and ``notes``.

    ``words`` are SGLang's flags, each its own word or several in one. SGLang's ``--tp`` is its whole world of one
    pipeline stage; cpkit's ``tp`` is what remains after dp and cp. Raises ``ConfigurationError``.
    """
    found, unknown = _read([part for word in words for part in shlex.split(word)])
    notes: list[str] = []
    topology = _topology(found, notes)
    data: dict[str, Any] = {"description": f"Translated from: {' '.join(words)}"}
    data["model"] = found.get("model") or _missing_model(notes)
    data["topology"] = {k: v for k, v in vars(topology).items() if v > 1}
    data["strategy"] = _strategy(found)
    data["attention"] = _kernel("attention", found.get("attention", "auto"), notes)
    if "sparse_attention" in found:
        data["sparse_attention"] = _kernel("sparse_attention", found["sparse_attention"], notes)
    if "sparse_attention" in found or found.get("attention") in _DSA:
        notes.append("SGLang's indexer scores in 8 bits, cpkit's in fp32 as in transformers; indexer=deepgemm takes 8")
    data["dtype"] = _DTYPES.get(found.get("dtype", "auto"), found.get("dtype", "auto"))
    data["hardware"] = {"device": "cuda"}
    if found.get("chunk", -1) > 0:
        data["prefill_chunk_size"] = found["chunk"]
    if "max_tokens" in found:
        data["max_tokens"] = found["max_tokens"]
    validated(data, "the translated recipe")
    return {
        "topology": vars(topology),
        "world": topology.world,
        "recipe": data,
        "yaml": yaml.safe_dump(data, sort_keys=False),
        "unknown": unknown,
        "notes": notes,
    }


def _read(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Known flags by cpkit's word for them, and the unknown ones with their values."""
    found: dict[str, Any] = {}
    unknown: list[str] = []
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if flag in _SWITCHES:
            found[_SWITCHES[flag]] = True
            continue
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        if flag in _NAMES:
            found[_NAMES[flag]] = _value(flag, value)
        else:
            unknown.append(f"{flag} {value}".strip())
    return found, unknown


def _value(flag: str, value: str) -> Any:
    if not value:
        raise ConfigurationError(f"{flag} has no value")
    if _NAMES[flag] not in _NUMBERS:
        return value
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(f"{flag} {value!r} is not a whole number") from None


def _topology(found: dict[str, Any], notes: list[str]) -> Topology:
    stage, cp, dp = found.get("tp", 1), found.get("cp", 1), found.get("dp", 1)
    if dp > 1 and not found.get("dp_attention"):
        notes.append(f"--dp {dp} without --enable-dp-attention is {dp} separate servers: start {dp} launches of this")
        dp = 1
    if cp < 1 or dp < 1 or stage % (cp * dp):
        raise ConfigurationError(
            f"SGLang's --tp {stage} is its whole world, and --attn-cp-size {cp} times --dp {dp} does not divide it; "
            f"set --tp to a multiple of {cp * dp}"
        )
    if cp > 1 and not found.get("prefill_cp"):
        notes.append("--enable-prefill-cp is not given: SGLang would not run its context parallelism; cpkit does")
    if cp == 1 and found.get("prefill_cp"):
        notes.append("--enable-prefill-cp with --attn-cp-size 1 runs no context parallelism; set --attn-cp-size")
    if cp > 1 and "ep" not in found:
        notes.append(
            f"no --ep: SGLang divides a MoE's experts over all {stage} ranks of --tp, cpkit over topology.ep and tp; "
            f"for a MoE set topology.ep={stage}"
        )
    return Topology(dp=dp, cp=cp, tp=stage // (cp * dp), pp=found.get("pp", 1), ep=found.get("ep", 1))


def _missing_model(notes: list[str]) -> str:
    notes.append("no --model-path: put the model's Hub name in place of MODEL")
    return "MODEL"


def _strategy(found: dict[str, Any]) -> str:
    name = found.get("strategy", "auto")
    if name != "auto" and name not in strategies():
        raise ConfigurationError(f"--cp-strategy {name!r} is not known{nearest(name, strategies())}")
    return name


def _kernel(kind: str, name: str, notes: list[str]) -> str:
    ours, known = _BACKENDS[kind].get(name, name), KINDS[kind].names
    if ours == "auto" or ours in known:
        return ours
    notes.append(f"{_FLAGS[kind][0]} {name} has no counterpart: {kind} is 'auto' ({', '.join(known)})")
    return "auto"
