"""Recipes: the schema and its messages, overrides, those that are shipped, and SGLang's flags."""

from __future__ import annotations

import json

import pytest
import yaml

from cpkit import ConfigurationError, Topology
from cpkit.backends import Backend
from cpkit.kernels import KINDS
from cpkit.launch import cli, plan, recipe, translate
from cpkit.launch.checkpoint import config_of, dtype_of

DSA_RECIPES = ["deepseek-v3.2-8xh200", "glm-5.2-fp8-8xh200", "glm-5.3-8xh200"]
GPU_RECIPES = ["qwen3-30b-a3b-fp8-4xhopper", "qwen3-30b-a3b-bf16-4xh100", *DSA_RECIPES]
GPU_RECIPES += [f"{name}-tp4" for name in DSA_RECIPES]
OFFLINE = ["demo", "bench-qwen3-moe", "bench-deepseek-v32", "bench-glm-5", *GPU_RECIPES]
ONE_RANK = ["topology={cp: 1}", "config.quantization_config=null"]


def write(folder, **more):
    data = {"description": "A test", "random_model": {"model_type": "qwen3_moe"}} | more
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in data.items() if v is not None}))
    return str(path)


def run(capsys, monkeypatch, *words):
    """The command line in this process: exit code, stdout, stderr."""
    monkeypatch.setattr("sys.argv", ["cpkit", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    return code, *capsys.readouterr()


@pytest.mark.parametrize("name", recipe.names())
def test_shipped_recipes_load_and_resolve(name):
    loaded = recipe.load(name)
    assert loaded.recipe.topology.topology().world >= 2
    assert loaded.recipe.prompt is not None


def test_the_recipes_of_the_kit_are_there():
    assert sorted(OFFLINE) == recipe.names()
    fp8 = recipe.load("qwen3-30b-a3b-fp8-4xhopper").recipe
    assert fp8.model == "Qwen/Qwen3-30B-A3B-FP8"
    assert fp8.topology.topology() == Topology(cp=2, tp=2, ep=4)
    assert (fp8.strategy, fp8.hardware.device, fp8.hardware.gpus) == ("zigzag", "cuda", "4 x Hopper")


@pytest.mark.parametrize("name", OFFLINE)
def test_shipped_recipes_plan_without_gpus_weights_and_network(name):
    planned = plan.plan(recipe.load(name))
    assert sum(r["rows"] for r in planned["ranks"]) == planned["tokens"] * planned["topology"]["tp"]
    assert planned["balance"] < 1.001
    assert planned["fits"] in (True, None)


def test_a_plan_of_the_30b_model_has_its_published_sizes():
    planned = plan.plan(recipe.load("qwen3-30b-a3b-bf16-4xh100", ["topology={cp: 1}"]), tokens=1000)
    assert 30.5e9 < planned["weight_bytes"] / 2 < 30.6e9
    assert planned["cache_bytes"] == 1000 * 48 * 2 * 4 * 128 * 2
    eight_bits = plan.plan(recipe.load("qwen3-30b-a3b-fp8-4xhopper", ["topology={cp: 1}"]), tokens=1000)
    assert 0.5 < eight_bits["weight_bytes"] / planned["weight_bytes"] < 0.53


@pytest.mark.parametrize("name", DSA_RECIPES)
def test_recipes_of_models_that_select_keys_interleave_over_all_gpus(name):
    loaded, inside = recipe.load(name).recipe, recipe.load(f"{name}-tp4").recipe
    assert loaded.topology.topology() == Topology(cp=8, ep=8)
    assert inside.topology.topology() == Topology(cp=2, tp=4, ep=8)
    for one in (loaded, inside):
        assert (one.strategy, one.hardware.gpus, one.attention) == ("interleave", "8 x H200", "auto")
    assert loaded.config == inside.config


@pytest.mark.parametrize(
    ("name", "billions", "layers", "scored"),
    [("deepseek-v3.2-8xh200", 672.0, 61, 61), ("glm-5.2-fp8-8xh200", 743.5, 78, 21)],
)
def test_a_plan_of_a_model_that_selects_keys_has_its_published_sizes(name, billions, layers, scored):
    """Latents of 512 with rope keys of 64 in every layer, index keys of 128 where a layer has an indexer."""
    planned = plan.plan(recipe.load(name, ONE_RANK), tokens=1000)
    assert planned["weight_bytes"] / 2e9 == pytest.approx(billions, abs=0.5)
    assert planned["cache_bytes"] == 1000 * (layers * 576 + scored * 128) * 2
    assert planned["wire"] == {}


def test_a_plan_divides_heads_over_tp_and_never_latents():
    length = 32768
    for name in ("glm-5.2-fp8-8xh200", "glm-5.2-fp8-8xh200-tp4"):
        planned = plan.plan(recipe.load(name), tokens=length)
        sizes = Topology(**planned["topology"])
        gathered = length // sizes.cp * (sizes.cp - 1) * 2
        assert planned["cache_bytes"] == length * (78 * 576 + 21 * 128) * 2
        assert planned["wire"]["kv"] == {"bytes": gathered * 576, "of": "every layer"}
        assert planned["wire"]["index keys"] == {"bytes": gathered * 128, "of": "21 of 78 layers"}
    selected = {"bytes": 3 * length // 8 * 2048 * 4, "of": "21 of 78 layers"}
    assert planned["wire"]["selected keys"] == selected  # of the three other TP ranks
    short = plan.plan(recipe.load(name), tokens=2048)["wire"]
    assert "index keys" in short and "selected keys" not in short  # every key is selected


def test_a_plan_that_does_not_fit_says_by_how_much(capsys, monkeypatch):
    words = ["plan", "qwen3-30b-a3b-bf16-4xh100", "topology={cp: 4}", "hardware.memory_gib=40"]
    code, out, _ = run(capsys, monkeypatch, *words)
    assert code == 0 and "more than its 40.00 GiB" in out
    code, out, _ = run(capsys, monkeypatch, *words, "--json")
    assert json.loads(out)["fits"] is False


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stratgy": "zigzag"}, ["unknown key 'stratgy'", "nearest that exists is 'strategy'"]),
        ({"topology": {"pc": 2}}, ["unknown key 'topology.pc'", "'topology.cp'"]),
        ({"generation": {"max_tokens": 2}}, ["'generation.max_tokens'", "'generation.max_new_tokens'"]),
        ({"hardware": {"device": "tpu"}}, ["hardware.device = 'tpu'", "'cpu' or 'cuda'"]),
        ({"topology": {"cp": 0}}, ["topology.cp = 0", "greater than or equal to 1"]),
        ({"description": None}, ["description is missing"]),
        ({"model": "x"}, ["exactly one of model and random_model"]),
        ({"random_model": {"hidden_size": 8}}, ["random_model needs model_type"]),
        ({"prompt": {"source": "python-stdlib"}}, ["prompt", "give tokens too"]),
        ({"prompt": {"text": "a", "file": "b"}}, ["exactly one of text, file and source"]),
    ],
)
def test_mistakes_in_a_recipe_are_named_with_their_path(tmp_path, changes, said):
    with pytest.raises(ConfigurationError) as error:
        recipe.load(write(tmp_path, **changes))
    for words in ("made.yaml", *said):
        assert words in str(error.value)


def test_every_mistake_is_reported_at_once(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        recipe.load(write(tmp_path, stratgy="zigzag", topology={"pc": 2}))
    assert "stratgy" in str(error.value) and "topology.pc" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "qwen3_moe", "num_expert": 4}, "the nearest that exists is 'random_model.num_experts'"),
        ({"model_type": "qwen_moe3"}, "is not known; the nearest that exists is 'qwen"),
    ],
)
def test_mistakes_in_a_random_models_fields_are_named(tmp_path, fields, said):
    with pytest.raises(ConfigurationError, match=said):
        config_of(recipe.load(write(tmp_path, random_model=fields)))


