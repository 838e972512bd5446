"""Strategies and layouts: the design's table, and properties over every size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit import ConfigurationError
from cpkit.balance import Term, Work, choose_strategy, imbalance
from cpkit.layout import Segment, layout, register_strategy, strategies
from cpkit.layout.zigzag import block_edges

DENSE = Work(1e6, (Term(4096.0),))


def rows(strategy, lengths, size, prefixes=None):
    placed = layout(strategy, tuple(lengths), tuple(prefixes or [0] * len(lengths)), size)
    return [held.tolist() for held in placed.local_to_global]


def test_zigzag_pairs_early_and_late_blocks():
    assert rows("zigzag", [16], 4) == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_zigzag_uneven_blocks():
    placed = layout("zigzag", (7,), (0,), 2)
    assert placed.local_rows == (3, 4)
    assert [[s.stop for s in held] for held in placed.segments] == [[2, 7], [4, 6]]  # keys that each block sees


@pytest.mark.parametrize(
    "size, lengths, totals, expected",
    [
        (
            4,
            [9, 10],
            [11, 13],
            {0: (6, [2, 2, 1, 1], [4, 5, 11, 13]), 1: (5, [1, 2, 1, 1], [5, 7, 10, 12]),
             2: (4, [1, 1, 1, 1], [6, 8, 9, 11]), 3: (4, [1, 1, 1, 1], [7, 9, 8, 10])},
        ),
        (
            3,
            [13, 7],
            [13, 17],
            {0: (8, [3, 2, 2, 1], [3, 12, 13, 17]), 1: (6, [2, 1, 2, 1], [5, 13, 11, 16]),
             2: (6, [2, 1, 2, 1], [7, 14, 9, 15])},
        ),
    ],
)  # fmt: skip
def test_zigzag_with_prefixes(size, lengths, totals, expected):
    prefixes = tuple(t - n for t, n in zip(totals, lengths, strict=True))
    placed = layout("zigzag", tuple(lengths), prefixes, size)
    for rank, (held, queries, keys) in expected.items():
        segments = placed.segments[rank]
        assert placed.local_rows[rank] == held
        assert [s.count for s in segments] == queries
        assert [prefixes[s.request] + s.stop for s in segments] == keys


def test_zigzag_late_block_order_of_global_segments():
    """Which rank's which block comes where in global order, C = 3, lengths 13 and 7 (early 2r, late 2r + 1 of each)."""
    placed = layout("zigzag", (13, 7), (0, 10), 3)
    spans = sorted(
        (placed.offsets[s.request] + s.start, 4 * rank + number)
        for rank, held in enumerate(placed.segments)
        for number, s in enumerate(held)
    )
    assert [name for _, name in spans] == [0, 4, 8, 10, 6, 2, 1, 5, 9, 11, 7, 3]


@pytest.mark.parametrize(
    "size, lengths, expected",
    [
        (4, [5, 3], [[2, 0], [1, 1], [1, 1], [1, 1]]),
        (4, [2, 1, 9], [[1, 0, 2], [1, 0, 2], [0, 1, 2], [0, 0, 3]]),
        (3, [1, 1, 1, 5], [[1, 0, 0, 2], [0, 1, 0, 2], [0, 0, 1, 1]]),
        (4, [3, 13], [[1, 3], [1, 3], [1, 3], [0, 4]]),
    ],
)
def test_interleave_runs_over_the_flattened_batch(size, lengths, expected):
    placed = layout("interleave", tuple(lengths), (0,) * len(lengths), size)
    counts = [[sum(s.count for s in held if s.request == i) for i in range(len(lengths))] for held in placed.segments]
    assert counts == expected
    assert rows("interleave", lengths, size) == [list(range(r, sum(lengths), size)) for r in range(size)]


cases = st.tuples(
    st.sampled_from(["zigzag", "interleave"]),
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), min_size=1, max_size=5),
    st.integers(1, 16),
    st.sampled_from([1, 1, 4, 16, 128]),
)


@settings(max_examples=300, deadline=None)
@given(cases)
def test_every_row_is_held_once_and_the_maps_agree(case):
    strategy, requests, size, align = case
    lengths, prefixes = (tuple(x) for x in zip(*requests, strict=True))
    placed = layout(strategy, lengths, prefixes, size, align)
    everything = torch.cat(placed.local_to_global).sort().values
    assert torch.equal(everything, torch.arange(sum(lengths)))
    for rank, held in enumerate(placed.local_to_global):
        assert torch.equal(placed.owner[held], torch.full_like(held, rank))
        assert torch.equal(placed.index[held], torch.arange(len(held)))
        assert len(held) == placed.local_rows[rank] <= placed.padded_rows
        in_request = torch.cat([torch.arange(n) for n in lengths])[held] if len(held) else held
        prefix = torch.cat([torch.full((n,), p) for n, p in requests])[held] if len(held) else held
        assert torch.equal(placed.keys_seen(rank), prefix + in_request + 1)  # itself and all before it, no more
        for segment in placed.segments[rank]:
            assert segment.count > 0 and segment.stop <= lengths[segment.request]
    if strategy == "interleave":
        assert max(placed.local_rows) - min(placed.local_rows) <= 1
    elif align == 1:
        most = [2 * -(-n // (2 * size)) for n in lengths]
        assert max(placed.local_rows) <= sum(most)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 300), st.integers(1, 32), st.sampled_from([1, 4, 128]))
def test_block_edges(length, prefix, blocks, align):
    edges = block_edges(length, prefix, blocks, align)
    sizes = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    assert len(sizes) == blocks and sum(sizes) == length and min(sizes) >= 0
    if align == 1:
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    for edge in edges[1:-1]:
        assert edge in (0, length) or (prefix + edge) % align == 0


@pytest.mark.parametrize("size", range(2, 9))
def test_work_is_balanced_at_32k(size):
    for strategy in strategies():
        assert imbalance(DENSE.of_ranks(layout(strategy, (32768,), (0,), size))) <= 1.01
        assert imbalance(DENSE.of_ranks(layout(strategy, (32768,), (8192,), size))) <= 1.01
    name, why = choose_strategy(DENSE, (32768,), (0,), size)
    assert name == "zigzag" and "zigzag 1.000" in why


def test_auto_takes_the_balanced_strategy_for_many_short_requests():
    name, why = choose_strategy(DENSE, (1,) * 64, (0,) * 64, 8)
    assert name == "interleave" and "zigzag 8.0000" in why  # zigzag gives every first token to rank 0


def test_unknown_and_broken_strategies_are_refused():
    with pytest.raises(ConfigurationError, match="'zigzga' is not known.*zigzag"):
        layout("zigzga", (4,), (0,), 2)
    with pytest.raises(ConfigurationError, match="taken"):
        register_strategy("zigzag", lambda *args: [])
    register_strategy("loses_rows", lambda lengths, prefixes, size, align: [[Segment(0, 0, 1)]] * size)
    try:
        with pytest.raises(ConfigurationError, match="exactly once"):
            layout("loses_rows", (8,), (0,), 2)
    finally:
        from cpkit.layout import _STRATEGIES

        del _STRATEGIES["loses_rows"]
