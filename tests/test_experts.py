"""Communicators: what moves, how much, and that empty, uneven and poisoned rows do no harm."""

from __future__ import annotations

import pytest
import torch

import cpkit
from cpkit import ConfigurationError, Topology
from cpkit.communicators import choose_communicator, expected_copies
from cpkit.launch.wire import WireCount

from .cases import TOLERANCE
from .ranks import run_ranks
from .tiny import make, tokens

MOE_LAYERS = 2  # of the tiny model's three


def routes(model, ids):
    """Chosen experts ``[rows, k]`` of every MoE layer, in row order."""
    with torch.no_grad():
        out = model(ids, output_router_logits=True)
    return [logits.topk(2, -1).indices for logits in out.router_logits], out.logits


def _moved(topology, communicator, ids):
    model = cpkit.apply(make(), topology, strategy="zigzag", communicator=communicator)
    with cpkit.trace() as trace:
        logits = model(ids).logits
    return logits, trace.totals(), model.cp_session.groups.ep.rank


@pytest.mark.parametrize("topology", [Topology(cp=2, ep=2), Topology(cp=4, ep=4), Topology(cp=2, tp=2, ep=4)], ids=str)
def test_all_to_all_sends_one_copy_a_destination(topology):
    """Rows on the wire are counted from the plain model's routes; never more than a copy for each (row, expert)."""
    ids = tokens(1, 61)
    chosen, expected = routes(make(), ids)
    from cpkit.layout import layout

    placed, ep = layout("zigzag", (61,), (0,), topology.cp), topology.ep
    holder = torch.empty(61, dtype=torch.int64)  # the expert rank that brings each row: TP ranks divide their rows
    for cp, held in enumerate(placed.local_to_global):
        bounds = [len(held) * t // topology.tp for t in range(topology.tp + 1)]
        for t in range(topology.tp):
            holder[held[bounds[t] : bounds[t + 1]]] = cp * topology.tp + t
    for logits, totals, rank in run_ranks(topology.world, _moved, topology, "all_to_all", ids):
        assert (logits - expected).abs().max() <= TOLERANCE
        received = pairs = returned = 0
        for experts in chosen:
            mine = (experts // (8 // ep) == rank) & (holder != rank).unsqueeze(1)
            received += int(mine.any(1).sum())
            pairs += int(mine.sum())
            away = torch.stack([(experts // (8 // ep) == r).any(1) for r in range(ep) if r != rank], 1)
            returned += int(away[holder == rank].sum())
        assert totals["dispatch rows"]["rows"] == received <= pairs
        assert totals["dispatch rows"]["bytes"] == received * 64 * 4
        assert totals["combine rows"]["rows"] == returned
        assert totals["combine rows"]["bytes"] == returned * 64 * 4
        assert totals["dispatch rows"]["calls"] == MOE_LAYERS


def test_transformers_own_all_to_all_moves_more():
    """Its own sends a copy of a row for each of its experts there; counted on the wire, and just as exact."""
    ids = tokens(1, 61)
    _, expected = routes(make(), ids)

    def run(theirs):
        from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

        if theirs:
            EPImplementationInterface.register("cpkit_all_to_all", AllToAllEP)
        model = cpkit.apply(make(), Topology(cp=2, ep=2), strategy="zigzag", communicator="all_to_all")
        with WireCount() as wire:
            logits = model(ids).logits
        return float((logits - expected).abs().max()), wire.bytes

    ours, theirs = run_ranks(2, run, False), run_ranks(2, run, True)
    assert max(error for error, _ in (*ours, *theirs)) <= TOLERANCE
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        assert mine < other


def test_gather_moves_what_its_formula_says():
    ids = tokens(1, 61)
    _, expected = routes(make(), ids)
    for logits, totals, _ in run_ranks(4, _moved, Topology(cp=4, ep=4), "gather", ids):
        assert (logits - expected).abs().max() <= TOLERANCE
        padded = 16  # 61 rows over 4 ranks, zigzag: 16 15 15 15
        assert totals["gather rows"]["bytes"] == MOE_LAYERS * 3 * padded * 64 * 4
        assert totals["scatter expert sums"]["bytes"] == MOE_LAYERS * 3 * padded * 64 * 4


def test_kv_bytes_equal_the_formula():
    """One gather a layer: every other rank's rows, K and V of every KV head."""
    ids = tokens(1, 64)

    def run(topology):
        model = cpkit.apply(make(), topology, strategy="zigzag")
        with cpkit.trace() as trace:
            model(ids, logits_to_keep=1)
        return trace.totals()

    for topology in (Topology(cp=2), Topology(cp=4), Topology(cp=2, tp=2)):
        for totals in run_ranks(topology.world, run, topology):
            layers, heads, dim = 3, 2 // topology.tp, 16
            share = 64 * (topology.cp - 1) // topology.cp
            assert totals["kv"]["calls"] == layers
            assert totals["kv"]["rows"] == layers * share
            assert totals["kv"]["bytes"] == layers * share * 2 * heads * dim * 4
            assert totals["output"]["rows"] in (0, 1)  # the last row alone leaves its rank


@pytest.mark.parametrize("communicator", ["all_to_all", "gather"])
@pytest.mark.parametrize("favourite", [0, 7])
def test_a_router_that_sends_everything_to_one_rank(communicator, favourite):
    def skewed():
        model = make()
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                with torch.no_grad():
                    layer.mlp.gate.weight.zero_()
                    layer.mlp.gate.weight[favourite] += 5 * torch.randn(64, generator=torch.Generator().manual_seed(1))
        return model

    with torch.no_grad():
        expected = [skewed()(tokens(1, n)).logits for n in (5, 7, 3)]

    def run():
        model = cpkit.apply(skewed(), Topology(cp=4, ep=4), strategy="interleave", communicator=communicator)
        return [model(tokens(1, n)).logits for n in (5, 7, 3)]  # 2 1 1 1 rows; 2 2 2 1; 1 1 1 0

    for found in run_ranks(4, run):
        assert all((a - b).abs().max() <= TOLERANCE for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_experts_implementation(implementation):
    ids = tokens(2, 19)
    with torch.no_grad():
        expected = make()(ids).logits

    def run():
        model = make()
        model.set_experts_implementation(implementation)
        return cpkit.apply(model, Topology(cp=2, ep=2))(ids).logits

    assert all((found - expected).abs().max() <= TOLERANCE for found in run_ranks(2, run))


def test_stand_in_rows_reach_no_expert():
    """A rank without rows runs a stand-in through the model; the experts' histogram is the plain model's."""
    seen = {}

    def counting(model, into):
        for name, module in model.named_modules():
            if name.endswith("mlp.experts"):
                forward = module.forward

                def spy(rows, ids, weights, forward=forward, name=name):
                    into[name] = into.get(name, 0) + torch.bincount(ids.flatten(), minlength=8)
                    return forward(rows, ids, weights)

                module.forward = spy
        return model

    with torch.no_grad():
        counting(make(), seen)(tokens(1, 3))

    def run():
        mine = {}
        model = cpkit.apply(make(), Topology(cp=4, ep=4), strategy="interleave")
        for name, module in model.named_modules():
            if name.endswith("mlp.experts"):
                communicator = next(
                    cell.cell_contents
                    for cell in module.forward.__closure__
                    if isinstance(cell.cell_contents, cpkit.communicators.Communicator)
                )
                forward = communicator.experts_forward

                def spy(rows, ids, weights, forward=forward, name=name):
                    mine[name] = mine.get(name, 0) + torch.bincount(ids.flatten(), minlength=2)
                    return forward(rows, ids, weights)

                communicator.experts_forward = spy
        model(tokens(1, 3))
        return mine

    found = run_ranks(4, run)
    for name, histogram in seen.items():
        parts = [mine.get(name, torch.zeros(2, dtype=torch.int64)) for mine in found]
        assert torch.equal(torch.cat(parts), histogram)


def test_auto_takes_what_moves_fewer_bytes():
    assert expected_copies(8, 8, 4) == 3  # every expert is chosen: every rank has one
    assert expected_copies(128, 1, 2) == 0.5
    name, why = choose_communicator("auto", 128, 8, 2, "cuda")
    assert name == "gather" and "1.00 of 1 other ranks" in why
    name, why = choose_communicator("auto", 128, 2, 8, "cuda")
    assert name == "all_to_all" and "bytes of gather" in why
    assert choose_communicator("auto", 128, 8, 2, "cpu")[0] == "all_to_all"  # no device to wait for
    assert choose_communicator("auto", 8, 2, 1, "cpu")[0] == "local"
    with pytest.raises(ConfigurationError, match="'local' needs all experts on every rank, and ep is 2"):
        choose_communicator("local", 8, 2, 2, "cpu")
    with pytest.raises(ConfigurationError, match="'alltoall' is not known"):
        choose_communicator("alltoall", 8, 2, 2, "cpu")
