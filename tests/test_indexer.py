"""Exact top-k of the indexer's scores, by every backend, against all scores in float64.

Most vectors hold small integers: sums are exact in any order and any precision, 8 bits included, and equal scores are
frequent, so that the rule for them is tried throughout.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cpkit import ConfigurationError
from cpkit.indexer import INDEXER, Space, blocked, blocks, deepgemm, everything, top_positions
from cpkit.indexer.blocked import Budget
from cpkit.layout import layout

from .ranks import run_ranks

LARGE = blocked.BUDGETS["cpu"]
DIM = 32


class PretendCuda(TorchFunctionMode):
    """Tensors on the CPU say that they are on a GPU, so that code takes the way that it takes there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function == torch.Tensor.device.__get__:
            return torch.device("cuda")
        here = lambda x: "cpu" if isinstance(x, (str, torch.device)) and str(x) == "cuda" else x  # noqa: E731
        return function(*map(here, args), **{name: here(x) for name, x in (kwargs or {}).items()})


def all_scores(query, weights, key):
    products = torch.einsum("qhd,kd->qhk", query.double(), key.double()).relu()
    return torch.einsum("qhk,qh->qk", products, weights.double())


def best(scores, starts, ends, topk):
    """The contract, row by row: a stable sort puts the lower of equals first."""
    selected = torch.full((len(scores), topk), -1, dtype=torch.int32)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        order = scores[row, start:end].sort(descending=True, stable=True).indices[:topk]
        selected[row, : len(order)] = start + order.sort().values
    return selected


def integers(*shape, seed=0):
    """Vectors of small integers of which the largest is 7, so that e4m3 with 7 / 448 as its scale holds them."""
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randint(-1, 2, shape, generator=draw).float()
    vectors[..., 0] = 7.0 * torch.randint(0, 2, shape[:-1], generator=draw).mul(2).sub(1)
    return vectors


def case(rows, keys, heads=3, seed=0):
    """``query, weights, key``; half of the weights are negative, and some queries are nothing at all."""
    query = integers(rows, heads, DIM, seed=seed)
    query[::5] = 0.0
    weights = torch.randint(-3, 4, (rows, heads), generator=torch.Generator().manual_seed(seed + 1)).float()
    return query, weights, integers(keys, DIM, seed=seed + 2)


def visible(strategy, batch, size, rank):
    """``starts, ends`` of the rows that a rank holds of requests ``(new tokens, cached tokens)``."""
    placed = layout(strategy, *(tuple(x) for x in zip(*batch, strict=True)), size)
    firsts = [sum(n + p for n, p in batch[:i]) for i in range(len(batch))]
    starts = torch.cat([torch.full((n,), first) for first, (n, _) in zip(firsts, batch, strict=True)])
    ends = starts + torch.cat([p + 1 + torch.arange(n) for n, p in batch])
    held = placed.local_to_global[rank]
    return starts[held], ends[held]


