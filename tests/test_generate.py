"""generate() goes on from the cache as if nothing had happened, the same on every rank."""

from __future__ import annotations

import pytest
import torch

import cpkit
from cpkit import Topology, UnsupportedInput

from .cases import TOLERANCE
from .ranks import run_ranks
from .tiny import make, tokens

NEW = dict(max_new_tokens=8, do_sample=False)


def padded(*lengths, side="left"):
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, n in enumerate(lengths):
        slots = slice(max(lengths) - n, None) if side == "left" else slice(0, n)
        ids[i, slots], mask[i, slots] = tokens(n, seed=i), 1
    return dict(input_ids=ids, attention_mask=mask)


def draft():
    return make(seed=5, num_hidden_layers=1)


MODES = {
    "greedy": lambda m: m.generate(tokens(1, 33), **NEW),
    "padded": lambda m: m.generate(**padded(21, 5, 32), **NEW),
    "beams": lambda m: m.generate(**padded(17, 9), num_beams=3, **NEW),
    "beam_samples": lambda m: m.generate(tokens(2, 9), num_beams=2, num_return_sequences=2, **NEW),
    "chunked": lambda m: m.generate(**padded(40, 23), prefill_chunk_size=7, **NEW),
    "prompt_lookup": lambda m: m.generate(tokens(1, 20).repeat(1, 3), prompt_lookup_num_tokens=4, **NEW),
    "assisted": lambda m: m.generate(tokens(1, 33), assistant_model=draft(), **NEW),
    "static": lambda m: m.generate(**padded(21, 32), cache_implementation="static", **NEW),
    "no_cache": lambda m: m.generate(tokens(1, 12), use_cache=False, max_new_tokens=4, do_sample=False),
    "one_token": lambda m: m.generate(tokens(1, 1), **NEW),
    "embeds": lambda m: m.generate(inputs_embeds=m.get_input_embeddings()(tokens(1, 19)), **NEW),
    "early_stop": lambda m: m.generate(**padded(21, 5), eos_token_id=list(range(400)), **NEW),
}


@pytest.fixture(scope="module")
def expected():
    model = make()
    return {name: mode(model) for name, mode in MODES.items()}


@pytest.mark.parametrize(
    "topology", [Topology(cp=2), Topology(cp=4), Topology(cp=2, ep=2), Topology(cp=2, tp=2, ep=4)], ids=str
)
def test_every_mode_gives_the_plain_tokens(topology, expected):
    def run(strategy):
        model = cpkit.apply(make(), topology, strategy=strategy)
        return {name: mode(model) for name, mode in MODES.items()}

    for strategy in ("zigzag", "interleave"):
        for rank, found in enumerate(run_ranks(topology.world, run, strategy)):
            wrong = [name for name in MODES if not torch.equal(found[name], expected[name])]
            assert not wrong, f"{strategy} rank {rank}: {wrong}"


def test_sampling_is_the_same_on_all_ranks_and_follows_rank_0():
    torch.manual_seed(7)
    sampled = make().generate(tokens(2, 20), do_sample=True, max_new_tokens=12)

    def run():
        model = cpkit.apply(make(), Topology(cp=2, tp=2, ep=4))
        torch.manual_seed(7 + int(torch.distributed.get_rank()))
        return model.generate(tokens(2, 20), do_sample=True, max_new_tokens=12)

    for found in run_ranks(4, run):
        assert torch.equal(found, sampled)


def test_an_argmax_tie_breaks_alike():
    def twin(model):
        with torch.no_grad():
            model.lm_head.weight[1:512:2] = model.lm_head.weight[0:512:2]
        return model

    expected = twin(make()).generate(tokens(1, 20), **NEW)

    def run():
        return cpkit.apply(twin(make()), Topology(cp=2)).generate(tokens(1, 20), **NEW)

    assert all(torch.equal(found, expected) for found in run_ranks(2, run))


