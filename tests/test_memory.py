"""Peak memory of a prefill beyond weights and cache grows with a rank's share of the rows."""

from __future__ import annotations

import torch

import cpkit
from cpkit import Topology
from cpkit.launch.peak import measured

from .ranks import run_ranks
from .tiny import make, tokens

SIZES = dict(
    hidden_size=256,
    moe_intermediate_size=128,
    intermediate_size=512,
    num_attention_heads=8,
    head_dim=32,
    num_hidden_layers=2,
    mlp_only_layers=[0],
    max_position_embeddings=65536,
)


def _peak(topology: Topology, length: int) -> int:
    """Bytes of this rank's prefill beyond what it held before and the cache that it leaves."""
    model = cpkit.apply(make(num_key_value_heads=2, **SIZES), topology, strategy="zigzag")
    model(tokens(1, 64), logits_to_keep=1)
    with measured("cpu") as peak:
        cache = model(tokens(1, length), logits_to_keep=1, use_cache=True).cache
    return peak.above - sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_peak_grows_as_rows_over_ranks():
    torch.manual_seed(0)
    peaks = {
        (cp, length): max(run_ranks(cp, _peak, Topology(cp=cp), length))
        for cp, length in ((2, 8192), (2, 16384), (4, 8192), (4, 16384))
    }
    for cp in (2, 4):
        assert 1.6 <= peaks[cp, 16384] / peaks[cp, 8192] <= 2.4, peaks
    for length in (8192, 16384):
        # half the rows a rank, and the same keys of one layer, gathered from all; with nothing divided it would be 1
        assert peaks[4, length] / peaks[2, length] <= 0.75, peaks
    assert 0.7 <= peaks[4, 16384] / peaks[2, 8192] <= 1.5, peaks  # the same rows a rank
