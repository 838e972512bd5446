"""What verbs print for people, made from the data that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Group

from .report import amount, table

__all__ = ["bench", "doctor", "generate", "plan", "prefill", "recipes", "translate", "verify"]

Data = dict[str, Any]


def topology(sizes: dict[str, int]) -> str:
    """``cp=2 tp=2``, sizes of 1 left out."""
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one rank"


def prefill(data: Data) -> Group:
    rows = [[repr(n["text"]), n["id"], f"{n['log_probability']:.3f}"] for n in data["next"]]
    return Group(
        f"{data['recipe']}: {data['prompt_tokens']:,} tokens on {data['ranks']} ranks ({topology(data['topology'])}), "
        f"{data['seconds']:.2f} s, {data['tokens_per_second']:,.0f} tokens/s, peak memory {amount(data['peak_bytes'])}",
        _wire(data["wire"]),
        table("likeliest next tokens", ["text", "id", "log probability"], rows),
    )


def generate(data: Data) -> Group:
    decoding = data["seconds"] - data["prefill_seconds"]
    return Group(
        *([] if data["streamed"] else [data["text"], ""]),
        f"{data['recipe']}: {data['prompt_tokens']:,} + {len(data['new_tokens'])} tokens on {data['ranks']} ranks "
        f"({topology(data['topology'])}); prefill {data['prefill_seconds']:.2f} s, decode {decoding:.2f} s, "
        f"peak memory {amount(data['peak_bytes'])}",
        _wire(data["wire"]),
    )


def _wire(totals: dict[str, Data]) -> Any:
    if not totals:
        return "nothing on the wire: one rank"
    rows = [[name, int(t["calls"]), amount(t["bytes"]), f"{t['seconds']:.3f}"] for name, t in totals.items()]
    return table("received by rank 0", ["", "calls", "bytes", "seconds"], rows)


def verify(data: Data) -> Group:
    checks = [[c["name"], "pass" if c["passed"] else "FAIL", c["found"], c["bound"]] for c in data["checks"]]
    rows = [
        ["prefill, seconds", f"{data['cp_seconds']:.3f}", f"{data['plain_seconds']:.3f}", f"{data['ratio']:.2f}x"],
        ["peak memory of a rank", amount(data["cp_peak_bytes"]), amount(data["plain_peak_bytes"]), _share(data)],
    ]
    wire = ", ".join(f"{name} {amount(nbytes)}" for name, nbytes in data["wire"].items()) or "nothing"
    return Group(
        f"{data['recipe']}: {data['prompt_tokens']:,} tokens on {data['ranks']} ranks ({topology(data['topology'])}), "
        f"{len(data['new_tokens'])} new",
        table("against plain transformers on one rank", ["", "cpkit", "transformers", ""], rows),
        f"received by rank 0 in a prefill: {wire}",
        f"largest difference of logits ({data['positions']:,} positions): {data['logit_difference']:.2e}; of caches "
        f"(every layer, every rank): {data['cache_difference']:.2e}; "
        f"greedy tokens equal: {data['equal_tokens']} of {len(data['new_tokens'])}",
        table("checks", ["", "", "found", "bound"], checks),
        f"continuation: {data['text']}",
        "PASS" if data["passed"] else "FAIL",
    )


def _share(data: Data) -> str:
    return f"{data['cp_peak_bytes'] / data['plain_peak_bytes']:.2f} of it" if data["plain_peak_bytes"] else "-"


def bench(data: Data) -> Group:
    """One table a prompt length."""
    columns = ["", "seconds (min)", "seconds (median)", "ratio", "bytes a rank", "peak memory", "logit difference"]
    parts: list[Any] = []
    for run in data["runs"]:
        rows = [
            [
                e["name"],
                f"{e['seconds_min']:.3f}",
                f"{e['seconds_median']:.3f}",
                f"{e['ratio']:.2f}x" if e["ratio"] else "-",
                amount(e["bytes"]),
                amount(e["peak_bytes"]),
                f"{e['logit_difference']:.1e}" if e["logit_difference"] is not None else "-",
            ]
            for e in run["entrants"]
        ]
        title = f"prefill of {run['tokens']:,} tokens, {data['ranks']} ranks on {data['device']}, {data['threads']} "
        parts.append(table(title + f"thread(s) a rank, {data['rounds']} rounds", columns, rows))
    parts += [f"not run: {name}: {reason}" for name, reason in data["not_run"].items()]
    return Group(*parts)


def recipes(data: list[Data]) -> Any:
    rows = [[r["name"], str(r["ranks"]), r["device"], r["description"]] for r in data]
    return table("recipes", ["name", "ranks", "device", "description"], rows)


def as_yaml(data: Data) -> str:
    return yaml.safe_dump(data, sort_keys=False).rstrip()


def plan(data: Data) -> Group:
    rows = [[str(r["rank"]), r["rows"], f"{r['layer_flops'] / 1e9:,.1f}"] for r in data["ranks"]]
    wire = [[name, amount(w["bytes"]), w["of"]] for name, w in data["wire"].items()]
    verdict = "" if data["fits"] is None else _verdict(data)
    return Group(
        f"{data['recipe']}: {data['model']}, {data['tokens']:,} tokens on {data['world']} ranks "
        f"({topology(data['topology'])})",
        f"strategy {data['strategy']['choice']}: {data['strategy']['why']}",
        f"communicator {data['communicator']['choice']}: {data['communicator']['why']}",
        table(f"rows (busiest rank over the mean: {data['balance']:.4f})", ["rank", "rows", "GFLOP a layer"], rows),
        table("received by a rank in one layer", ["", "bytes", "in"], wire) if wire else "nothing on the wire",
        f"a rank holds {amount(data['weight_bytes'])} of weights and {amount(data['cache_bytes'])} of cache{verdict}",
    )


def _verdict(data: Data) -> str:
    if data["fits"]:
        return f"; of {amount(data['memory_bytes'])}, {amount(data['left_bytes'])} are left for activations"
    return f"; that is {amount(-data['left_bytes'])} more than its {amount(data['memory_bytes'])}"


def doctor(data: Data) -> Group:
    versions = [[name, version or "not installed"] for name, version in data["versions"].items()]
    devices = [
        [d["name"], d.get("capability", "-"), amount(d["memory_bytes"]), str(d.get("cores", "-"))]
        for d in data["devices"]
    ]
    kernels = [
        _can_serve(f"{kind.replace('_', ' ')} backends ({of['asked']})", of["backends"], of["by_name_only"])
        for kind, of in data["kernels"].items()
    ]
    return Group(
        table("versions", ["package", "version"], versions),
        table("devices", ["device", "capability", "memory", "cores"], devices),
        *kernels,
        _can_serve("process groups", data["process_groups"]),
        _can_serve("model families", data["families"]),
    )


def _can_serve(title: str, missing: dict[str, str], by_name_only: Sequence[str] = ()) -> Any:
    rows = [
        [name, f"no: {why}" if why else "yes, when asked for by name" if name in by_name_only else "yes"]
        for name, why in missing.items()
    ]
    return table(title, ["name", "can serve"], rows)


def translate(data: Data) -> Group:
    parts = [data["yaml"].rstrip(), f"# {data['world']} ranks: torchrun --nproc-per-node {data['world']}"]
    parts += [f"# note: {note}" for note in data["notes"]]
    parts += [f"# no counterpart: {flag}" for flag in data["unknown"]]
    return Group(*parts)
