"""The verbs: what torchrun starts, and what they say and do when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import yaml

import cpkit
from cpkit import ConfigurationError, RankFailure
from cpkit.launch import bench as benching
from cpkit.launch import checkpoint, cli, compare, inputs, peak, plan, recipe, run, verify
from cpkit.launch.inputs import Bytes, Wanted
from cpkit.launch.ranks import Ranks, start
from cpkit.launch.wire import WireCount

from .ranks import run_ranks, start_ranks
from .test_recipes import run as run_main
from .tiny import CONFIGS

TINY = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
    "initializer_range": 0.1,
}


def written(folder, config):
    data = {
        "description": "A tiny random model",
        "random_model": config,
        "topology": {"cp": 2},
        "generation": {"max_new_tokens": 6},
        "prompt": {"source": "python-stdlib", "tokens": 90},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return written(tmp_path_factory.mktemp("recipes"), TINY)


@pytest.fixture(scope="module")
def selecting(tmp_path_factory):
    """A model that selects keys, in two of four layers."""
    return written(tmp_path_factory.mktemp("recipes"), {"model_type": "glm_moe_dsa", **CONFIGS["glm_moe_dsa"]})


def started(path, *overrides, verb="verify"):
    loaded = recipe.load(path, overrides)
    return loaded, start(loaded, verb, 60)


def ids_of(loaded, ranks):
    return inputs.prompt_ids(loaded, Wanted(), Bytes(), 512, ranks)


def verified(path, *overrides):
    loaded, ranks = started(path, *overrides)
    with checkpoint.checkpoint(loaded, ranks) as folder:
        return verify.verify(loaded, folder, ids_of(loaded, ranks), Bytes(), ranks, lambda _: None)


def verified_with_a_mistake(path, *overrides):
    """The context-parallel model gets one weight of one layer slightly wrong."""
    plain = verify.load_cp

    def wrong(*args):
        model = plain(*args)
        with torch.no_grad():
            model.model.layers[-1].self_attn.v_proj.weight[0, 0] += 0.01
        return model

    verify.load_cp = wrong
    return verified(path, *overrides)


# --- verify ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        ["topology={cp: 2}", "strategy=interleave", "prefill_chunk_size=32"],
        ["topology={cp: 1, tp: 2, ep: 2}"],
        ["topology={cp: 2, ep: 2}", "dtype=bfloat16"],
    ],
)
def test_verify_passes_and_every_rank_has_the_figures(tiny, overrides):
    first, second = run_ranks(2, verified, tiny, *overrides)
    assert first["passed"], first["checks"]
    assert first["equal_tokens"] == len(first["new_tokens"]) == 6
    assert first["positions"] == first["prompt_tokens"] == 90
    assert all(first[name] > 0 for name in ("cp_seconds", "plain_seconds", "cp_peak_bytes", "plain_peak_bytes"))
    assert first["logit_difference"] > 0  # two different computations, not one compared with itself
    assert {**first, "wire": 0} == {**second, "wire": 0}


def test_verify_compares_latents_and_index_keys(selecting):
    found = run_ranks(4, verified, selecting, "topology={cp: 2, tp: 2, ep: 4}", "strategy=interleave")[0]
    assert found["passed"], found["checks"]
    assert {"kv", "index keys", "selected keys"} <= found["wire"].keys()


def test_verify_fails_for_a_slightly_wrong_model(tiny):
    found = run_ranks(2, verified_with_a_mistake, tiny)[0]
    failed = {check["name"] for check in found["checks"] if not check["passed"]}
    assert not found["passed"] and len(failed) == 2
    assert all("error against float64" in name for name in failed)


def test_verify_compares_every_ranks_cache():
    whole = torch.arange(16.0).view(1, 4, 2, 2)

    def largest(mine, place):
        return compare.errors(mine, compare.share_of_heads(mine, whole, place, 2)).largest

    assert largest(whole[:, 2:], 1) == 0
    assert largest(whole[:, 2:], 0) == 8
    assert largest(whole[:, :, :1], 0) == float("inf")


def test_errors_add_up_and_are_infinite_where_a_value_is_not_finite():
    zero = torch.zeros(2)
    found = compare.errors(torch.tensor([3.0, 0.0]), zero) + compare.errors(torch.tensor([-4.0, 0.0]), zero)
    assert found.largest == 4 and found.root_mean_square == 2.5
    assert compare.errors(torch.tensor([float("nan"), 0.0]), zero).largest == float("inf")
    assert compare.of_layers([{"keys": zero}], [{"values": zero}]).largest == float("inf")
    assert compare.of_layers([{"keys": zero}, {"keys": zero + 2}], [{"keys": zero}, {"keys": zero}]).largest == 2


def test_a_mistake_in_one_place_does_not_hide_in_a_mean():
    own, ours = compare.Errors(1e-5, 1e-6, 10**6), compare.Errors(4e-5, 1e-6, 10**6)
    assert not verify._no_worse("logits", ours, own, full=True)["passed"]
    assert verify._no_worse("logits", ours, own, full=False)["passed"]
    assert not verify._no_worse("logits", compare.Errors(1e-5, 3e-6, 10**6), own, full=False)["passed"]


def test_tokens_may_part_only_at_a_tie_and_only_in_16_bits():
    def made(tokens, step):
        return verify.Run(1.0, 1, {}, None, [], torch.tensor(tokens), step)

    step = torch.zeros(2, 4)
    step[1, 2] = 0.1
    plain, ours = made([1, 2], step), made([1, 3], step)
    assert verify._equal_tokens(ours.tokens, plain.tokens) == 1
    assert not verify._tokens_check(ours, plain, error=0.0)["passed"]
    assert verify._tokens_check(ours, plain, error=0.06)["passed"]
    assert not verify._tokens_check(ours, plain, error=0.04)["passed"]
    assert not verify._tokens_check(made([1], step), plain, error=9.0)["passed"]


def verified_below_its_rounding(path):
    """As if the bound were below what this model rounds."""
    verify.FP32_BOUND = 2e-8
    return verified(path)


def test_verify_judges_what_rounds_coarsely_by_plain_transformers_own_error(tiny):
    found = run_ranks(2, verified_below_its_rounding, tiny)[0]
    assert found["passed"], found["checks"]
    assert [c["name"] for c in found["checks"][1:]] == [
        "logits, error against float64",
        "caches, error against float64",
    ]


# --- bench, bytes and memory ----------------------------------------------------------------------------------------


def benched(path, only=""):
    loaded, ranks = started(path, verb="bench")
    with checkpoint.checkpoint(loaded, ranks) as folder:
        return benching.bench(loaded, folder, [ids_of(loaded, ranks)], 2, ranks, lambda _: None, only)


def test_bench_times_all_entrants_on_the_same_input(tiny):
    data = run_ranks(2, benched, tiny)[0]
    found = {e["name"]: e for e in data["runs"][0]["entrants"]}
    assert list(found) == [
        "transformers",
        "cpkit one rank",
        "cpkit cp=2",
        "cpkit cp=2 ep=2",
        "transformers tp=2",
        "transformers tp=2 ep=2",
    ]
    assert data["not_run"] == {}
    for entrant in found.values():
        assert 0 < entrant["seconds_min"] <= entrant["seconds_median"] and entrant["ratio"] > 0
        assert entrant["logit_difference"] < 2e-5
    assert found["transformers"]["bytes"] == found["cpkit one rank"]["bytes"] == 0
    assert found["transformers tp=2"]["bytes"] > 0
    assert found["cpkit cp=2"]["bytes_by_name"]["kv"] == 3 * 45 * 2 * 2 * 16 * 4


def test_bench_leaves_out_what_a_length_is_too_long_for(selecting):
    data = run_ranks(2, benched, selecting, "cpkit")[0]
    found = {e["name"]: e for e in data["runs"][0]["entrants"]}
    assert list(found) == ["cpkit one rank", "cpkit cp=2", "cpkit cp=2 ep=2"] and data["not_run"] == {}
    assert all(e["ratio"] is None and e["logit_difference"] is None for e in found.values())
    assert found["cpkit one rank"]["bytes"] == 0
    assert found["cpkit cp=2"]["bytes_by_name"]["index keys"] == 2 * 45 * 16 * 4
    (_, (error, _)), _ = start_ranks(2, benched, selecting, "vllm")
    assert isinstance(error, ConfigurationError) and "leaves nobody; there are transformers, cpkit one" in str(error)


def benched_without_tp(path):
    def cannot(*args):
        raise RuntimeError("no such plan\nand more")

    benching.load_native = cannot
    return benched(path)


def test_bench_goes_on_without_what_does_not_load(tiny):
    data = run_ranks(2, benched_without_tp, tiny)[0]
    assert set(data["not_run"].values()) == {"RuntimeError: no such plan"} and len(data["not_run"]) == 2
    assert len(data["runs"][0]["entrants"]) == 4


def wire_of(path, *overrides):
    """Bytes of one prefill: by cpkit's own trace, by counting every collective, and what the plan says a layer."""
    loaded = recipe.load(path, overrides)
    ranks = start(loaded, "prefill", 60)
    with checkpoint.checkpoint(loaded, ranks) as folder:
        model = checkpoint.load_cp(loaded, folder)
        with WireCount() as wire, cpkit.trace() as trace:
            run.forward(model, ids_of(loaded, ranks), 1)
    return trace.totals(), wire.bytes, wire.calls