def turns(model, sizes=((37, 5), (29, 5), (50, 12))):
    """A conversation: each turn brings tokens, then decodes greedily; all logits and the ids."""
    cache, logits, ids = None, [], []
    for number, (new, steps) in enumerate(sizes):
        step = tokens(1, new, seed=number)
        for _ in range(steps):
            with torch.no_grad():
                out = model(step, cache=cache, use_cache=True)
            cache, step = out.cache, out.logits[:, -1:].argmax(-1)
            logits.append(out.logits[0])
            ids.append(int(step))
    return torch.cat(logits), ids


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
def test_conversation(strategy):
    expected, ids = turns(make())

    def run():
        return turns(cpkit.apply(make(), Topology(cp=4, ep=2), strategy=strategy))

    for found, chosen in run_ranks(4, run):
        assert chosen == ids
        assert (found - expected).abs().max() <= TOLERANCE


def test_a_cache_can_be_cropped_and_reordered_after_prefill():
    def walk(model):
        with torch.no_grad():
            out = model(tokens(2, 30), use_cache=True)
            out.cache.crop(-4)
            out.cache.reorder_cache(torch.tensor([1, 0]))
            return model(tokens(2, 11, seed=3), cache=out.cache).logits

    expected = walk(make())
    for found in run_ranks(2, lambda: walk(cpkit.apply(make(), Topology(cp=2)))):
        assert (found - expected).abs().max() <= TOLERANCE


def test_outputs_come_whole():
    ids = tokens(2, 23)
    labels = ids.clone()
    labels[0, :5] = -100
    arguments = dict(output_hidden_states=True, output_router_logits=True, labels=labels)
    with torch.no_grad():
        expected = make()(ids, **arguments)

    def run():
        model = cpkit.apply(make(), Topology(cp=2, ep=2))
        out = model(ids, **arguments)
        with_tuple = model(ids, return_dict=False)
        deprecated = model(ids[:, :9], past_key_values=None).logits
        return out, with_tuple[0], deprecated, out.logits.requires_grad

    for out, logits, short, graph in run_ranks(2, run):
        assert abs(out.loss - expected.loss) < 1e-5 and abs(out.aux_loss - expected.aux_loss) < 1e-5
        for name in ("hidden_states", "router_logits"):
            assert len(out[name]) == len(expected[name])
            for mine, theirs in zip(out[name], expected[name], strict=True):
                assert mine.shape == theirs.shape and (mine - theirs).abs().max() <= TOLERANCE
        assert (logits - expected.logits).abs().max() <= TOLERANCE
        assert (short - expected.logits[:, :9]).abs().max() <= TOLERANCE
        assert not graph  # no half-connected graph: a backward pass would be silently wrong


def test_the_base_model_alone():
    ids = tokens(2, 17)
    with torch.no_grad():
        expected = make().model(ids).last_hidden_state

    def run():
        return cpkit.apply(make().model, Topology(cp=2))(ids).last_hidden_state

    assert all((found - expected).abs().max() <= TOLERANCE for found in run_ranks(2, run))


REFUSED = {
    "4-D mask": (dict(attention_mask=torch.ones(1, 1, 8, 8)), "4 dimensions"),
    "short mask": (dict(attention_mask=torch.ones(1, 7)), r"\(1, 7\), expected \(1, 8\)"),
    "all padding": (dict(attention_mask=torch.zeros(1, 8)), "at least one"),
    "local positions": (dict(position_ids=torch.arange(4)[None]), r"\(1, 4\), expected \(1, 8\)"),
    "3-D positions": (dict(position_ids=torch.zeros(3, 1, 8)), r"\(3, 1, 8\)"),
    "attentions": (dict(output_attentions=True), "cpkit.disabled"),
    "bad cu_seqlens": (dict(cu_seq_lens_q=torch.tensor([0, 5]), cu_seq_lens_k=torch.tensor([0, 5])), "0 to the 8"),
    "cu_seqlens with prefix": (dict(cu_seq_lens_q=torch.tensor([0, 8]), cu_seq_lens_k=torch.tensor([0, 9])), "equal"),
    "ids and embeds": (dict(inputs_embeds=torch.zeros(1, 8, 64)), "exactly one"),
}


