"""DeepSeek V3.2 and GLM-5: the matrix, the same selections, and what their indexers share and skip."""

from __future__ import annotations

import pytest
import torch

import cpkit
from cpkit import Topology

from .cases import CASES, TOLERANCE, alone, check
from .ranks import run_ranks
from .tiny import make, tokens

T = Topology
KINDS = ("deepseek_v32", "glm_moe_dsa")
TOPOLOGIES = [
    *(T(cp=n) for n in (1, 2, 3, 4, 8, 16)),
    T(cp=4, ep=4),
    T(cp=2, tp=2),
    T(cp=2, tp=2, ep=4),
    T(dp=2, cp=2, ep=4),
    T(cp=4, tp=2, ep=8),
]


@pytest.fixture(scope="module")
def expected():
    return {kind: [alone(make(kind), case) for case in CASES] for kind in KINDS}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_form_equals_each_request_alone(topology, expected):
    step = {1: 3, 2: 3, 3: 4, 4: 6}.get(topology.world, 12)  # each topology takes every nth form, from another start
    some = slice(TOPOLOGIES.index(topology) % step, None, step)

    def run():
        found = {}
        for kind in KINDS:
            model = make(kind)
            for strategy in ("zigzag", "interleave"):
                cpkit.apply(model, topology, strategy=strategy)
                for case, request in zip(CASES[some], expected[kind][some], strict=True):
                    found[f"{kind} {strategy} {case}"] = check(model, case, request)
                cpkit.remove(model)
        return found

    for rank, found in enumerate(run_ranks(topology.world, run)):
        wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"


class Recorded:
    """Which keys each row of each layer selects: of the plain model's indexers, or of ours."""

    def __init__(self, model):
        self.by_layer: dict[int, torch.Tensor] = {}
        self.hooks = [
            layer.self_attn.indexer.register_forward_hook(lambda m, a, out: self.by_layer.update({m.layer_idx: out[0]}))
            for layer in model.model.layers
            if layer.self_attn.indexer is not None
        ]


def causal(selected: torch.Tensor, row: int) -> list[int]:
    return sorted(int(key) for key in selected if 0 <= key <= row)


def held(model, length: int) -> list[int]:
    """The rows of one request that this rank holds."""
    session = model.cp_session
    placed = cpkit.layout.layout(session.options.strategy, (length,), (0,), session.groups.cp.size)
    return placed.local_to_global[session.groups.cp.rank].tolist()


@pytest.mark.parametrize("topology", [T(cp=2), T(cp=4), T(cp=2, tp=2)], ids=str)
def test_every_row_selects_the_plain_models_keys(topology):
    ids, plain = tokens(1, 97), {}
    for kind in KINDS:
        for topk in (16, 97, 200):
            model = make(kind, index_topk=topk)
            recorded = Recorded(model)
            with torch.no_grad():
                logits = model(ids).logits
            chosen = {i: [causal(row, n) for n, row in enumerate(rows)] for i, rows in recorded.by_layer.items()}
            plain[kind, topk] = logits, chosen

    def run(strategy):
        for (kind, topk), (logits, theirs) in plain.items():
            model = cpkit.apply(make(kind, index_topk=topk), topology, strategy=strategy)
            mine = Recorded(model)
            assert (model(ids).logits - logits).abs().max() <= TOLERANCE
            assert sorted(mine.by_layer) == sorted(theirs)  # the layers that have an indexer of their own
            for layer, rows in mine.by_layer.items():
                for row, selected in zip(held(model, 97), rows, strict=True):
                    assert causal(selected, row) == theirs[layer][row], (layer, row)
                    assert selected[selected >= 0].diff().gt(0).all()
                    assert len(causal(selected, row)) == min(topk, row + 1)

    for strategy in ("zigzag", "interleave"):
        run_ranks(topology.world, run, strategy)


@pytest.mark.parametrize("topology", [T(), T(cp=4), T(cp=2, tp=2)], ids=str)
def test_equal_scores_go_to_the_lower_position_everywhere(topology):
    """With no query every score is 0: each row selects its first keys, on every topology alike."""

    def run():
        for kind in KINDS:
            for strategy in ("zigzag", "interleave"):
                model = make(kind)
                for layer in model.model.layers:
                    if layer.self_attn.indexer is not None:
                        layer.self_attn.indexer.wq_b.weight.data.zero_()
                cpkit.apply(model, topology, strategy=strategy)
                mine = Recorded(model)
                model(tokens(1, 45))
                for rows in mine.by_layer.values():
                    for row, selected in zip(held(model, 45), rows, strict=True):
                        assert causal(selected, row) == list(range(min(16, row + 1)))

    run_ranks(topology.world, run)


