"""DeepSeek V3.2 and GLM-5 go on from the cache: every way of generating, on the sparse kernels too."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

import cpkit
from cpkit import Topology

from .cases import TOLERANCE
from .ranks import run_ranks
from .test_dsa import KINDS
from .test_generate import MODES, NEW, padded, turns
from .tiny import make, tokens

T = Topology


@pytest.fixture(scope="module")
def expected():
    return {kind: {name: mode(make(kind)) for name, mode in MODES.items()} for kind in KINDS}


@pytest.mark.parametrize("topology", [T(cp=2), T(cp=2, tp=2, ep=4)], ids=str)
def test_every_mode_gives_the_plain_tokens(topology, expected):
    def run(kind, strategy):
        model = cpkit.apply(make(kind), topology, strategy=strategy)
        return {name: mode(model) for name, mode in MODES.items()}

    for kind, strategy in zip(KINDS, ("zigzag", "interleave"), strict=True):
        for rank, found in enumerate(run_ranks(topology.world, run, kind, strategy)):
            wrong = [name for name in MODES if not torch.equal(found[name], expected[kind][name])]
            assert not wrong, f"{kind} {strategy} rank {rank}: {wrong}"


@pytest.mark.parametrize("kind", KINDS)
def test_conversation(kind):
    """Prefixes of a cache, steps on it, and prompts on both."""
    expected, ids = turns(make(kind))

    def run(strategy):
        found, chosen = turns(cpkit.apply(make(kind), T(cp=4, ep=2), strategy=strategy))
        assert chosen == ids
        return (found - expected).abs().max()

    for strategy in ("zigzag", "interleave"):
        assert max(run_ranks(4, run, strategy)) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
def test_several_tokens_on_a_cache_then_one(kind, static):
    """A prefill, five tokens at once, one alone: the index keys stay those of the whole sequence."""

    def logits(model):
        cache, out = StaticCache(model.config, max_cache_len=128) if static else None, []
        for part in tokens(1, 46).split([40, 5, 1], dim=1):
            outputs = model(part, cache=cache, use_cache=True)
            cache = outputs.cache
            out.append(outputs.logits)
        return torch.cat(out, 1)

    with torch.no_grad():
        expected = logits(make(kind))

    def run():
        return (logits(cpkit.apply(make(kind), T(cp=2))) - expected).abs().max()

    assert max(run_ranks(2, run)) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_no_layer_expands_or_scores_everything(kind):
    """The plain forward of indexers and the expansion of all keys never run: in prefill, on a prefix, in decoding."""

    def run():
        model = make(kind)
        attention = type(model.model.layers[0].self_attn)
        indexer = type(model.model.layers[0].self_attn.indexer)
        cpkit.apply(model, T(cp=2))

        def never(*args, **kwargs):
            raise AssertionError("the plain path ran")

        attention.expand_kv, indexer.forward = never, never
        return model.generate(tokens(1, 40), prefill_chunk_size=30, **NEW)

    found = run_ranks(2, run)
    assert torch.equal(found[0], make(kind).generate(tokens(1, 40), **NEW))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_in_the_cache_is_never_read(kind):
    """Huge values in the cached padding slots, left and right, change nothing on a prefix nor in decoding."""

    def run(side):
        model = cpkit.apply(make(kind), T(cp=2))
        given, logits = padded(40, 23, side=side), []
        for poison in (False, True):
            cache = model(**given, use_cache=True).cache
            if poison:
                holes = given["attention_mask"] == 0
                for layer in cache.layers:
                    for states in (layer.keys, layer.values):
                        states.transpose(1, 2)[holes] = 1e4
                    if layer.is_indexer_initialized:
                        layer.indexer_keys[holes] = 1e4
            mask, found = given["attention_mask"], []
            for new in (5, 1):
                mask = torch.cat([mask, torch.ones(2, new, dtype=torch.int64)], 1)
                positions = (mask.cumsum(1) - 1)[:, -new:]
                found.append(model(tokens(2, new), attention_mask=mask, position_ids=positions, cache=cache).logits)
            logits.append(torch.cat(found, 1))
        assert torch.isfinite(logits[1]).all()
        return (logits[0] - logits[1]).abs().max()

    for side in ("left", "right"):
        assert max(run_ranks(2, run, side)) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_an_assistant_of_the_same_family(kind):
    expected = make(kind).generate(tokens(1, 33), assistant_model=make(kind, seed=5), **NEW)

    def run():
        return cpkit.apply(make(kind), T(cp=2)).generate(tokens(1, 33), assistant_model=make(kind, seed=5), **NEW)

    assert all(torch.equal(found, expected) for found in run_ranks(2, run))


@pytest.mark.parametrize("kind", KINDS)
def test_disabled_and_removed_are_the_plain_model(kind):
    ids = tokens(1, 40)
    expected = make(kind).generate(ids, **NEW)

    def run():
        model = cpkit.apply(make(kind), T(cp=2, tp=2))
        with cpkit.disabled(model):
            disabled = model.generate(ids, **NEW)
        return disabled, cpkit.remove(model).generate(ids, **NEW)

    for disabled, removed in run_ranks(4, run):
        assert torch.equal(disabled, expected) and torch.equal(removed, expected)