def test_a_field_that_only_the_modeling_code_reads_is_taken(tmp_path):
    fields = {"model_type": "qwen3_moe", "head_dim": 48}
    assert config_of(recipe.load(write(tmp_path, random_model=fields))).head_dim == 48


def test_unknown_recipes_and_files():
    with pytest.raises(ConfigurationError, match="nearest that exists is 'demo'"):
        recipe.load("demoo")
    with pytest.raises(ConfigurationError, match="no such file"):
        recipe.load("./nowhere.yaml")


def test_text_that_is_no_recipe(tmp_path):
    path = tmp_path / "made.yaml"
    path.write_text("a: [1")
    with pytest.raises(ConfigurationError, match="is not YAML"):
        recipe.load(str(path))
    path.write_text("- a")
    with pytest.raises(ConfigurationError, match="mapping of keys, not list"):
        recipe.load(str(path))


def test_overrides_are_yaml_on_top_of_the_recipe(tmp_path):
    path = write(tmp_path, topology={"cp": 2}, generation={"temperature": 0.5})
    changes = [
        "topology.cp=4",
        "strategy=interleave",
        "generation.do_sample=true",
        "prompt={text: hi}",
        "dtype=bfloat16",
    ]
    made = recipe.load(path, changes).recipe
    assert made.topology.cp == 4 and made.strategy == "interleave" and made.prompt.text == "hi"
    assert made.generation.arguments() == {"max_new_tokens": 64, "do_sample": True, "temperature": 0.5}
    assert str(dtype_of(recipe.load(path, changes))) == "torch.bfloat16"
    assert recipe.load(path, ["generation.temperature=null"]).recipe.generation.temperature is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("topology.pc=4", "unknown key 'topology.pc'; the nearest that exists is 'topology.cp'"),
        ("tokens", "not of the form key=value"),
        ("strategy.cp=1", "has no keys below it"),
        ("topology.cp=many", "topology.cp = 'many'"),
        ("topology.cp=[1", "is not YAML"),
    ],
)
def test_mistakes_in_overrides(tmp_path, override, said):
    with pytest.raises(ConfigurationError) as error:
        recipe.load(write(tmp_path, strategy="zigzag"), [override])
    assert said in str(error.value)


