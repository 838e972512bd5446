"""The row verbs: every dtype, uneven and empty ranks, odd views, and what they count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cpkit
from cpkit import Topology
from cpkit.layout import layout
from cpkit.rows import AllRows, ListedRows, exchange, gather_uneven

from .ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
LAYOUTS = [("zigzag", (7,)), ("interleave", (5, 3)), ("zigzag", (1,)), ("interleave", (2,)), ("zigzag", (9, 10, 1))]


def payload(placed, dtype, width=6):
    """A distinct value for each global row and column, exact in every dtype."""
    rows = torch.arange(placed.rows).unsqueeze(1) * 3 + torch.arange(width)
    return (rows % 7).to(dtype) if dtype != torch.bool else rows % 2 == 0


def _verbs():
    group = Topology(cp=3).connect("cpu").cp
    for strategy, lengths in LAYOUTS:
        placed = layout(strategy, lengths, (0,) * len(lengths), 3)
        mine = placed.local_to_global[group.rank]
        everything = AllRows(placed, group)
        generator = torch.Generator().manual_seed(len(lengths))
        wanted = [torch.randint(0, placed.rows, (n,), generator=generator) for n in (4, 0, placed.rows)]
        listed = ListedRows(placed, wanted, group)
        for dtype in DTYPES:
            whole = payload(placed, dtype)
            local = whole.view(torch.uint8)[mine].view(dtype) if dtype.itemsize == 1 else whole[mine]
            got = everything.fetch(local).wait()
            assert got.dtype == dtype and torch.equal(got.float(), whole.float())
            some = listed.fetch(local).wait()
            assert some.dtype == dtype and torch.equal(some.float(), whole.float()[wanted[group.rank]])
        whole = payload(placed, torch.float32)
        odd = whole.t().contiguous().t()[mine]  # a transposed view
        assert torch.equal(everything.fetch(odd).wait(), whole)
        assert torch.equal(listed.fetch(odd).wait(), whole[wanted[group.rank]])
        first, second = everything.fetch(whole[mine]), listed.fetch(whole[mine])  # both on their way at once
        assert torch.equal(first.wait(), whole) and torch.equal(second.wait(), whole[wanted[group.rank]])
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            partial = whole.to(dtype) * (group.rank + 1)
            assert torch.equal(everything.return_sum(partial).wait(), whole[mine].to(dtype) * 6)
            back = listed.return_sum(partial[wanted[group.rank]]).wait()
            asked = sum((r + 1) * torch.bincount(w, minlength=placed.rows) for r, w in enumerate(wanted))
            assert torch.equal(back, (whole * asked.unsqueeze(1))[mine].to(dtype))
        with pytest.raises(ValueError, match=rf"holds {len(mine)} rows and was given {len(mine) + 1}"):
            everything.fetch(torch.zeros(len(mine) + 1, 2))
    return True


def test_verbs_on_three_ranks():
    assert all(run_ranks(3, _verbs))


def _exchanges():
    group = Topology(cp=2).connect("cpu").cp
    for splits in ([[0, 3], [2, 0]], [[0, 0], [0, 0]], [[4, 0], [5, 0]]):
        sends, receives = splits[group.rank], [row[group.rank] for row in splits]
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            rows = torch.full((sum(sends), 2), group.rank + 1).to(dtype)
            arrived = exchange(rows, sends, receives, group, "x").wait()
            expected = torch.cat([torch.full((n, 2), r + 1).to(dtype) for r, n in enumerate(receives)])
            assert torch.equal(arrived, expected)
    for counts in ([3, 1], [0, 2], [0, 0]):
        gathered = gather_uneven(torch.full((counts[group.rank], 2), group.rank), counts, group, "y")
        assert torch.equal(gathered[:, 0], torch.tensor([0] * counts[0] + [1] * counts[1]))
    return True


def test_uneven_and_empty_exchanges():
    assert all(run_ranks(2, _exchanges))


def _traced(folder):
    group = Topology(cp=4).connect("cpu").cp
    placed = layout("zigzag", (10,), (0,), 4)  # blocks 2 2 1 1 1 1 1 1: ranks hold 3 3 2 2 rows
    local = torch.zeros(placed.local_rows[group.rank], 6)
    with cpkit.trace() as outer:
        AllRows(placed, group).fetch(local, "kv").wait()
        with cpkit.trace() as inner:
            ListedRows(placed, [torch.tensor([9])] * 4, group).fetch(local, "last").wait()
    AllRows(placed, group).fetch(local, "unseen").wait()
    path = f"{folder}/{group.rank}.json"
    outer.save(path)
    return outer.totals(), inner.totals(), outer.bytes, path


def test_trace_counts_calls_rows_and_bytes(tmp_path):
    for rank, (outer, inner, total, path) in enumerate(run_ranks(4, _traced, str(tmp_path))):
        kv, last = outer["kv"], outer["last"]
        assert (kv["calls"], kv["rows"], kv["bytes"]) == (1, 10 - [3, 3, 2, 2][rank], 3 * 3 * 24)
        assert (last["calls"], last["rows"], last["bytes"]) == (1, int(rank != 0), 24 * int(rank != 0))
        assert set(outer) == {"kv", "last"} and set(inner) == {"last"}
        assert total == kv["bytes"] + last["bytes"]
        events = json.loads(Path(path).read_text())["traceEvents"]
        assert [e["name"] for e in events] == ["kv", "last"]
        assert all(e["pid"] == rank and e["dur"] >= 0 and e["args"]["bytes"] >= 0 for e in events)