def test_what_cannot_be_kept_is_refused_by_name():
    def run():
        model, found = cpkit.apply(make(), Topology(cp=2)), {}
        for name, (arguments, _) in REFUSED.items():
            try:
                model(tokens(1, 8), **arguments)
                found[name] = "accepted"
            except UnsupportedInput as error:
                found[name] = str(error)
        model.train()
        with pytest.raises(UnsupportedInput, match="eval"):
            model(tokens(1, 8))
        model.eval()
        cache = model(tokens(1, 8)).cache
        with pytest.raises(UnsupportedInput, match="packed sequences on top of a cache with 8 tokens"):
            model(tokens(1, 8), cache=cache, position_ids=torch.tensor([[8, 9, 10, 11, 0, 1, 2, 3]]))
        return found

    import re

    for found in run_ranks(2, run):
        for name, (_, message) in REFUSED.items():
            assert re.search(message, found[name]), (name, found[name])


def test_every_form_of_logits_to_keep():
    ids = tokens(2, 12)
    keeps = [
        0,
        1,
        torch.tensor([0, -1]),
        torch.tensor([[1, 2, 3], [3, 4, 5]]),
        slice(2, 7),
        torch.tensor([], dtype=int),
    ]
    keeps.append(torch.arange(24).view(2, 12) % 3 == 0)
    with torch.no_grad():
        expected = [make()(ids, logits_to_keep=keep).logits for keep in keeps]

    def run():
        model = cpkit.apply(make(), Topology(cp=3))
        return [model(ids, logits_to_keep=keep).logits for keep in keeps]

    for found in run_ranks(3, run):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.shape == theirs.shape
            assert not mine.numel() or (mine - theirs).abs().max() <= TOLERANCE


def test_position_gaps_are_one_request_on_a_cache_and_several_without():
    """As in transformers, which looks for packed requests only where there is no cache."""
    ids, positions = tokens(1, 11), (torch.arange(11) * 2)[None]
    calls = [dict(), dict(use_cache=False), dict(attention_mask=torch.ones(1, 11))]
    with torch.no_grad():
        expected = [make()(ids, position_ids=positions, **call).logits for call in calls]

    def run():
        model = cpkit.apply(make(), Topology(cp=3))
        return [model(ids, position_ids=positions, **call).logits for call in calls]

    for found in run_ranks(3, run):
        assert all((a - b).abs().max() <= TOLERANCE for a, b in zip(found, expected, strict=True))


def test_arguments_of_the_loss_pass_through():
    ids = tokens(1, 12)
    arguments = dict(labels=ids, num_items_in_batch=7)
    with torch.no_grad():
        expected = make()(ids, **arguments).loss
    for found in run_ranks(2, lambda: cpkit.apply(make(), Topology(cp=2))(ids, **arguments).loss):
        assert abs(found - expected) < 1e-5


def test_right_padding_in_a_window_is_refused_while_decoding_too():
    def run():
        model = cpkit.apply(make(use_sliding_window=True, sliding_window=5), Topology(cp=2))
        batch = padded(21, 5, side="right")
        cache = model(**batch).cache
        mask = torch.cat([batch["attention_mask"], torch.ones(2, 1, dtype=torch.int64)], 1)
        with pytest.raises(UnsupportedInput, match="padding inside the cached prefix"):
            model(tokens(2, 1), cache=cache, attention_mask=mask)
        return True

    assert all(run_ranks(2, run))


def test_expert_groups_that_straddle_dp_groups():
    """Six ranks in two DP groups of three, expert groups of two: the middle one has a rank in each."""
    model, prompts = make(num_experts=12), [tokens(1, 9), tokens(1, 14, seed=1)]
    expected = [model.generate(p, max_new_tokens=4, do_sample=False) for p in prompts]

    def run():
        model = cpkit.apply(make(num_experts=12), Topology(dp=2, cp=3, ep=2))
        place = torch.distributed.get_rank() // 3
        return torch.equal(model.generate(prompts[place], max_new_tokens=4, do_sample=False), expected[place])

    assert all(run_ranks(6, run))