def test_a_model_is_looked_for_beside_the_recipe_and_overrides_in_the_working_directory(tmp_path, monkeypatch):
    for place in ("recipes/near", "work/near"):
        (tmp_path / place).mkdir(parents=True)
    path = write(tmp_path / "recipes", random_model=None, model="near")
    monkeypatch.chdir(tmp_path / "work")
    assert recipe.load(path).model() == str(tmp_path / "recipes/near")
    assert recipe.load(path, ["model=near"]).model() == str(tmp_path / "work/near")
    assert recipe.load(path, ["model=org/far"]).model() == "org/far"


def test_a_model_that_is_nowhere_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigurationError, match="'no-such-model' could not be read"):
        config_of(recipe.load(write(tmp_path, random_model=None, model="no-such-model")))


def test_show_and_recipes_print_what_is_resolved(capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "show", "bench-qwen3-moe", "topology.cp=4", "--json")
    shown = json.loads(out)
    assert code == 0 and shown["topology"]["cp"] == 4 and shown["attention"] == "auto"
    assert yaml.safe_load(run(capsys, monkeypatch, "show", "bench-qwen3-moe")[1])["topology"]["cp"] == 2
    listed = json.loads(run(capsys, monkeypatch, "recipes", "--json")[1])
    assert {r["name"]: r["ranks"] for r in listed}["qwen3-30b-a3b-fp8-4xhopper"] == 4


def test_doctor_says_what_can_serve_and_why_not(capsys, monkeypatch):
    found = json.loads(run(capsys, monkeypatch, "doctor", "--json")[1])
    assert found["process_groups"]["gloo"] == "" and found["versions"]["torch"]
    assert found["families"]["qwen3_moe"] == found["families"]["glm_moe_dsa"] == ""
    sizes = {"attention": 128, "sparse_attention": 576, "indexer": 128}
    for kind, size in sizes.items():
        assert found["kernels"][kind]["backends"]["torch"] == ""
        assert list(found["kernels"][kind]["backends"]) == KINDS[kind].names
        assert found["kernels"][kind]["asked"].endswith(f"head size {size}")


def test_doctor_tells_what_runs_only_when_asked_for(capsys, monkeypatch):
    coarse = Backend("coarse", run, lambda device, dtype, head_dim: "", exact=False)
    monkeypatch.setitem(KINDS["indexer"].known, "coarse", coarse)
    shown = run(capsys, monkeypatch, "doctor")[1]
    for title in ("attention backends (", "sparse attention backends (", "indexer backends ("):
        assert title in shown
    assert shown.count("yes, when asked for by name") == 1


