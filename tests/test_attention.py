"""Pieces and backends against a dense mask in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit import ConfigurationError
from cpkit.attention import ATTENTION, Piece, attend, flash, pieces, reference, sdpa
from cpkit.attention import Backend as BackendRecord
from cpkit.layout import layout

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6


def dense(query, key, value, request_of_key, place_of_key, request_of_row, place_of_row, scale, window):
    """Softmax over the keys of one's own request that are not ahead, and within the window."""
    distance = place_of_row.unsqueeze(1) - place_of_key
    visible = (request_of_row.unsqueeze(1) == request_of_key) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    k, v = (x.double().repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


class FakeVarlen:
    """A CPU stand-in with the contract of the FlashAttention kernels, computed from the reference: it checks what the
    adapter hands over, pages included."""

    def __init__(self):
        self.launches = 0

    def __call__(self, q, k, v, lengths, pages, *, scale, window):
        self.launches += 1
        assert window[1] == 0
        self.sizes = q.shape[-1], k.shape[-1], v.shape[-1]
        left = None if window[0] < 0 else window[0]
        cu_q = lengths["cu_q"].tolist()
        assert cu_q[-1] == len(q) and lengths["max_q"] == max(b - a for a, b in zip(cu_q, cu_q[1:], strict=False))
        outs = []
        for i, (a, b) in enumerate(zip(cu_q, cu_q[1:], strict=False)):
            if pages:
                used = int(pages["seqused_k"][i])
                ki, vi = (x[pages["block_table"][i].long()].flatten(0, 1)[:used] for x in (k, v))
            else:
                ki, vi = (x[lengths["cu_k"][i] : lengths["cu_k"][i + 1]] for x in (k, v))
            assert len(ki) <= lengths["max_k"]
            outs.append(reference.run(q[a:b], ki, vi, [Piece(b - a, 0, len(ki), 1, left)], scale))
        out, lse = torch.cat([o for o, _ in outs]), torch.cat([x for _, x in outs])
        return out, lse.masked_fill(lse == float("-inf"), float("inf"))  # as FlashAttention-2 marks blind rows


def fake_flash(paged, unequal=None):
    kernel = FakeVarlen()
    run = lambda *args: flash.run(*args, kernel=lambda: kernel, paged=paged, unequal=unequal)  # noqa: E731
    return BackendRecord("fake", run, lambda *args: ""), kernel


BACKENDS = {
    "torch": sdpa.BACKEND,
    "reference": BackendRecord("reference", reference.run, lambda *args: ""),
    "flash": fake_flash(False)[0],
    "paged": fake_flash(True)[0],
}

requests = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    requests.filter(lambda r: sum(n for n, _ in r)),
    st.integers(1, 6),
    st.sampled_from(["zigzag", "interleave"]),
    st.sampled_from([None, None, 1, 2, 7, 30]),
)
def test_every_rank_equals_dense_attention(name, batch, size, strategy, window):
    lengths, prefixes = (tuple(x) for x in zip(*batch, strict=True))
    totals = [n + p for n, p in batch]
    placed = layout(strategy, lengths, prefixes, size)
    draw = torch.Generator().manual_seed(sum(totals))
    key = torch.randn(sum(totals), KV_HEADS, DIM, generator=draw)
    value = torch.randn(sum(totals), KV_HEADS, VALUE_DIM, generator=draw)
    query = torch.randn(placed.rows, HEADS, DIM, generator=draw) * 3
    request_of_key = torch.cat([torch.full((n,), i) for i, n in enumerate(totals)])
    place_of_key = torch.cat([torch.arange(n) for n in totals])
    request_of_row = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    place_of_row = torch.cat([p + torch.arange(n) for n, p in batch])
    expected = dense(query, key, value, request_of_key, place_of_key, request_of_row, place_of_row, 0.3, window).float()
    starts = [sum(totals[:i]) for i in range(len(totals))]
    for rank, held in enumerate(placed.local_to_global):
        if len(held):
            rounds = pieces(placed.segments[rank], starts, prefixes, window)
            assert all(sum(p.queries for p in tiles) == len(held) for tiles in rounds)
            out = attend(query[held], key, value, rounds, 0.3, BACKENDS[name])
            torch.testing.assert_close(out, expected[held], atol=3e-6, rtol=0)


