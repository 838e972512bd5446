"""What DeepSeek V3.2 and GLM-5 cost under context parallelism: bytes, work, memory; and rounding in bf16."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig

import cpkit
from cpkit import Topology, dsa
from cpkit.balance import Work, choose_strategy, imbalance
from cpkit.launch.peak import measured
from cpkit.layout import layout

from .ranks import run_ranks
from .test_dsa import KINDS
from .tiny import make, tokens

T = Topology


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
def test_bytes_are_latents_and_index_keys(kind, strategy):
    """Each rank receives a latent, a rope key and an index key of every other rank's rows, once a layer, latents first;
    with TP inside CP the selections of the TP ranks, int32."""
    length, item = 97, 4

    def run(topology):
        model = cpkit.apply(make(kind), topology, strategy=strategy)
        with cpkit.trace() as trace:
            model(tokens(1, length), logits_to_keep=1, use_cache=True)
        order = [e.name for e in trace.events if e.name in ("kv", "index keys")]
        return trace.totals(), order, model.cp_session.groups.cp.rank

    for topology in (T(cp=2), T(cp=4), T(cp=2, tp=2)):
        padded = layout(strategy, (length,), (0,), topology.cp).padded_rows
        full = 4 if kind == "deepseek_v32" else 2
        for totals, order, cp_rank in run_ranks(topology.world, run, topology):
            assert totals["kv"]["bytes"] == 4 * (topology.cp - 1) * padded * (16 + 8) * item
            assert totals["index keys"]["bytes"] == full * (topology.cp - 1) * padded * 16 * item
            assert order[:2] == ["kv", "index keys"] and order.count("kv") == 4
            if topology.tp > 1:
                local = layout(strategy, (length,), (0,), topology.cp).local_rows[cp_rank]
                assert totals["selected keys"]["bytes"] == full * (topology.tp - 1) * -(-local // topology.tp) * 16 * 4


def test_tp_ranks_score_a_share_of_the_rows_each():
    """Each of the two TP ranks scores every other row of its CP rank, so their work is equal."""

    def run():
        model = cpkit.apply(make("glm_moe_dsa"), T(cp=2, tp=2), strategy="zigzag")
        backend, scored = model.cp_session.kernels["indexer"], []

        def counted(query, weights, key, starts, ends, topk):
            scored.append((len(query), int(ends.sum())))
            return backend.run(query, weights, key, starts, ends, topk)

        model.cp_session.kernels["indexer"] = cpkit.backends.Backend("torch", counted, backend.missing)
        model(tokens(1, 200))
        return scored

    found = run_ranks(4, run)
    assert [rows for rows, _ in (found[r][0] for r in range(4))] == [50] * 4
    keys = [found[r][0][1] for r in range(4)]
    assert max(keys) / (sum(keys) / 4) < 1.01


@pytest.mark.parametrize("config", [DeepseekV32Config(), GlmMoeDsaConfig()], ids=lambda c: c.model_type)
@pytest.mark.parametrize("size", range(2, 9))
def test_work_is_even_at_32k(config, size):
    """Of the indexer and the attention alone, in FLOPs, for what ``auto`` takes."""
    work = dsa.work(config)
    strategy, why = choose_strategy(work, (32768,), (0,), size)
    pairs = Work(0.0, work.terms)
    assert imbalance(pairs.of_ranks(layout(strategy, (32768,), (0,), size))) <= 1.01
    assert "zigzag" in why and "interleave" in why


def test_a_selection_that_saturates_makes_zigzag_uneven():
    """At 4K tokens half of the queries see more keys than are selected: a late block costs what a middle one does."""
    saturating = Work(0.0, dsa.work(DeepseekV32Config()).terms[1:])
    found = {s: imbalance(saturating.of_ranks(layout(s, (4096,), (0,), 8))) for s in ("zigzag", "interleave")}
    assert found["zigzag"] == pytest.approx(1.29, abs=0.01) and found["interleave"] <= 1.002
    assert choose_strategy(saturating, (4096,), (0,), 8)[0] == "interleave"


SIZES = dict(
    vocab_size=256, hidden_size=128, num_attention_heads=8, num_key_value_heads=8, index_n_heads=8, index_topk=64,
    num_hidden_layers=2, max_position_embeddings=65536,
)  # fmt: skip


def _peak(topology: Topology, length: int) -> tuple[int, int]:
    """Bytes of this rank's prefill beyond what it held before and the cache that it leaves; and of one layer's keys."""
    model = cpkit.apply(make("deepseek_v32", **SIZES), topology, strategy="zigzag")
    ids = tokens(1, length).remainder(256)
    model(ids[:, :256], logits_to_keep=1)
    with measured("cpu") as peak:
        cache = model(ids, logits_to_keep=1, use_cache=True).cache
    kept = [layer.keys.nbytes + layer.values.nbytes + layer.indexer_keys.nbytes for layer in cache.layers]
    return peak.above - sum(kept), kept[0]


def test_peak_memory_grows_as_rows_over_ranks():
    """Scores of ``[rows, keys]`` would grow sixteenfold from one length to the other, and be 8 GiB at the larger."""
    peaks = {
        (cp, length): max(run_ranks(cp, _peak, T(cp=cp), length))[0]
        for cp, length in ((2, 8192), (2, 16384), (4, 8192), (4, 16384))
    }
    for cp in (2, 4):
        assert 1.3 <= peaks[cp, 16384] / peaks[cp, 8192] <= 2.4, peaks
    for length in (8192, 16384):
        assert peaks[4, length] / peaks[2, length] <= 0.85, peaks
    assert peaks[2, 16384] < 16384 * 16384, peaks


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_close_to_fp32_as_plain_bf16(kind):
    """All experts and all keys are chosen, so that no rounding flips a choice: what is left is rounding alone."""
    batches = [tokens(1, 150, seed=seed) for seed in range(3)]
    everything = dict(num_experts_per_tok=8, topk_group=2 if kind == "deepseek_v32" else 1, index_topk=150)
    with torch.no_grad():
        exact = torch.cat([make(kind, **everything)(ids).logits for ids in batches])
        plain = (torch.cat([make(kind, **everything).bfloat16()(ids).logits for ids in batches]).float() - exact).abs()

    def run(topology, strategy):
        model = cpkit.apply(make(kind, **everything).bfloat16(), topology, strategy=strategy)
        out = torch.cat([model(ids).logits for ids in batches])
        assert out.dtype == torch.bfloat16
        return (out.float() - exact).abs()

    for topology in (T(cp=4), T(cp=2, tp=2, ep=4)):
        for strategy in ("zigzag", "interleave"):
            for error in run_ranks(topology.world, run, topology, strategy):
                assert error.mean() <= (1.02 if topology.tp == 1 else 1.1) * plain.mean(), error.mean() / plain.mean()
                assert error.max() <= 1.2 * plain.max()