@pytest.mark.parametrize("communicator", ["gather", "all_to_all"])
def test_a_plan_says_the_bytes_that_are_counted(tiny, communicator):
    overrides = ["topology={cp: 2, tp: 2, ep: 4}", f"communicator={communicator}"]
    overrides.append("prompt={source: random, tokens: 480}")
    planned = plan.plan(recipe.load(tiny, overrides))["wire"]
    found = run_ranks(4, wire_of, tiny, *overrides)
    totals, counted, _ = found[1]
    assert totals["kv"]["bytes"] == 3 * planned["kv"]["bytes"]  # three layers, two with experts
    assert totals["share expert sums"]["bytes"] == 2 * planned["share expert sums"]["bytes"]
    names = [name for name, entry in planned.items() if entry["of"] == "expert layers"]
    assert len(names) == (6 if communicator == "all_to_all" else 5)
    for name in names:
        margin = 0.1 if "dispatch" in name or "combine" in name else 0  # expected values of a random routing
        mean = sum(of_rank[name]["bytes"] for of_rank, _, _ in found) / 4
        assert mean == pytest.approx(2 * planned[name]["bytes"], rel=margin), name
    assert counted > sum(entry["bytes"] for entry in totals.values())  # transformers' own sums come on top


@pytest.mark.parametrize("communicator", ["gather", "all_to_all"])
def test_a_plan_says_the_bytes_of_a_model_that_selects_keys(selecting, communicator):
    """Four layers, two of them with an indexer, three with experts; in bf16, but for the router's weights."""
    overrides = ["topology={cp: 2, tp: 2, ep: 4}", "dtype=bfloat16", f"communicator={communicator}"]
    overrides.append("prompt={source: random, tokens: 480}")
    planned = plan.plan(recipe.load(selecting, overrides))["wire"]
    totals, _, calls = run_ranks(4, wire_of, selecting, *overrides)[1]
    layers = {"every layer": 4, "2 of 4 layers": 2, "expert layers": 3}
    for name, entry in planned.items():
        if name in totals and not name.startswith(("dispatch", "combine")):
            assert totals[name]["bytes"] == layers[entry["of"]] * entry["bytes"], name
            assert totals[name]["calls"] == layers[entry["of"]], name
    assert {"kv", "index keys", "selected keys"} <= planned.keys() & totals.keys()
    assert planned.keys() - totals.keys() == {
        f"tensor parallel sums{of} (transformers)" for of in ("", " of the MLP", " of shared experts")
    }
    assert calls["allreduce_"] == 4 + 1 + 3  # attention; the MLP without experts; shared experts


