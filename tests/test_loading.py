"""Loading: each rank reads and holds only its part, from one file or many, and whole files only."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from torch.distributed.tensor import DTensor

import cpkit
from cpkit import ConfigurationError, Topology, UnsupportedModel

from .cases import TOLERANCE
from .ranks import run_ranks, start_ranks
from .tiny import make, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model in four shard files, one expert a tensor, as published checkpoints are."""
    path = tmp_path_factory.mktemp("checkpoint")
    make().save_pretrained(path, max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) >= 4
    names = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(".experts.7." in name for name in names)
    return path


def local_parameters(model):
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def _loaded(folder, topology):
    read = set()
    plain = safetensors.torch.safe_open

    class Spy:
        """Counts the bytes of the slices that the loader takes."""

        def __init__(self, *args, **kwargs):
            self.file = plain(*args, **kwargs)

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            whole = self.file.get_slice(name)

            class Slice:
                def get_shape(self):
                    return whole.get_shape()

                def get_dtype(self):
                    return whole.get_dtype()

                def __getitem__(self, item):
                    taken = whole[item]
                    read.add((name, taken.numel()))
                    return taken

            return Slice()

    import transformers.modeling_utils as loader

    loader.safe_open = Spy
    model = cpkit.from_pretrained(folder, topology=topology, strategy="zigzag")
    loader.safe_open = plain
    ids = tokens(2, 41)
    logits = model(ids).logits
    generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    held, taken = local_parameters(model), sum(n for _, n in read)
    assert model.config.architectures == [type(model).__name__]
    cpkit.remove(model)
    with torch.no_grad():
        whole = model(ids).logits
    return logits, generated, held, taken, whole


@pytest.mark.parametrize(
    "topology",
    [Topology(), Topology(cp=2), Topology(cp=2, ep=2), Topology(tp=2), Topology(cp=2, tp=2, ep=4)],
    ids=str,
)
def test_each_rank_reads_and_holds_its_part(folder, topology):
    plain, ids = make(), tokens(2, 41)
    with torch.no_grad():
        expected = plain(ids).logits
    generated = plain.generate(ids, max_new_tokens=5, do_sample=False)
    everything = sum(p.numel() for p in plain.parameters())
    experts = sum(p.numel() for name, p in plain.named_parameters() if ".experts." in name)
    for logits, tokens_out, held, taken, whole in run_ranks(topology.world, _loaded, folder, topology):
        assert (logits - expected).abs().max() <= TOLERANCE
        assert torch.equal(tokens_out, generated)
        assert held == taken, "a rank read more of the files than it keeps"
        if topology.tp == 1:
            assert held == everything - experts + experts // topology.ep
        else:
            assert held < 0.62 * everything
        assert torch.equal(whole, expected)  # remove() gathers the weights again, bit for bit


def test_bf16_and_options_of_transformers_pass_through(folder):
    model = cpkit.from_pretrained(folder, dtype="bfloat16", attn_implementation="eager")
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    assert not model.training
    with pytest.raises(ValueError, match="device_map"):
        cpkit.from_pretrained(folder, device_map="auto")


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_families_load_sharded(tmp_path, kind):
    """Latents and indexers whole on every rank, heads and experts divided; routers stay in fp32 in a bf16 model."""
    plain, ids = make(kind), tokens(2, 41)
    plain.save_pretrained(tmp_path, max_shard_size="200KB")
    with torch.no_grad():
        expected = plain(ids).logits
    experts = sum(p.numel() for name, p in plain.named_parameters() if ".experts." in name)
    everything = sum(p.numel() for p in plain.parameters())
    biases = sum(b.numel() for name, b in plain.named_buffers() if name.endswith("e_score_correction_bias"))

    def run(topology):
        logits, _, held, taken, whole = _loaded(tmp_path, topology)
        small = cpkit.from_pretrained(tmp_path, topology=topology, dtype="bfloat16")
        dtypes = {name: t.dtype for name, t in [*small.named_parameters(), *small.named_buffers()]}
        kept = {d for name, d in dtypes.items() if name.endswith(("gate.weight", "e_score_correction_bias"))}
        assert kept == {torch.float32} and dtypes["lm_head.weight"] == torch.bfloat16
        assert torch.isfinite(small(ids).logits).all()
        return logits, held, taken, whole

    for topology in (Topology(cp=2, ep=2), Topology(cp=2, tp=2, ep=4)):
        for logits, held, taken, whole in run_ranks(topology.world, run, topology):
            assert (logits - expected).abs().max() <= TOLERANCE
            assert held + biases == taken, "a rank read more of the files than it keeps"
            assert held <= everything - experts + experts // topology.ep
            assert torch.equal(whole, expected)


