"""Ranks that disagree, raise, or die: one clear error for all, no hang."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

import cpkit
from cpkit import RankFailure, RankMismatch, Topology, UnsupportedInput

from .ranks import run_ranks, start_ranks
from .tiny import make, tokens


def errors_of(results):
    assert not any(ok for ok, _ in results), results
    return [value[0] for _, value in results]


def test_ranks_called_with_different_inputs_all_raise_the_same_error():
    def run(different):
        model = cpkit.apply(make(), Topology(cp=2, tp=2, ep=4))
        arguments = dict(input_ids=tokens(1, 12), attention_mask=torch.ones(1, 12, dtype=torch.int64))
        if dist.get_rank() == 2:
            arguments |= different
        model(**arguments)

    mask = torch.ones(1, 12, dtype=torch.int64)
    mask[0, 0] = 0
    other = tokens(1, 12).clone()
    other[0, [3, 4]] = other[0, [4, 3]]
    shorter = dict(input_ids=tokens(1, 1), attention_mask=torch.ones(1, 1, dtype=torch.int64))
    reversed_ids = dict(input_ids=tokens(1, 12), attention_mask=torch.ones(1, 12).index_fill(1, torch.tensor([5]), 0))
    others = [dict(logits_to_keep=1), dict(logits_to_keep=torch.tensor([2, 3])), dict(output_hidden_states=True)]
    for different in (
        dict(input_ids=other),
        dict(attention_mask=mask),
        dict(use_cache=False),
        shorter,
        reversed_ids,
        *others,
    ):
        start = time.monotonic()
        errors = errors_of(start_ranks(4, run, different, timeout=20))
        assert time.monotonic() - start < 15
        assert {type(e) for e in errors} == {RankMismatch} and len({str(e) for e in errors}) == 1
        assert re.search(r"\[0, 1, 3\].*\[2\]|\[2\].*\[0, 1, 3\]", str(errors[0]))


def test_an_input_that_one_rank_refuses_is_refused_by_all():
    def run():
        model = cpkit.apply(make(), Topology(cp=2))
        mask = torch.ones(1, 12 if dist.get_rank() == 0 else 9)
        model(tokens(1, 12), attention_mask=mask)

    errors = errors_of(start_ranks(2, run, timeout=20))
    assert {type(e) for e in errors} == {UnsupportedInput}
    assert all(str(e).startswith("rank 1: attention_mask has shape (1, 9)") for e in errors)


def test_checking_can_be_turned_off():
    def run():
        model = cpkit.apply(make(), Topology(cp=2), check_inputs=False)
        with cpkit.trace() as trace, torch.no_grad():
            model(tokens(1, 12))
        with pytest.raises(UnsupportedInput, match="3 dimensions"):
            model(tokens(1, 12), attention_mask=torch.ones(1, 1, 12))
        return len(trace.events)

    assert run_ranks(2, run) == [4, 4]  # three layers and the output


PLACES = {
    "layer 0": lambda m: m.model.layers[0],
    "layer 2": lambda m: m.model.layers[2],
    "experts": lambda m: m.model.layers[0].mlp.gate,
    "head": lambda m: m.model.norm,
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_the_middle_of_one_rank_is_named_by_all(place):
    def run():
        model = cpkit.apply(make(), Topology(cp=2, ep=2))
        if dist.get_rank() == 1:

            def fail(*args):
                raise ValueError("injected here")

            PLACES[place](model).register_forward_pre_hook(fail)
        model(tokens(1, 30))

    start = time.monotonic()
    first, second = errors_of(start_ranks(2, run, timeout=25))
    assert time.monotonic() - start < 30
    assert isinstance(first, RankFailure) and "rank 1 raised ValueError: injected here" in str(first), first
    assert isinstance(second, ValueError)


def test_a_killed_rank_is_named():
    def run():
        model = cpkit.apply(make(), Topology(cp=3))
        if dist.get_rank() == 2:
            model.model.layers[1].register_forward_pre_hook(lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        model(tokens(1, 30))

    start = time.monotonic()
    results = start_ranks(3, run, timeout=25)
    assert time.monotonic() - start < 40
    for ok, value in results[:2]:
        assert not ok and isinstance(value[0], RankFailure), value
        assert "rank 2 stopped without a word" in str(value[0]), value[0]
    assert not results[2][0] and isinstance(results[2][1][0], EOFError)


def test_collectives_are_issued_in_the_same_order_by_full_and_empty_ranks():
    def run(topology):
        model, found = cpkit.apply(make(), topology, strategy="interleave"), []
        for n in (2, 5, 64):
            with cpkit.trace() as trace:
                model(tokens(1, n))
            found.append([(e.name, e.verb) for e in trace.events])
        return found

    for topology in (Topology(cp=4, ep=2), Topology(cp=2, tp=2, ep=4), Topology(cp=4, ep=4)):
        orders = run_ranks(4, run, topology)
        assert all(order == orders[0] for order in orders)
        assert all(len(o) > 6 for o in orders[0])


def test_float_masks_of_equal_sum_are_told_apart():
    def run():
        mask = torch.tensor([[1, 1, 1, 1, 0, 0]]) if dist.get_rank() else torch.tensor([[0, 0, 1, 1, 1, 1]])
        cpkit.apply(make(), Topology(cp=2))(tokens(1, 6), attention_mask=mask.float())

    assert {type(e) for e in errors_of(start_ranks(2, run, timeout=20))} == {RankMismatch}


@pytest.mark.parametrize("step", [lambda rank: tokens(1, 1, seed=rank), lambda rank: tokens(1, 1 + rank)])
def test_decoding_steps_are_compared_too(step):
    def run():
        model = cpkit.apply(make(), Topology(cp=2, ep=2))
        cache = model(tokens(1, 9)).cache
        model(step(dist.get_rank()), cache=cache)

    errors = errors_of(start_ranks(2, run, timeout=20))
    assert {type(e) for e in errors} == {RankMismatch}


def test_an_error_while_decoding_is_named():
    def run():
        model = cpkit.apply(make(), Topology(cp=2, ep=2))
        cache = model(tokens(1, 9)).cache
        if dist.get_rank() == 1:

            def fail(*args):
                raise ValueError("injected while decoding")

            model.model.layers[1].register_forward_pre_hook(fail)
        model(tokens(1, 1), cache=cache)

    first, second = errors_of(start_ranks(2, run, timeout=20))
    assert isinstance(first, RankFailure) and "rank 1 raised ValueError: injected while decoding" in str(first)


def test_words_of_an_earlier_forward_are_taken_back():
    def run():
        model = cpkit.apply(make(), Topology(cp=2))
        hook = model.model.layers[0].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens(1, 8))
        hook.remove()
        dist.barrier()
        model(tokens(1, 8))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(tokens(1, 8))

    (_, (error, _)), _ = start_ranks(2, run, timeout=20)
    assert "rank 1 stopped without a word" in str(error) and "ZeroDivision" not in str(error)
