"""Putting the patch on and taking it off: nothing process-wide, nothing left behind, and clear refusals."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, BertModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import cpkit
import cpkit.models  # noqa: F401  (its attention functions are registered when it is first needed)
from cpkit import ConfigurationError, CpkitError, Topology, UnsupportedModel

from .cases import TOLERANCE
from .ranks import run_ranks
from .tiny import make, tokens


def fingerprint(model):
    """Everything of a model that a patch might touch."""
    return {
        name: (
            type(module),
            sorted(k for k in module.__dict__ if k not in ("_parameters", "_buffers", "_modules")),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            getattr(module, "num_experts", None),
            {k: (type(p), tuple(p.shape)) for k, p in module._parameters.items() if p is not None},
        )
        for name, module in model.named_modules()
    }


def _applied_and_removed(topology):
    model, other = make(), make()
    ids = tokens(1, 33)
    before, registries = fingerprint(model), (set(ALL_ATTENTION_FUNCTIONS.keys()), set(ALL_MASK_ATTENTION_FUNCTIONS))
    with torch.no_grad():
        expected = model(ids).logits
    assert cpkit.apply(model, topology, strategy="zigzag") is model
    assert type(model).__name__ == "Qwen3MoeForCausalLM" and type(model).__module__.startswith("transformers.")
    with torch.no_grad():
        beside = other(ids)  # a plain model in the same process, while the first is patched
    assert torch.equal(beside.logits, expected)
    assert type(other) is not type(model) and model.config._attn_implementation == "sdpa"
    first = model(ids).logits
    cpkit.apply(model, topology, strategy="interleave")  # anew, without removing
    second = model(ids).logits
    cpkit.remove(model)
    assert fingerprint(model) == before
    assert (set(ALL_ATTENTION_FUNCTIONS.keys()), set(ALL_MASK_ATTENTION_FUNCTIONS)) == registries
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    with pytest.raises(ConfigurationError, match="not patched"):
        cpkit.remove(model)
    return float(max((first - expected).abs().max(), (second - expected).abs().max()))


@pytest.mark.parametrize("topology", [Topology(cp=2), Topology(cp=2, tp=2, ep=4)], ids=str)
def test_remove_leaves_nothing_behind(topology):
    assert max(run_ranks(topology.world, _applied_and_removed, topology)) <= TOLERANCE


def test_disabled_runs_whole_and_comes_back_after_errors():
    ids = tokens(2, 33)
    with torch.no_grad():
        expected = make()(ids, output_attentions=False).logits

    def run(topology):
        model = cpkit.apply(make(), topology)
        with cpkit.trace() as trace, cpkit.disabled(model) as same:
            assert same is model
            off = model(ids).logits
            assert not cpkit.describe(model).enabled
        moved = set(trace.totals())
        with pytest.raises(ZeroDivisionError), cpkit.disabled(model):
            raise ZeroDivisionError
        with cpkit.trace() as trace:
            on = model(ids).logits
        assert "kv" in trace.totals() and "kv" not in moved
        return float(max((off - expected).abs().max(), (on - expected).abs().max()))

    for topology in (Topology(cp=2), Topology(cp=2, tp=2, ep=4), Topology(dp=2, cp=2, ep=4)):
        assert max(run_ranks(topology.world, run, topology)) <= TOLERANCE


def test_an_error_inside_a_forward_leaves_a_usable_model():
    ids = tokens(1, 20)

    def run():
        model = cpkit.apply(make(), Topology(cp=2))
        expected = model(ids).logits
        hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids)
        hook.remove()
        assert model.cp_session.context is None
        assert all(m.self_attn.config is model.config for m in model.model.layers)
        return torch.equal(model(ids).logits, expected)

    assert all(run_ranks(2, run))


def test_one_rank_needs_no_process_group():
    ids, plain = tokens(1, 65), make()
    with torch.no_grad():
        expected = plain(ids).logits
    model = cpkit.apply(make(), strategy="zigzag")
    assert not torch.distributed.is_initialized()
    assert (model(ids).logits - expected).abs().max() <= TOLERANCE
    assert torch.equal(model.generate(ids, max_new_tokens=5), plain.generate(ids, max_new_tokens=5))


def test_describe_says_what_was_resolved_and_why():
    def run():
        model = cpkit.apply(make(), Topology(cp=2, ep=2))
        model(tokens(1, 50))
        return cpkit.describe(model).as_dict(), str(cpkit.describe(model))

    data, text = run_ranks(2, run)[1]
    assert data["topology"] == dict(dp=1, cp=2, tp=1, pp=1, ep=2)
    assert data["groups"] == dict(cp=[0, 1], tp=[1], ep=[0, 1], replica=[0, 1])
    assert data["resolved"]["attention"]["choice"] == "torch"
    assert data["resolved"]["last strategy"]["choice"] == "zigzag" and "1.0" in data["resolved"]["last strategy"]["why"]
    assert "other ranks on average" in data["resolved"]["communicator"]["why"]
    assert data["changed"]["Qwen3MoeAttention"] == 3
    assert "zigzag" in text and "cp=2" in text
    with pytest.raises(ConfigurationError, match="not patched"):
        cpkit.describe(make())


def test_saving_a_sharded_model_writes_the_whole_one(tmp_path):
    ids = tokens(1, 20)
    plain = make()
    with torch.no_grad():
        expected = plain(ids).logits

    def run(topology):
        model = cpkit.apply(make(), topology)
        model.save_pretrained(tmp_path / str(topology))
        return True

    def base_alone():
        cpkit.apply(make().model, Topology(tp=2)).save_pretrained(tmp_path / "base")

    run_ranks(2, base_alone)
    base = AutoModel.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, plain.model(ids).last_hidden_state)
    for topology in (Topology(cp=2), Topology(cp=2, ep=2), Topology(tp=2)):
        run_ranks(2, run, topology)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(topology))
        assert again.config.architectures == ["Qwen3MoeForCausalLM"]
        assert again.state_dict().keys() == plain.state_dict().keys()
        with torch.no_grad():
            assert torch.equal(again.eval()(ids).logits, expected)


def test_refusals():
    with pytest.raises(UnsupportedModel, match="'bert' is not supported; supported are .*qwen3_moe"):
        cpkit.apply(BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)))
    with pytest.raises(UnsupportedModel, match="Linear is not a transformers model"):
        cpkit.apply(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModel, match="compiled"):
        cpkit.apply(torch.compile(make()))
    with pytest.raises(UnsupportedModel, match="rope type 'dynamic'"):
        model = make()
        model.config.rope_parameters = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
        cpkit.apply(model)
    for option, message in {
        "strategy": "strategy 'x' is not known; use 'auto' or one of",
        "attention": "attention backend 'x' is not known",
        "communicator": "communicator 'x' is not known",
        "cache": "cache 'x' is not known",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            cpkit.apply(make(), **{option: "x"})
    with pytest.raises(ConfigurationError, match="moves rows between expert ranks and ep is 1; use 'local'"):
        cpkit.apply(make(), communicator="gather")


def test_another_kits_changes_are_refused():
    model = make()
    attention = model.model.layers[0].self_attn
    attention.forward = lambda *args, **kwargs: None
    with pytest.raises(UnsupportedModel, match="instance-level forward of unknown origin"):
        cpkit.apply(model)
    model = make()
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("OtherAttention", (type(layer.self_attn),), {})
    before = fingerprint(model)
    with pytest.raises(UnsupportedModel, match="no Qwen3MoeAttention: its classes were replaced"):
        cpkit.apply(model)
    assert fingerprint(model) == before


def test_other_versions_of_transformers_are_refused(monkeypatch):
    monkeypatch.setattr(cpkit.patch.transformers, "__version__", "5.30.0")
    with pytest.raises(UnsupportedModel, match="checked with transformers >=5.24,<5.25, and 5.30.0 is installed; pip"):
        cpkit.apply(make())


def test_a_patched_model_cannot_be_copied():
    model = cpkit.apply(make())
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(CpkitError, match="cannot be copied or pickled"):
            way(model)


def test_accelerates_hooks_are_kept():
    from accelerate import cpu_offload

    ids = tokens(1, 30)
    with torch.no_grad():
        expected = make()(ids).logits
    model = make()
    cpu_offload(model, execution_device=torch.device("cpu"))
    cpkit.apply(model, strategy="interleave")
    calls = []
    plain = cpkit.boundary.attend
    cpkit.boundary.attend = lambda *args: calls.append(1) or plain(*args)
    try:
        found = model(ids).logits
    finally:
        cpkit.boundary.attend = plain
    assert len(calls) == 3, "the patch was bypassed"
    assert (found - expected).abs().max() <= TOLERANCE
    cpkit.remove(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


def test_compiling_after_the_patch():
    ids = tokens(1, 40)
    with torch.no_grad():
        expected = make(num_hidden_layers=1)(ids).logits
    model = cpkit.apply(make(num_hidden_layers=1), strategy="zigzag")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert (compiled(ids).logits - expected).abs().max() <= TOLERANCE


def test_an_attention_argument_that_is_not_known_is_refused():
    model = cpkit.apply(make())
    with pytest.raises(cpkit.UnsupportedInput, match=r"\['s_aux'\] would change the attention"):
        model(tokens(1, 9), s_aux=torch.zeros(4))


def test_saving_whole_weights_needs_one_rank_only(tmp_path):
    def run():
        model = cpkit.apply(make(), Topology(cp=2))
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(tmp_path)
        return True

    assert all(run_ranks(2, run, timeout=20))


def test_tied_embeddings_under_tp_are_sharded_and_tied_again():
    ids = tokens(1, 33)
    tied = dict(tie_word_embeddings=True)
    with torch.no_grad():
        expected = make(**tied)(ids).logits

    def run(topology):
        model = cpkit.apply(make(**tied), topology)
        found = float((model(ids).logits - expected).abs().max())
        cpkit.remove(model)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)
        return found

    for topology in (Topology(tp=2), Topology(cp=2, tp=2, ep=4)):
        assert max(run_ranks(topology.world, run, topology)) <= TOLERANCE


def test_a_failed_apply_changes_nothing():
    model = cpkit.apply(make(), strategy="zigzag")
    with pytest.raises(ConfigurationError, match="strategy 'x'"):
        cpkit.apply(model, strategy="x")
    assert cpkit.describe(model).resolved["strategy"]["choice"] == "zigzag"

    def run():
        import cpkit.patch

        model = make()
        before = fingerprint(model)

        def broken(*args, **kwargs):
            raise KeyError("from transformers")

        cpkit.patch.apply_expert_parallelism = broken
        with pytest.raises(KeyError):
            cpkit.apply(model, Topology(cp=1, tp=2, ep=2))
        return fingerprint(model) == before

    assert all(run_ranks(2, run))


def test_other_heads_run_and_give_no_half_connected_graph():
    torch.manual_seed(0)
    make_head = lambda: AutoModelForSequenceClassification.from_config(make().config).eval()  # noqa: E731
    torch.manual_seed(0)
    plain = make_head()
    ids = tokens(1, 21)
    with torch.no_grad():
        expected = plain(ids).logits

    def run():
        torch.manual_seed(0)
        logits = cpkit.apply(make_head(), Topology(cp=2))(ids).logits
        return not logits.requires_grad and bool((logits - expected).abs().max() <= TOLERANCE)

    assert all(run_ranks(2, run))


def test_a_patched_part_is_named():
    model = make()
    cpkit.apply(model.model)
    with pytest.raises(UnsupportedModel, match="a part of this model is patched already"):
        cpkit.apply(model)


def test_another_default_dtype_does_no_harm():
    ids = tokens(1, 20)
    with torch.no_grad():
        expected = make()(ids).logits

    def run():
        model = cpkit.apply(make(), Topology(cp=2, ep=2), strategy="interleave")
        torch.set_default_dtype(torch.bfloat16)
        return model(ids).logits

    assert all((found - expected).abs().max() <= 1e-3 for found in run_ranks(2, run))
