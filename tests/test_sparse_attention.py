"""Attention over selected latents, by every backend, against a dense softmax in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cpkit import ConfigurationError
from cpkit.sparse_attention import SPARSE_ATTENTION, flashmla, gathered

from .ranks import run_ranks
from .test_indexer import PretendCuda, installs


def dense(query, latent, selected, scale, value_dim):
    out = torch.zeros(*query.shape[:2], value_dim, dtype=torch.float64)
    for row, keys in enumerate(selected.tolist()):
        chosen = latent[[key for key in keys if key >= 0]].double()
        out[row] = (query[row].double() @ chosen.t() * scale).softmax(-1) @ chosen[:, :value_dim]
    return out


def case(rows, heads, dim, topk, keys=40, first=1, dtype=torch.float32, seed=0):
    """``query, latent, selected`` of keys from ``first`` on: every third row selects fewer, and what nobody selects is
    NaN or huge."""
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, heads, dim, generator=draw).to(dtype) * 2
    latent = torch.randn(keys, dim, generator=draw).to(dtype)
    selected = torch.stack([first + torch.randperm(keys - 5, generator=draw)[:topk].sort().values for _ in range(rows)])
    for row in range(0, rows, 3):
        selected[row, 1 + row % topk :] = -1
    unused = torch.ones(keys, dtype=torch.bool)
    unused[selected[selected >= 0]] = False
    latent[unused] = float("nan")
    latent[-2] = 1e4
    return query, latent, selected.int()


def on_cuda(*args):
    with PretendCuda():
        return gathered.run(*args)


@pytest.mark.parametrize("run", [gathered.run, on_cuda])
@pytest.mark.parametrize("elements", [1, 100, 300, 1 << 19])
def test_every_row_attends_to_its_keys(run, elements, monkeypatch):
    monkeypatch.setattr(gathered, "ELEMENTS", {"cpu": elements, "cuda": elements})
    for heads in (1, 3, 5, 8):
        for dim, value_dim in ((24, 16), (16, 16), (20, 7)):
            for topk in (1, 2, 9):
                args = *case(10, heads, dim, topk, seed=topk), 0.3, value_dim
                out = run(*args)
                torch.testing.assert_close(out, dense(*args).float(), atol=3e-6, rtol=0)
                full = args[0][1:3], args[1], args[2][1:3], 0.3, value_dim  # no row that selects fewer
                torch.testing.assert_close(run(*full), dense(*full).float(), atol=3e-6, rtol=0)


def test_bf16_is_as_near_as_its_rounding():
    """On the CPU sums are fp32, and the caller rounds once; elsewhere weights and results are rounded to bf16."""
    query, latent, selected = case(10, 5, 24, 9, dtype=torch.bfloat16)
    expected = dense(query, latent, selected, 0.3, 16)
    on_cpu = gathered.run(query, latent, selected, 0.3, 16)
    assert on_cpu.dtype == torch.float32 and (on_cpu - expected).abs().max() < 1e-5
    elsewhere = on_cuda(query, latent, selected, 0.3, 16)
    assert elsewhere.dtype == torch.bfloat16 and (elsewhere - expected).abs().max() < expected.abs().max() / 64


def test_no_more_is_gathered_than_agreed(monkeypatch):
    monkeypatch.setitem(gathered.ELEMENTS, "cpu", 1000)
    sizes, plain = [], torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *a, out: sizes.append(out.numel()) or plain(*a, out=out))
    gathered.run(*case(50, 2, 24, 9), 0.3, 16)
    assert max(sizes) <= 1000 and sum(sizes) == 50 * 9 * 24


def test_memory_that_nobody_wrote_is_never_read():
    args = *case(10, 3, 24, 9), 0.3, 16
    torch.testing.assert_close(run_ranks(1, gathered.run, *args)[0], dense(*args).float(), atol=3e-6, rtol=0)


def fake_flashmla(release, change=lambda x: x):
    """A stand-in for the package with its function's contract: it checks what it is given. ``change`` is a mistake in
    what it answers."""

    def attend(q, kv, indices, sm_scale, d_v, topk_length):
        assert q.dtype == kv.dtype == torch.bfloat16 and indices.dtype == torch.int32
        rows, heads, dim = q.shape
        assert heads in (64, 128) and dim == 576 and d_v == 512 and kv.shape[1:] == (1, 576)
        assert indices.shape[:2] == (rows, 1) and indices.shape[2] % 128 == 0 and isinstance(sm_scale, float)
        assert all(x.is_contiguous() for x in (q, kv, indices))
        seen = indices[:, 0].clone()
        if topk_length is not None:
            assert topk_length.dtype == torch.int32 and topk_length.shape == (rows,) and (topk_length > 0).all()
            seen[torch.arange(seen.shape[1]) >= topk_length.unsqueeze(1)] = -1
        out = change(dense(q, kv[:, 0], seen, sm_scale, d_v)).bfloat16()
        return out, torch.full((rows, heads), float("nan")), torch.full((rows, heads), float("nan"))

    def first(q, kv, indices, sm_scale, d_v=512):
        return attend(q, kv, indices, sm_scale, d_v, None)

    def upstream(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        assert attn_sink is None
        return attend(q, kv, indices, sm_scale, d_v, topk_length)

    def fork(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False):
        if not use_legacy:
            raise RuntimeError("Invalid d_qk: 576")
        return upstream(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    def newest(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        raise RuntimeError("Invalid d_qk: 576")

    functions = {"first": first, "upstream": upstream, "fork": fork, "newest": newest}
    return SimpleNamespace(flash_mla_sparse_fwd=functions[release]) if release in functions else SimpleNamespace()


install = installs("flash_mla", flashmla.kernel)


@pytest.mark.parametrize("release", ["first", "upstream", "fork"])
def test_flashmla_is_given_what_it_takes(install, release):
    padded: list[int] = []
    install(fake_flashmla(release, lambda out: padded.append(out.shape[1]) or out))
    for heads, topk in ((1, 1), (16, 130), (64, 128), (65, 3), (128, 9), (130, 9)):
        query, latent, selected = case(4, heads, 576, topk, keys=150, first=0, dtype=torch.bfloat16)
        strided = torch.cat([query, query], 1)[:, :heads], latent.t().contiguous().t(), selected
        out = flashmla.run(*strided, 0.05, 512)
        assert out.shape == (4, heads, 512)
        expected = dense(query, latent, selected, 0.05, 512)
        assert (out - expected).abs().max() < expected.abs().max() / 128
    assert padded == [64, 64, 64, 128, 128, 128, 64]  # 130 heads: 128 and 2


def test_flashmla_says_why_it_cannot_serve(install, monkeypatch):
    def reason(package, device="cuda", dtype=torch.bfloat16, head_dim=576, capability=9):
        install(package)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
        with PretendCuda():
            return flashmla.BACKEND.missing(device, dtype, head_dim)

    good = fake_flashmla("fork")
    assert reason(good, device="cpu") == "runs on CUDA, not cpu"
    assert reason(good, dtype=torch.float16) == "takes bfloat16, not float16"
    assert reason(good, head_dim=512) == "takes latents of 512 + 64 numbers, not 512"
    assert reason(good) == "torch sees no CUDA device"
    assert reason(None).endswith("; pip install sgl-flash-mla")
    assert "no attribute 'flash_mla_sparse_fwd'" in reason(fake_flashmla("dense decoding alone"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reason(good, capability=12) == "not built for compute capability 12.x"
    for release in ("first", "upstream", "fork"):
        assert reason(fake_flashmla(release)) == ""
    assert reason(fake_flashmla("newest")) == "Invalid d_qk: 576; pip install sgl-flash-mla"
    for mistake in (lambda out: out * 1.1, lambda out: out.flip(0), lambda out: out * float("nan")):
        assert reason(fake_flashmla("upstream", mistake)).startswith("flash_mla_sparse_fwd does not compute")


def test_auto_takes_flashmla_where_it_can_serve(install, monkeypatch):
    assert SPARSE_ATTENTION.names == ["flashmla", "torch"]
    backend, why = SPARSE_ATTENTION.choose("auto", "cpu", torch.bfloat16, 576)
    assert backend.name == "torch" and why == "flashmla: runs on CUDA, not cpu; torch is the first that can serve"
    with pytest.raises(ConfigurationError, match="'flashmla' cannot serve: runs on CUDA, not cpu"):
        SPARSE_ATTENTION.choose("flashmla", "cpu", torch.bfloat16, 576)
    install(fake_flashmla("upstream"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with PretendCuda():
        assert SPARSE_ATTENTION.choose("auto", "cuda", torch.bfloat16, 576)[0].name == "flashmla"
        assert SPARSE_ATTENTION.choose("auto", "cuda", torch.float32, 576)[0].name == "torch"