def test_options_are_checked_before_weights_are_read(tmp_path):
    make().config.save_pretrained(tmp_path)  # no weights there at all
    with pytest.raises(ConfigurationError, match="strategy 'zigzga' is not known"):
        cpkit.from_pretrained(tmp_path, strategy="zigzga")
    with pytest.raises(ConfigurationError, match="torchrun --nproc-per-node 2"):
        cpkit.from_pretrained(tmp_path, topology=Topology(cp=2))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2", "architectures": ["GPT2LM"]}))
    with pytest.raises(UnsupportedModel, match="'gpt2' is not supported"):
        cpkit.from_pretrained(tmp_path)


def test_a_truncated_file_is_named_and_nobody_hangs(tmp_path):
    make().save_pretrained(tmp_path, max_shard_size="200KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-1000])
    for ok, value in start_ranks(2, lambda: cpkit.from_pretrained(tmp_path, topology=Topology(cp=2, ep=2)), timeout=20):
        assert not ok
        error, _ = value
        assert isinstance(error, cpkit.CpkitError) and victim.name in str(error), repr(error)


def test_a_missing_tensor_is_an_error(tmp_path):
    make().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(file)
    del state["model.layers.0.self_attn.q_proj.weight"]
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(cpkit.CpkitError, match=r"lacks .*layers\.0\.self_attn\.q_proj\.weight"):
        cpkit.from_pretrained(tmp_path)


def quantised(folder, kind="qwen3_moe", **overrides):
    """A published-style FP8 checkpoint (one scale a block of 128 x 128), and the model of its dequantised weights."""
    sizes = dict(hidden_size=128, intermediate_size=256, moe_intermediate_size=128, head_dim=64, num_attention_heads=4)
    model = make(kind, **sizes | overrides)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    state, exact = safetensors.torch.load_file(file), {}
    for name, weight in list(state.items()):
        if weight.ndim == 2 and "_proj" in name and "weights_proj" not in name:
            blocks = weight.view(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
            scale = blocks.abs().amax((1, 3)) / 448
            small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            state[name] = small.view(weight.shape)
            state[name + "_scale_inv"] = scale
            exact[name] = (small.float() * scale[:, None, :, None]).view(weight.shape)
        else:
            exact[name] = weight
    safetensors.torch.save_file(exact, file, metadata={"format": "pt"})
    reference = type(model).from_pretrained(folder).eval()
    safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    plain = ["lm_head", "weights_proj", "wq_b", "wk"]
    config["quantization_config"] = dict(
        quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic", modules_to_not_convert=plain
    )
    (folder / "config.json").write_text(json.dumps(config))
    return reference


LATENTS = dict(
    moe_intermediate_size=256,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_rope_head_dim=128,
    qk_nope_head_dim=64,
    v_head_dim=64,
    index_head_dim=128,
)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v32"])
@pytest.mark.parametrize("topology", [Topology(cp=2), Topology(cp=2, ep=2), Topology(tp=2, ep=2)], ids=str)
def test_fp8_checkpoints_are_unpacked_exactly(tmp_path, topology, kind):
    """transformers has no FP8 product on the CPU, so the weights are unpacked while they load, each rank its own."""
    from transformers import FineGrainedFP8Config

    sizes = LATENTS if kind == "deepseek_v32" else dict(head_dim=64 * topology.tp)
    reference, ids = quantised(tmp_path, kind, **sizes), tokens(1, 37)
    with torch.no_grad():
        expected = reference(ids).logits

    def run():
        unpacked = FineGrainedFP8Config(dequantize=True)
        model = cpkit.from_pretrained(
            tmp_path, topology=topology, dtype="float32", quantization_config=unpacked, communicator="auto"
        )
        return model(ids).logits

    for found in run_ranks(topology.world, run):
        assert (found - expected).abs().max() <= TOLERANCE
