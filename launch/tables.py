"""The tables that verbs print for people."""

from __future__ import annotations

from typing import Any

from rich.console import Group

from .report import amount, table

__all__ = ["bench_tables"]


def bench_tables(data: dict[str, Any]) -> Group:
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