def test_counting_collectives_agrees_with_cpkits_own_trace(tiny):
    for communicator in ("gather", "all_to_all"):
        for totals, counted, calls in run_ranks(
            2, wire_of, tiny, "topology={cp: 2, ep: 2}", f"communicator={communicator}"
        ):
            checks = 2 * 8  # the inputs' checksum, which the trace leaves out
            assert counted - sum(entry["bytes"] for entry in totals.values()) in (0, checks)
            assert sum(calls.values()) >= sum(entry["calls"] for entry in totals.values())


def test_peak_memory_is_what_the_block_needed():
    size = 64 << 20
    with peak.measured("cpu") as before:
        pass
    with peak.measured("cpu") as found:
        torch.ones(size, dtype=torch.uint8)
    assert 0.95 * size <= found.above < 1.25 * size
    assert before.above < size / 8


# --- ranks ----------------------------------------------------------------------------------------------------------


def waits_longer_than_the_timeout():
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), "cpu")
    result = ranks.alone(lambda: time.sleep(4) or "done")
    return result, ranks.shared(lambda: "word"), ranks.gathered(ranks.rank)


def test_work_of_rank_0_alone_may_outlast_the_timeout():
    assert run_ranks(2, waits_longer_than_the_timeout, timeout=3) == [("done", "word", [0, 1]), (None, "word", [0, 1])]


