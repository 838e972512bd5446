"""Sizes, groups, and what must divide what."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from cpkit import ConfigurationError, Topology

from .ranks import run_ranks


def test_groups_of_eight_ranks():
    topology = Topology(dp=2, cp=2, tp=2, ep=4)
    assert topology.world == 8
    assert topology.members("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.members("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.members("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.members("ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.members("replica") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_groups_of_four_ranks():
    assert Topology(cp=2, tp=2).members("cp") == [[0, 2], [1, 3]]
    assert Topology(pp=2, cp=2).members("cp") == [[0, 1], [2, 3]]
    assert Topology(pp=2, cp=2).members("pp") == [[0, 2], [1, 3]]
    assert Topology(dp=2, cp=2, ep=4).members("ep") == [[0, 1, 2, 3]]


@pytest.mark.parametrize("sizes", [s for s in itertools.product((1, 2, 4), repeat=3) if s[0] * s[1] * s[2] <= 8])
def test_groups_partition_the_world(sizes):
    dp, cp, tp = sizes
    stage = dp * cp * tp
    for ep in range(1, 10):
        if stage % ep:
            with pytest.raises(ConfigurationError, match=rf"ep={ep}.*= {stage}; ep can be one of"):
                Topology(dp=dp, cp=cp, tp=tp, ep=ep)
            continue
        topology = Topology(dp=dp, cp=cp, tp=tp, ep=ep)
        for axis in ("dp", "cp", "tp", "pp", "ep", "replica"):
            groups = topology.members(axis)
            assert sorted(sum(groups, [])) == list(range(topology.world))
            assert all(g == sorted(g) for g in groups)


@pytest.mark.parametrize("bad", [dict(cp=0), dict(tp=-2), dict(dp=1.5), dict(cp="2"), dict(tp=True)])
def test_sizes_are_whole_numbers(bad):
    with pytest.raises(ConfigurationError, match="whole number of at least 1"):
        Topology(**bad)


def test_what_must_divide():
    config = SimpleNamespace(
        model_type="x", num_attention_heads=12, num_key_value_heads=4, num_experts=8, head_dim=64, hidden_size=768
    )
    Topology(tp=4, cp=2, ep=8).check_model(config)
    with pytest.raises(ConfigurationError, match=r"tp=8 does not divide num_attention_heads=12; tp can be one of \[1"):
        Topology(tp=8).check_model(config)
    with pytest.raises(ConfigurationError, match="tp=12 does not divide num_key_value_heads=4"):
        Topology(tp=12).check_model(config)
    with pytest.raises(ConfigurationError, match="ep=3 does not divide the model's 8 experts"):
        Topology(cp=3, ep=3).check_model(config)
    config.quantization_config = dict(quant_method="fp8", weight_block_size=[128, 128])
    Topology(tp=2).check_model(config)
    with pytest.raises(ConfigurationError, match="tp=4 leaves a rank 64 rows of k_proj.*FP8 scale for each 128"):
        Topology(tp=4).check_model(config)
    config.quantization_config = None
    config.num_experts = None
    with pytest.raises(ConfigurationError, match="x has no experts; use ep=1"):
        Topology(cp=2, ep=2).check_model(config)


def test_wrong_world_says_how_to_start(monkeypatch):
    with pytest.raises(ConfigurationError, match="= 4 ranks, and 1 is running.*torchrun --nproc-per-node 4"):
        Topology(cp=2, tp=2).connect("cpu")
    with pytest.raises(ConfigurationError, match=r"pp=2\): pipeline stages are not supported yet"):
        Topology(pp=2).connect("cpu")


def test_checks_hold_without_assertions():
    code = "import cpkit; cpkit.Topology(cp=2, ep=3)"
    ran = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert ran.returncode and "ep=3" in ran.stderr


def _connected():
    calls, plain = [], dist.new_group
    groups = Topology(cp=2, tp=2, ep=4).connect("cpu")
    dist.new_group = lambda *a, **k: calls.append(a) or plain(*a, **k)
    again = Topology(cp=2, tp=2, ep=4).connect("cpu")
    with pytest.raises(ConfigurationError, match="and 4 are running"):
        Topology(cp=2).connect("cpu")
    return groups is again and not calls, groups.cp.ranks, groups.cp.rank, groups.tp.ranks, groups.ep.ranks


def test_connecting_is_idempotent_and_uses_the_callers_process_group():
    results = run_ranks(4, _connected)
    assert [r[1:] for r in results] == [
        ((0, 2), 0, (0, 1), (0, 1, 2, 3)),
        ((1, 3), 0, (0, 1), (0, 1, 2, 3)),
        ((0, 2), 1, (2, 3), (0, 1, 2, 3)),
        ((1, 3), 1, (2, 3), (0, 1, 2, 3)),
    ]
    assert all(r[0] for r in results)
