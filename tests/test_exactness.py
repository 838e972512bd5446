"""The matrix: every topology, strategy and form of input gives what each request gives alone, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cpkit
from cpkit import Topology

from .cases import CASES, TOLERANCE, alone, check
from .ranks import run_ranks
from .tiny import make, tokens

T = Topology
TOPOLOGIES = [
    *(T(cp=n) for n in (1, 2, 3, 4, 8)),
    T(cp=2, ep=2),
    T(cp=4, ep=4),
    T(tp=2),
    T(tp=2, ep=2),
    T(cp=2, tp=2),
    T(cp=2, tp=2, ep=4),
    T(cp=2, tp=2, ep=2),
    T(dp=2, cp=2, ep=4),
    T(dp=2, cp=2, tp=2, ep=8),
    T(cp=4, tp=2, ep=8),
]


def _matrix(topology: Topology, cases, expected, options) -> dict[str, float]:
    model, found = make(), {}
    for strategy in ("zigzag", "interleave"):
        cpkit.apply(model, topology, strategy=strategy, **options)
        for case, request in zip(cases, expected, strict=True):
            found[f"{strategy} {case}"] = check(model, case, request)
        cpkit.remove(model)
    return found


@pytest.fixture(scope="module")
def expected():
    model = make()
    return [alone(model, case) for case in CASES]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_form_equals_each_request_alone(topology, expected):
    step = {1: 1, 2: 2, 3: 3, 4: 4}.get(topology.world, 6)  # larger worlds take every nth form, each from another start
    some = slice(TOPOLOGIES.index(topology) % step, None, step)
    results = run_ranks(topology.world, _matrix, topology, CASES[some], expected[some], {})
    for rank, found in enumerate(results):
        wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("communicator", ["all_to_all", "gather"])
@pytest.mark.parametrize("topology", [T(cp=4, ep=4), T(cp=2, tp=2, ep=4), T(dp=2, cp=2, ep=4)], ids=str)
def test_communicators_are_exact(topology, communicator, expected):
    some = slice(1, None, 5)
    options = {"communicator": communicator}
    for found in run_ranks(topology.world, _matrix, topology, CASES[some], expected[some], options):
        assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "mixtral"])
def test_other_gqa_models(model_type):
    plain, cases = make(model_type), CASES[::4]
    expected = [alone(plain, case) for case in cases]
    topology = T(cp=2, tp=2, ep=4 if model_type == "mixtral" else 1)

    def run():
        model, worst = make(model_type), 0.0
        cpkit.apply(model, topology)
        for case, request in zip(cases, expected, strict=True):
            worst = max(worst, check(model, case, request))
        return worst

    assert max(run_ranks(4, run)) <= TOLERANCE


@pytest.mark.parametrize("window", [1, 5, 16])
def test_sliding_window(window):
    """Every layer keeps the window, for prompts and cached prefixes shorter and longer than it."""
    overrides = dict(use_sliding_window=True, sliding_window=window)
    plain = make(**overrides)
    calls = [[40], [7], [1], [3]] if window > 1 else [[40]]  # transformers cannot extend a cache of no entries
    ids = tokens(1, sum(n for (n,) in calls))

    def logits(model):
        cache, start, out = None, 0, []
        for (n,) in calls:
            with torch.no_grad():
                outputs = model(ids[:, start : start + n], cache=cache, use_cache=True)
            cache, start = outputs.cache, start + n
            out.append(outputs.logits)
        return torch.cat(out, 1), [(x.keys, x.values) for x in cache.layers]

    expected, layers = logits(plain)

    def run(strategy):
        found, mine = logits(cpkit.apply(make(**overrides), T(cp=4), strategy=strategy))
        caches = [(a - b).abs().max() for x, y in zip(mine, layers, strict=True) for a, b in zip(x, y, strict=True)
                  if a.numel()]  # fmt: skip
        return max([(found - expected).abs().max(), *caches])

    for strategy in ("zigzag", "interleave"):
        assert max(run_ranks(4, run, strategy)) <= TOLERANCE


def test_bf16_is_as_close_to_fp32_as_plain_bf16():
    """Every expert is chosen, so that no rounding flips a route: what is left is rounding alone."""
    batches, all_experts = [tokens(1, 200, seed=seed) for seed in range(3)], dict(num_experts_per_tok=8)
    with torch.no_grad():
        exact = torch.cat([make(**all_experts)(ids).logits for ids in batches])
        plain = (torch.cat([make(**all_experts).bfloat16()(ids).logits for ids in batches]).float() - exact).abs()

    def run(topology, strategy):
        model = cpkit.apply(make(**all_experts).bfloat16(), topology, strategy=strategy)
        out = torch.cat([model(ids).logits for ids in batches])
        assert out.dtype == torch.bfloat16
        return (out.float() - exact).abs()

    for topology in (T(cp=4), T(cp=2, ep=2), T(cp=2, tp=2, ep=4)):
        for strategy in ("zigzag", "interleave"):
            for error in run_ranks(topology.world, run, topology, strategy):
                assert error.mean() <= (1.02 if topology.tp == 1 else 1.1) * plain.mean()  # TP sums in bf16, as plain's
                assert error.max() <= 1.2 * plain.max()


def test_the_strategy_of_the_guide(expected):
    """The guide's example, as it stands there, is exact on everything."""
    guide = (Path(__file__).parent.parent / "docs" / "adding-a-strategy.md").read_text()
    code = guide.split("```python")[1].split("```")[0].split("model =")[0]

    def run():
        exec(code, {})
        model, some = cpkit.apply(make(), T(cp=3), strategy="contiguous"), slice(None, None, 3)
        return max(check(model, case, request) for case, request in zip(CASES[some], expected[some], strict=True))

    assert max(run_ranks(3, run)) <= TOLERANCE


def test_a_wrong_layout_is_seen():
    """The comparison can fail: with two rows swapped in the inverse map, logits move far beyond the tolerance."""
    ids = tokens(1, 64)
    with torch.no_grad():
        expected = make()(ids).logits

    def run():
        model = cpkit.apply(make(), T(cp=2), strategy="zigzag")
        from cpkit.rows import AllRows

        plain = AllRows.__init__

        def swapped(self, *args):
            plain(self, *args)
            self.position[[3, 40]] = self.position[[40, 3]]

        AllRows.__init__ = swapped
        return (model(ids).logits - expected).abs().max()

    assert min(run_ranks(2, run)) > 100 * TOLERANCE


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
def test_causality_and_reach(strategy):
    """Changing a token leaves every earlier row alone and moves later ones as in the plain model, on every rank."""
    ids, plain = tokens(1, 97), make()
    changes = {}
    with torch.no_grad():
        before = plain(ids).logits
        for at in (0, 3, 15, 16, 17, 48, 63, 64, 95):
            other = ids.clone()
            other[0, at] = ids[0, at] % 511 + 1
            changes[at] = (other, plain(other).logits - before)

    def run(world):
        model = cpkit.apply(make(), T(cp=world), strategy=strategy)
        mine = model(ids).logits
        for at, (other, change) in changes.items():
            moved = model(other).logits - mine
            assert moved[0, :at].abs().max() <= 2e-6 if at else True
            assert moved[0, at:].abs().max() > 0.5
            assert (moved - change).abs().max() <= TOLERANCE
        return True

    for world in (2, 4):
        assert all(run_ranks(world, run, world))