@pytest.mark.parametrize("kind", KINDS)
def test_the_indexers_own_rotation_is_called_and_matters(kind, monkeypatch):
    """The other pairing is invisible while every key is selected (16 tokens) and wrong beyond: tests must be long."""
    import importlib

    from cpkit.models import deepseek_v32, glm_moe_dsa

    family = {"deepseek_v32": deepseek_v32, "glm_moe_dsa": glm_moe_dsa}[kind]
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    own, calls = getattr(modeling, family.Indexer.rope), []
    expected = {n: make(kind)(tokens(1, n)).logits.detach() for n in (16, 97)}
    model = cpkit.apply(make(kind))

    def counted(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(modeling, family.Indexer.rope, counted)
    assert (model(tokens(1, 97)).logits - expected[97]).abs().max() <= TOLERANCE and calls

    def halves(q, k, cos, sin, unsqueeze_dim=1):
        a, b = q.chunk(2, -1)
        return q * cos.unsqueeze(unsqueeze_dim) + torch.cat([-b, a], -1) * sin.unsqueeze(unsqueeze_dim), k

    def pairs(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = (x[..., : x.shape[-1] // 2].unsqueeze(unsqueeze_dim) for x in (cos, sin))
        a, b = q[..., 0::2], q[..., 1::2]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1), k

    monkeypatch.setattr(family.Indexer, "rope", "other", raising=True)
    monkeypatch.setattr(modeling, "other", pairs if kind == "deepseek_v32" else halves, raising=False)
    assert (model(tokens(1, 16)).logits - expected[16]).abs().max() <= TOLERANCE
    assert (model(tokens(1, 97)).logits - expected[97]).abs().max() > 100 * TOLERANCE


SCHEDULES = [
    dict(indexer_types=["full", "shared", "full", "shared"]),
    dict(indexer_types=None, index_topk_pattern="FFSS"),
    dict(indexer_types=None, index_topk_freq=4, index_skip_topk_offset=3),
    dict(indexer_types=None),
    dict(indexer_types=["full", "shared", "shared", "shared"], num_attention_heads=3, num_key_value_heads=3),
    dict(num_attention_heads=5, num_key_value_heads=5, v_head_dim=24, qk_nope_head_dim=12),
    dict(num_attention_heads=1, num_key_value_heads=1, index_n_heads=17, n_group=2),
    dict(rope_parameters={
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512,
        "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    }),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_sizes_and_scalings(kind):
    """Shared layers by every way of saying so; odd heads, other head sizes, YaRN's scale: exact, and one gather of
    index keys for each layer that has an indexer of its own."""
    variants = [v for v in SCHEDULES if kind == "glm_moe_dsa" or "indexer_types" not in v]
    ids = tokens(1, 97)
    made = [{k: tuple(v) if isinstance(v, list) else v for k, v in variant.items()} for variant in variants]
    for variant in made:
        if "rope_parameters" in variant:
            variant["rope_parameters"] = Frozen(variant["rope_parameters"])
    with torch.no_grad():
        expected = [make(kind, **variant)(ids).logits for variant in made]

    def run(strategy):
        for variant, logits in zip(made, expected, strict=True):
            model = cpkit.apply(make(kind, **variant), T(cp=2), strategy=strategy)
            with cpkit.trace() as trace:
                assert (model(ids).logits - logits).abs().max() <= TOLERANCE, variant
            full = getattr(model.config, "indexer_types", ["full"] * 4).count("full")
            totals = trace.totals()
            assert (totals["kv"]["calls"], totals["index keys"]["calls"]) == (4, full)
            assert "selected keys" not in totals

    for strategy in ("zigzag", "interleave"):
        run_ranks(2, run, strategy)


class Frozen(dict):
    """A mapping that can be a key of the cache of tiny models."""

    def __hash__(self):  # type: ignore[override]
        return hash(tuple(sorted(self.items())))