def test_future_keys_and_other_requests_are_never_read():
    """Poisoned with NaN, which no softmax weight of zero would hide."""
    placed = layout("interleave", (20, 9), (4, 0), 3)
    key, value = torch.randn(33, KV_HEADS, DIM), torch.randn(33, KV_HEADS, DIM)
    query = torch.randn(29, HEADS, DIM)
    last = placed.local_to_global[0][placed.local_to_global[0] < 20].max()
    for x in (key, value):
        x[4 + int(last) + 1 : 24] = float("nan")  # request 0's keys behind this rank's last query of it
    rounds = pieces(placed.segments[0], [0, 24], [4, 0])
    out = attend(query[placed.local_to_global[0]], key, value, rounds, 0.3, sdpa.BACKEND)
    assert torch.isfinite(out).all()


def test_no_mask_of_local_by_all_rows():
    """Four times the keys and queries cost four times the memory at most a call, not sixteen."""
    largest = 0
    plain = sdpa._fused

    def spy(q, k, v, scale, causal=False, mask=None):
        nonlocal largest
        largest = max(largest, 0 if mask is None else mask.numel())
        return plain(q, k, v, scale, causal, mask)

    sdpa._fused = spy
    try:
        for strategy, window in (("zigzag", None), ("interleave", None), ("zigzag", 64), ("interleave", 64)):
            placed = layout(strategy, (4096,), (512,), 2)
            key = torch.randn(4608, 1, 8)
            rounds = pieces(placed.segments[1], [0], [512], window)
            attend(torch.randn(2048, 1, 8), key, key, rounds, 0.3, sdpa.BACKEND)
    finally:
        sdpa._fused = plain
    assert 0 < largest <= sdpa.BLOCK * (sdpa.BLOCK + 64)


def test_zigzag_is_one_paged_launch_and_interleave_one_a_class():
    key = torch.randn(600, 2, 8)
    for paged in (True, False):
        backend, kernel = fake_flash(paged)
        for strategy, launches in (("zigzag", 1), ("interleave", 3)):
            placed = layout(strategy, (600,), (0,), 3)
            kernel.launches = 0
            attend(torch.randn(200, 4, 8), key, key, pieces(placed.segments[1], [0], [0]), 0.3, backend)
            assert kernel.launches == launches


def test_backends_are_chosen_by_capability_with_reasons():
    backend, why = ATTENTION.choose("auto", "cpu", torch.float32, 64)
    assert backend.name == "torch" and "varlen: runs on CUDA, not cpu" in why
    assert ATTENTION.names == ["flash3", "flash4", "flash2", "varlen", "torch"]
    with pytest.raises(ConfigurationError, match="'flash2' cannot serve: runs on CUDA, not cpu"):
        ATTENTION.choose("flash2", "cpu", torch.float32, 64)
    with pytest.raises(ConfigurationError, match="'flahs' is not known"):
        ATTENTION.choose("flahs", "cpu", torch.float32, 64)
    flash2 = next(b for b in flash.BACKENDS if b.name == "flash2")
    assert flash2.missing("cuda", torch.float32, 64).startswith("takes bfloat16")
    assert flash2.missing("cuda", torch.bfloat16, 64) == "No module named 'flash_attn'; pip install flash-attn"


@pytest.mark.parametrize("unequal", [None, (192, 128)])
def test_flash_kernels_get_values_of_the_keys_size_or_deepseeks(unequal):
    for paged in (False, True):
        backend, kernel = fake_flash(paged, unequal)
        for dim, value_dim in ((24, 16), (192, 128), (16, 24)):
            check_sizes(backend, dim, value_dim)
            size = max(dim, value_dim)
            assert kernel.sizes == (size, size, 128 if unequal and dim == 192 else size)
    sizes = {b.name: b.run.keywords["unequal"] for b in flash.BACKENDS}
    assert sizes == {"flash3": (192, 128), "flash4": (192, 128), "flash2": None, "varlen": None}


def test_values_narrower_than_keys():
    check_sizes(sdpa.BACKEND, 24, 16)


def check_sizes(backend, dim, value_dim):
    query, key, value = torch.randn(9, 4, dim), torch.randn(9, 2, dim), torch.randn(9, 2, value_dim)
    tiles = [Piece(4, 0, 4), Piece(3, 2, 7, 1, 2), Piece(2, 0, 0)]
    out, lse = backend.run(query, key, value, tiles, 0.2)
    expected, expected_lse = reference.run(query, key, value, tiles, 0.2)
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=0)
    torch.testing.assert_close(lse, expected_lse)