def fails_alone():
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), "cpu")

    def fail():
        raise ConfigurationError("too long")

    ranks.alone(fail)


def test_an_error_of_rank_0_alone_reaches_the_others():
    (_, (first, _)), (_, (second, _)) = start_ranks(2, fails_alone)
    assert isinstance(first, ConfigurationError) and isinstance(second, RankFailure)
    assert str(second) == "rank 0 raised ConfigurationError: too long"


def test_wrong_numbers_of_ranks_give_the_line_to_start_with(tiny, capsys, monkeypatch):
    code, _, err = run_main(capsys, monkeypatch, "verify", tiny, "topology.tp=2")
    assert code == 1
    assert f"torchrun --nproc-per-node 4 -m cpkit.launch verify {tiny} topology.tp=2" in err
    code, _, err = run_main(capsys, monkeypatch, "generate", "demo")
    assert code == 1 and "torchrun --nproc-per-node 2 -m cpkit.launch generate demo" in err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["topology.dp=2"], "topology.dp = 2: generate runs one prompt"),
        (["topology={cp: 1}", "hardware.device=cuda"], "sees no CUDA device"),
        (["topology={cp: 1}", "prompt=null", "--prompt", "a", "--prompt-file", "b"], "exclude each other"),
        (["topology={cp: 1}", "--prompt-file", "nowhere.txt"], "'nowhere.txt' could not be read"),
        (["topology={cp: 1}", "--prompt", ""], "the prompt is empty"),
        (["topology={cp: 1}", "--prompt", "abc", "--tokens", "9"], "3 tokens, fewer than the 9"),
        (["topology={cp: 1}", "max_tokens=2", "--prompt", "abc"], "allows max_tokens = 2"),
        (["topology={cp: 1}", "--chat", "--prompt", "abc"], "no chat template"),
        (["topology={cp: 1}", "strategy=zag"], "strategy = 'zag' is not known"),
    ],
)
def test_what_cannot_run_is_one_message_and_exit_code_1(tiny, capsys, monkeypatch, overrides, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = run_main(capsys, monkeypatch, "generate", tiny, *overrides)
    assert code == 1 and out == ""
    assert err.startswith("error: ") and said in err and "Traceback" not in err


def test_ranks_other_than_0_are_silent_and_exit_alike(tiny, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run_main(capsys, monkeypatch, "verify", tiny, "topology.pc=2") == (1, "", "")
    assert run_main(capsys, monkeypatch, "verfy", tiny) == (2, "", "")
    monkeypatch.setenv("RANK", "0")
    code, _, err = run_main(capsys, monkeypatch, "verfy", tiny)
    assert code == 2 and "verfy" in err


def test_bugs_keep_their_traceback(tiny, monkeypatch):
    def broken(*args):
        raise KeyError("a bug")

    monkeypatch.setattr(cli, "load_cp", broken)
    monkeypatch.setattr("sys.argv", ["cpkit", "prefill", tiny, "topology={cp: 1}"])
    with pytest.raises(KeyError, match="a bug"):
        cli.main()


def said_by_main(folder, *words):
    """What this rank's command line writes to stderr, and its exit code."""
    sys.argv, sys.stderr = ["cpkit", *words], open(f"{folder}/said-{dist.get_rank()}", "w")  # noqa: SIM115
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code
    finally:
        sys.stderr.close()


def test_an_error_of_rank_0_is_said_once_and_all_ranks_exit(tiny, tmp_path):
    codes = run_ranks(2, said_by_main, str(tmp_path), "prefill", tiny, "--prompt-file", "nowhere.txt")
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert codes == [1, 1] and said[1] == ""
    assert said[0].count("'nowhere.txt' could not be read") == 1 and "Traceback" not in said[0]


# --- prompts --------------------------------------------------------------------------------------------------------


def test_the_prompt_comes_from_one_place(tiny, tmp_path, capsys, monkeypatch):
    loaded, file = recipe.load(tiny), tmp_path / "prompt.txt"
    file.write_text("from a file")
    monkeypatch.setattr("sys.stdin", open(file))  # noqa: SIM115
    without = recipe.load(tiny, ["prompt=null"])

    def text(of, **wanted):
        return bytes(inputs.read_ids(of, Wanted(**wanted), Bytes(), 512)).decode()

    assert text(loaded, text="given") == "given"
    assert text(loaded, file=str(file)) == "from a file"
    assert text(without) == "from a file"  # stdin
    assert text(loaded) == inputs.stdlib_text(90)  # the recipe's own, before stdin
    assert text(loaded, tokens=20) == inputs.stdlib_text(20)


def test_the_standard_library_is_real_text_in_a_fixed_order():
    text = inputs.stdlib_text(300_000)
    assert len(text) == 300_000 and text.startswith(inputs.stdlib_text(1000))
    first = sorted(name for name in os.listdir(os.path.dirname(os.__file__)) if name.endswith(".py"))[0]
    with open(os.path.join(os.path.dirname(os.__file__), first)) as file:
        assert text.startswith(file.read()[:1000])


def test_a_chat_template_is_applied_on_demand(tiny):
    class Chatty(Bytes):
        chat_template = "a template"

        def apply_chat_template(self, messages, **_):
            return self.encode(f"<{messages[0]['role']}>{messages[0]['content']}")

    ids = inputs.read_ids(recipe.load(tiny), Wanted(text="hi", chat=True), Chatty(), 512)
    assert bytes(ids).decode() == "<user>hi"


def test_a_lone_dash_reads_stdin(tiny):
    from cpkit.launch.options import split

    assert split(["a=1", "-"], None, None, False, None, 7) == (["a=1", "generation.max_new_tokens=7"], Wanted(file="-"))
    assert split(None, "-", None, False, None)[1] == Wanted(file="-")
    with pytest.raises(ConfigurationError, match="exclude each other"):
        split(["-"], "text", None, False, None)


# --- one rank, in this process --------------------------------------------------------------------------------------


def test_generate_streams_and_reports(tiny, tmp_path, capsys, monkeypatch):
    one = ["generate", tiny, "topology={cp: 1}", "--prompt", "some words to go on from", "--max-new-tokens", "5"]
    code, out, _ = run_main(capsys, monkeypatch, *one, "--json", "prefill_chunk_size=8")
    data = json.loads(out)
    assert code == 0 and len(data["new_tokens"]) == 5 and data["prompt_tokens"] == 24
    assert 0 < data["prefill_seconds"] < data["seconds"]
    code, out, err = run_main(capsys, monkeypatch, *one, "prefill_chunk_size=8", "--trace", str(tmp_path / "t.json"))
    assert code == 0 and out.startswith(data["text"]) and out.count(data["text"]) == 1  # streamed, not printed again
    assert "prefill" in err and "24/24" in err
    assert "traceEvents" in json.loads((tmp_path / "t.json").read_text())
    assert "24/24" not in run_main(capsys, monkeypatch, *one)[2]  # one forward has no progress to show


def test_prefill_says_what_comes_next(tiny, capsys, monkeypatch):
    words = ["prefill", tiny, "topology={cp: 1}", "--prompt", "some words to go on from"]
    data = json.loads(run_main(capsys, monkeypatch, *words, "--json")[1])
    new = json.loads(run_main(capsys, monkeypatch, "generate", *words[1:], "--json")[1])
    assert data["next"][0]["id"] == new["new_tokens"][0]
    chunked = json.loads(run_main(capsys, monkeypatch, *words, "prefill_chunk_size=7", "--json")[1])
    assert [n["id"] for n in chunked["next"]] == [n["id"] for n in data["next"]]
    assert "likeliest next tokens" in run_main(capsys, monkeypatch, *words)[1]


# --- the real entry point -------------------------------------------------------------------------------------------


def torchrun(ranks, *words, stdin=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    started += ["--rdzv-endpoint", "localhost:0", "-m", "cpkit.launch", *words]
    return subprocess.run(started, capture_output=True, text=True, input=stdin, env=environment, timeout=120)


def test_verify_under_torchrun(tiny):
    done = torchrun(2, "verify", tiny)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("PASS") and done.stdout.count("PASS") == 1
    assert "greedy tokens equal: 6 of 6" in done.stdout and "kv" in done.stdout
    assert done.stderr.count("loading plain transformers on rank 0") == 1


def test_generate_json_under_torchrun_with_stdin(tiny):
    done = torchrun(2, "generate", tiny, "-", "--json", stdin="text that comes through a pipe")
    data = json.loads(done.stdout)
    assert data["prompt_tokens"] == 30 and len(data["new_tokens"]) == 6
    assert data["wire"]["kv"]["bytes"] == 3 * 15 * 2 * 2 * 16 * 4