@pytest.mark.parametrize(
    ("flags", "topology"),
    [
        ("--tp 4 --ep 4 --attn-cp-size 2 --dp 1", Topology(cp=2, tp=2, ep=4)),
        ("--tp-size=8 --attention-context-parallel-size 4", Topology(cp=4, tp=2)),
        ("--tp 8 --dp 2 --enable-dp-attention --attn-cp-size 2", Topology(dp=2, cp=2, tp=2)),
        ("--tp 8 --dp 2", Topology(tp=8)),
    ],
)
def test_sglang_sizes(flags, topology):
    assert translate.translate([flags])["topology"] == vars(topology)


def test_sglang_flags_become_a_recipe_that_loads(tmp_path):
    flags = (
        "--model-path Qwen/Qwen3-30B-A3B --tp 2 --ep 2 --attn-cp-size 2 --enable-prefill-cp --cp-strategy interleave "
    )
    flags += "--attention-backend fa3 --chunked-prefill-size 8192 --context-length 32768 --dtype half"
    made = translate.translate([flags])
    assert made["unknown"] == [] and made["notes"] == []
    (tmp_path / "made.yaml").write_text(made["yaml"])
    loaded = recipe.load(str(tmp_path / "made.yaml")).recipe
    assert (loaded.model, loaded.strategy, loaded.attention) == ("Qwen/Qwen3-30B-A3B", "interleave", "flash3")
    assert (loaded.prefill_chunk_size, loaded.max_tokens, loaded.dtype) == (8192, 32768, "float16")


@pytest.mark.parametrize(
    ("given", "ours"), [("flashmla_sparse", "flashmla"), ("flashmla_kv", "flashmla"), ("fa3", "auto")]
)
def test_sglang_flags_of_a_model_that_selects_keys(given, ours):
    flags = "--model-path zai-org/GLM-5.2-FP8 --tp 8 --attn-cp-size 8 --enable-prefill-cp --cp-strategy interleave "
    made = translate.translate([flags + f"--attention-backend dsa --dsa-prefill-backend {given}"])
    assert made["topology"] == vars(Topology(cp=8)) and made["unknown"] == []
    assert (made["recipe"]["attention"], made["recipe"]["sparse_attention"]) == ("auto", ours)
    said = " ".join(made["notes"])
    assert "set topology.ep=8" in said and "indexer=deepgemm" in said
    assert ("has no counterpart" in said) == (ours == "auto")


def test_sglang_flags_without_a_counterpart_are_listed(capsys, monkeypatch):
    flags = ["--tp", "2", "--mem-fraction-static", "0.8", "--trust-remote-code", "--attention-backend", "flashmla"]
    code, out, _ = run(capsys, monkeypatch, "translate", "--json", *flags)
    made = json.loads(out)
    assert code == 0 and made["unknown"] == ["--mem-fraction-static 0.8", "--trust-remote-code"]
    assert any("flashmla" in note for note in made["notes"]) and any("--model-path" in note for note in made["notes"])
    out = run(capsys, monkeypatch, "translate", "--tp 2 --mem-fraction-static 0.8")[1]
    assert "no counterpart: --mem-fraction-static 0.8" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tp 4 --attn-cp-size 3", "set --tp to a multiple of 3"),
        ("--tp four", "'four' is not a whole number"),
        ("--tp 2 --cp-strategy zigzg", "nearest that exists is 'zigzag'"),
        ("--ep", "--ep has no value"),
        ("--tp 2 --ep 3", "ep can be one of"),
    ],
)
def test_sglang_flags_that_cannot_be(flags, said):
    with pytest.raises(ConfigurationError) as error:
        translate.translate([flags])
    assert said in str(error.value)


@pytest.mark.parametrize("given", ["attention=falsh2", "cache=sharded", "communicator=alltoall", "strategy=zigzga"])
def test_names_of_options_are_checked_with_the_recipe(given):
    key, value = given.split("=")
    with pytest.raises(
        ConfigurationError, match=rf"{key} = '{value}' is not known; (the nearest that exists|known are)"
    ):
        recipe.load("demo", [given])