def fake_deepgemm(release, change=lambda x: x, dtype=torch.float32):
    """A stand-in for the package with its functions' contract: it checks what it is given, and leaves memory that
    nobody wrote where a row has no key. ``change`` is a mistake in what it answers."""

    def logits(q, kv, weights, ks, ke, columns):
        key, scale = kv
        rows, heads, dim = q.shape
        assert heads in (32, 64) and dim in (32, 64, 128) and key.shape[1:] == (dim,) and scale.shape == key.shape[:1]
        assert weights.shape == (rows, heads) and ks.shape == ke.shape == (rows,)
        assert q.dtype == key.dtype == torch.float8_e4m3fn and ks.dtype == ke.dtype == torch.int32
        assert scale.dtype == weights.dtype == torch.float32
        assert all(x.is_contiguous() for x in (q, key, scale, weights, ks, ke))
        assert columns > 0 and columns == (ke - ks).max()
        scores = change(all_scores(q.float(), weights, key.float() * scale[:, None])).to(dtype)
        out = torch.full((rows, -(-columns // 256) * 256), float("nan"), dtype=dtype)[:, :columns]
        for row, (start, end) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
            out[row, : end - start] = scores[row, start:end]
        return out

    def fp8_mqa_logits(
        q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0
    ):  # up to 2.6
        assert not clean_logits
        return logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k)

    def fp8_fp4_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k, schedule_meta=None):
        assert q[1] is None
        return logits(q[0], kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k)

    class Compiled:
        """As pybind binds a function: no signature, but in the docstring."""

        __doc__ = "fp8_mqa_logits(q: Tensor, kv: tuple, clean_logits: bool = True, max_seqlen_k: int = 0) -> Tensor"
        __call__ = staticmethod(fp8_mqa_logits)

        @property
        def __signature__(self):
            raise ValueError("no signature found for builtin")

    return {
        "2.6": SimpleNamespace(fp8_mqa_logits=fp8_mqa_logits),
        "2.6 compiled": SimpleNamespace(fp8_mqa_logits=Compiled()),
        "2.8": SimpleNamespace(fp8_fp4_mqa_logits=fp8_fp4_mqa_logits),
        "old": SimpleNamespace(fp8_mqa_logits=lambda q, kv, weights, ks, ke, clean_logits=True: None),
        "none": SimpleNamespace(),
    }[release]


def installs(name, kernel):
    """A fixture that puts a package in the place of ``name``, which ``kernel`` binds."""

    @pytest.fixture
    def install(monkeypatch):
        def put(package):
            monkeypatch.setitem(sys.modules, name, package)
            kernel.cache_clear()

        yield put
        kernel.cache_clear()

    return install


install = installs("deep_gemm", deepgemm.kernel)


def on_cuda(*args):
    with PretendCuda():
        return blocked.run(*args)


BACKENDS = {
    "torch": (None, blocked.run),
    "torch on cuda": (None, on_cuda),
    **{f"deepgemm {release}": (release, deepgemm.run) for release in ("2.6", "2.6 compiled", "2.8")},
}
requests = st.lists(st.tuples(st.integers(0, 45), st.integers(0, 30)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(
    requests.filter(lambda r: sum(n for n, _ in r)),
    st.integers(1, 3),
    st.sampled_from(["zigzag", "interleave"]),
    st.sampled_from([1, 2, 7, 16, 40, 99]),
    st.sampled_from([1, 3, 33]),
    st.sampled_from([LARGE, Budget(1, 1, 1), Budget(3, 50, 64), Budget(64, 1 << 24, 7)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_row_selects_its_best_keys(name, batch, size, strategy, topk, heads, budget, dtype):
    release, run = BACKENDS[name]
    query, weights, key = case(sum(n for n, _ in batch), sum(map(sum, batch)), heads, seed=topk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "BUDGETS", {"cpu": budget, "cuda": budget})
        patch.setattr(deepgemm, "SCORES", budget.scores)
        if release:
            patch.setitem(sys.modules, "deep_gemm", fake_deepgemm(release))
            deepgemm.kernel.cache_clear()
        for rank in range(size):
            starts, ends = visible(strategy, batch, size, rank)
            for mine in (slice(None), slice(1, None, 2)):  # all rows, and those of one TP rank of two
                q, w = query[: len(starts[mine])], weights[: len(starts[mine])]
                selected = run(q.to(dtype), w, key.to(dtype), starts[mine], ends[mine], topk)
                assert selected.dtype == torch.int32
                assert torch.equal(selected, best(all_scores(q, w, key), starts[mine], ends[mine], topk))


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
@pytest.mark.parametrize("length", [64, 65, 66, 127, 128, 129, 130])
def test_lengths_just_above_a_block(length, strategy):
    assert LARGE.most == 64
    for rank in range(2):
        starts, ends = visible(strategy, [(length, 3)], 2, rank)
        query, weights, key = case(len(starts), length + 3)
        selected = blocked.run(query, weights, key, starts, ends, 16)
        assert torch.equal(selected, best(all_scores(query, weights, key), starts, ends, 16))


@settings(max_examples=100, deadline=None)
@given(
    requests,
    st.integers(1, 4),
    st.sampled_from(["zigzag", "interleave"]),
    st.sampled_from([LARGE, Budget(1, 1, 1), Budget(5, 200, 1), Budget(4, 1 << 20, 1)]),
)
@example([(44, 3)], 2, "zigzag", Budget(4, 1 << 20, 1))  # the early block's rows are no multiple of 4
def test_blocks_cover_all_rows_once_and_fit(batch, size, strategy, budget):
    for rank in range(size):
        starts, ends = visible(strategy, batch, size, rank)
        row = 0
        for first, last, start, low, high in blocks(starts, ends, budget.rows):
            assert row == first < last and set(starts[first:last].tolist()) == {start}
            assert (low, high) == (int(ends[first:last].min()), int(ends[first:last].max()))
            assert last - first <= budget.rows(int(ends[last - 1]) - start)
            assert not (ends[first:last].diff().abs() > budget.most).any()
            row = last
        assert row == len(starts)


def test_no_tensor_of_all_rows_by_all_keys():
    """Whatever the scores, and where they are all equal as well."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
            return out

    rows, keys = 512, 4096
    query, weights, key = case(rows, keys, 2)
    ends = keys - rows + 1 + torch.arange(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(blocked.BUDGETS, "cpu", Budget(64, 1 << 15, 1 << 15))
        for q in (query, query * 0):
            with Largest() as largest:
                blocked.run(q, weights, key, torch.zeros(rows, dtype=torch.int64), ends, 64)
            assert largest.numel <= max(1 << 15, query.numel(), key.numel()) < rows * keys / 8


def test_equal_scores_go_to_the_lower_position():
    """No query, or no product above zero: every score is 0, and -0.0 where a weight is negative."""
    starts, ends = torch.tensor([0, 5, 5]), torch.tensor([30, 35, 8])
    ones = torch.ones(3, 2, DIM)
    for query, weights in ((0 * ones, ones), (-ones, ones), (-ones, -ones)):
        selected = blocked.run(query, weights[..., 0], torch.ones(35, DIM), starts, ends, 4)
        assert selected.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [5, 6, 7, -1]]
    scores = torch.tensor([[-1.0, 0.0, -0.0, 0.0, -0.0], [-0.0, 0.0, 1.0, 0.0, -2.0]])
    assert top_positions(scores, 2, Space(scores.device)).tolist() == [[1, 2], [0, 2]]


def test_scores_that_fp16_cannot_tell_apart():
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    key = torch.stack([torch.full((200,), 1000.0), order / 1024], 1)
    selected = blocked.run(torch.ones(1, 1, 2), torch.ones(1, 1), key, torch.zeros(1).long(), torch.tensor([200]), 50)
    assert selected[0].tolist() == (order >= 150).nonzero().flatten().tolist()


@pytest.mark.parametrize("run", [blocked.run, on_cuda])
def test_nan_stays_in_its_row(run):
    """A NaN query, one NaN key behind all others, and equal scores in the rows beside them: the rest is as without."""
    query, weights, key = case(40, 120, seed=4)
    starts, ends = torch.zeros(40, dtype=torch.int64), torch.arange(80, 120)
    expected = run(query, weights, key, starts, ends, 16)
    broken, poisoned = query.clone(), key.clone()
    broken[7, 1, 3] = poisoned[110] = float("nan")
    selected = run(broken, weights, poisoned, starts, ends, 16)
    untouched = (ends <= 110) & (torch.arange(40) != 7)
    assert torch.equal(selected[untouched], expected[untouched])
    assert ((selected >= 0) & (selected < ends.unsqueeze(1))).all() and (selected.diff() > 0).all()
    assert (selected[ends > 110] == 110).any(1).all()  # larger than anything, as in torch.topk


def test_nan_beside_equal_scores_in_the_same_block():
    """One row may choose one key too many and the other one too few."""
    scores = torch.tensor([[1.0, float("nan"), 3.0, 2.0], [5.0, 1.0, 1.0, 0.0]])
    assert top_positions(scores, 2, Space(scores.device)).tolist() == [[1, 2], [0, 1]]
    with PretendCuda():
        assert top_positions(scores, 2, Space(torch.device("cuda"))).tolist() == [[1, 2], [0, 1]]


def test_memory_that_nobody_wrote_is_never_read():
    starts, ends = visible("zigzag", [(150, 10), (40, 0)], 2, 0)
    query, weights, key = case(len(starts), 200)
    expected = best(all_scores(query, weights, key), starts, ends, 30)
    assert torch.equal(run_ranks(1, blocked.run, query, weights, key, starts, ends, 30)[0], expected)


def test_everything():
    selected = everything(torch.tensor([0, 7]), torch.tensor([3, 9]), 3)
    assert selected.tolist() == [[0, 1, 2], [7, 8, -1]] and selected.dtype == torch.int32


def test_auto_never_takes_the_8_bit_scores(install):
    install(None)  # an import would raise
    assert [(name, backend.exact) for name, backend in INDEXER.known.items()] == [("torch", True), ("deepgemm", False)]
    for device in ("cpu", "cuda"):
        backend, why = INDEXER.choose("auto", device, torch.bfloat16, 128)
        assert backend.name == "torch" and why == "torch is the first that can serve"


def test_deepgemm_says_why_it_cannot_serve(install, monkeypatch):
    def reason(package, head_dim=128, device="cuda", capability=9):
        install(package)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
        with PretendCuda():
            return deepgemm.BACKEND.missing(device, torch.bfloat16, head_dim)

    good = fake_deepgemm("2.8")
    assert reason(good, device="cpu") == "runs on CUDA, not cpu"
    assert reason(good, head_dim=96) == "takes head sizes 32, 64 and 128, not 96"
    assert reason(good) == "torch sees no CUDA device"
    assert reason(None).endswith("; pip install sgl-deep-gemm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reason(good, capability=8) == "needs compute capability 9.0 or newer (Hopper), not 8.x"
    for release in ("2.6", "2.6 compiled", "2.8"):
        assert reason(fake_deepgemm(release)) == ""
    assert reason(fake_deepgemm("2.8", dtype=torch.bfloat16)) == ""
    for release in ("old", "none"):
        assert "(max_seqlen_k); install a newer release" in reason(fake_deepgemm(release))
    for mistake in (
        lambda scores: scores * 448,  # a scale left out
        lambda scores: scores.roll(3, 1),  # columns by position, not from the row's first key on
        lambda scores: scores.flip(0),
        lambda scores: scores * float("nan"),
    ):
        assert reason(fake_deepgemm("2.8", mistake)).startswith("deep_gemm's MQA logits are not the scores")
    with pytest.raises(ConfigurationError, match="'deepgemm' cannot serve: runs on CUDA, not cpu"):
        INDEXER.choose("deepgemm", "cpu", torch.bfloat16, 128)


def test_deepgemm_rounds_each_vector_by_itself():
    vectors = torch.randn(5, 3, 64) * torch.tensor([0.0, 1e-6, 1.0, 1e4, 1.0]).view(5, 1, 1)
    rounded, scale = deepgemm._rounded(vectors)
    again = rounded.float() * scale.unsqueeze(-1)
    assert ((again - vectors).abs() <= vectors.abs() / 16 + vectors.abs().amax(-1, keepdim=True) / 1e5).all()
    for row, vector in enumerate(vectors):  # what a rank would send is what the gathering rank would make
        own, own_scale = deepgemm._rounded(vector)
        assert torch.equal(own.view(torch.uint8), rounded[row].view(torch.uint8)) and torch.equal(own_scale, scale[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deepgemm_selects_by_the_rounded_scores(install, dtype):
    """Its own, exactly; they agree with the fp32 ones on nearly all keys. Blackwell's come in bf16."""
    install(fake_deepgemm("2.8", dtype=dtype))
    draw = torch.Generator().manual_seed(0)
    query, weights, key = (torch.randn(*shape, generator=draw) for shape in ((20, 40, 64), (20, 40), (400, 64)))
    starts, ends = torch.zeros(20, dtype=torch.int64), torch.arange(380, 400)
    strided = key.t().contiguous().t()
    selected = deepgemm.run(query, weights, strided, starts, ends, 100)
    (q, q_scale), (k, k_scale) = deepgemm._rounded(query), deepgemm._rounded(key)
    scores = all_scores(q.float(), weights * q_scale, k.float() * k_scale[:, None]).to(dtype)
    assert torch.equal(selected, best(scores, starts, ends, 100))
    exact = best(all_scores(query, weights, key), starts, ends, 100)
    same = sum(len(set(a) & set(b)) for a, b in zip(selected.tolist(), exact.tolist(), strict=True))
    assert 0.9 * exact.numel() < same < exact.numel()


def test_deepgemm_refuses_more_heads_than_the_kernel_has(install):
    install(fake_deepgemm("2.8"))
    query, weights, key = case(1, 9, 65)
    with pytest.raises(ConfigurationError, match="'deepgemm' takes up to 64 heads, not 65; use 'torch'"):
        deepgemm.run(query, weights, key, torch.tensor([0]), torch.tensor([9]), 2)
