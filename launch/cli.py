"""The command line: one application with all verbs, for ``cpkit`` and for ``python -m cpkit.launch``."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch.distributed as dist
import typer

from cpkit import CpkitError

from . import recipe as recipes
from . import tables
from .bench import bench as run_bench
from .checkpoint import checkpoint, config_of, load_cp
from .doctor import doctor as run_doctor
from .inputs import Wanted, prompt_ids, tokenizer_of
from .options import (
    AsJson,
    Chat,
    NewTokens,
    Overrides,
    PromptFile,
    PromptText,
    RecipeName,
    Timeout,
    Tokens,
    TraceFile,
    split,
)
from .plan import plan as run_plan
from .ranks import Ranks, is_first, report_error, start
from .recipe import Loaded
from .report import emit, say
from .run import generate as run_generate
from .run import prefill as run_prefill
from .translate import translate as run_translate
from .verify import verify as run_verify

app = typer.Typer(
    name="cpkit",
    help="Prefill context parallelism for Hugging Face transformers. Start prefill, generate, verify and bench with "
    "torchrun --nproc-per-node N -m cpkit.launch VERB RECIPE.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_SILENCED: list[tuple[Any, Any]] = []  # the streams of a rank that is silent for now


@dataclass
class Launch:
    """A recipe whose ranks are connected and whose checkpoint is at ``path``."""

    loaded: Loaded
    ranks: Ranks
    path: str
    tokenizer: Any

    def prompt(self, wanted: Wanted) -> Any:
        return prompt_ids(self.loaded, wanted, self.tokenizer, config_of(self.loaded).vocab_size, self.ranks)


@contextmanager
def launched(verb: str, name: str, overrides: list[str], timeout: float) -> Iterator[Launch]:
    """Check the recipe, connect the ranks and find the checkpoint."""
    _speak()
    loaded = recipes.load(name, overrides)
    ranks = start(loaded, verb, timeout)
    with checkpoint(loaded, ranks) as path:
        yield Launch(loaded, ranks, path, tokenizer_of(loaded, path))


@app.command()
def prefill(
    name: RecipeName,
    overrides: Overrides = None,
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    chat: Chat = False,
    tokens: Tokens = None,
    trace: TraceFile = None,
    as_json: AsJson = False,
    timeout: Timeout = 600,
) -> None:
    """Fill the cache with a prompt; print the likeliest next tokens, time, memory and bytes."""
    overrides, wanted = split(overrides, prompt, prompt_file, chat, tokens)
    with launched("prefill", name, overrides, timeout) as launch:
        ids = launch.prompt(wanted)
        model = load_cp(launch.loaded, launch.path)
        data, recorded = run_prefill(launch.loaded, model, ids, launch.tokenizer, launch.ranks)
    _save(recorded, trace)
    emit(data, tables.prefill(data), as_json)


@app.command()
def generate(
    name: RecipeName,
    overrides: Overrides = None,
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    chat: Chat = False,
    tokens: Tokens = None,
    max_new_tokens: NewTokens = None,
    trace: TraceFile = None,
    as_json: AsJson = False,
    timeout: Timeout = 600,
) -> None:
    """Continue a prompt; the text comes as it is made."""
    overrides, wanted = split(overrides, prompt, prompt_file, chat, tokens, max_new_tokens)
    with launched("generate", name, overrides, timeout) as launch:
        ids = launch.prompt(wanted)
        model = load_cp(launch.loaded, launch.path)
        data, recorded = run_generate(launch.loaded, model, ids, launch.tokenizer, launch.ranks, not as_json)
    _save(recorded, trace)
    emit(data, tables.generate(data), as_json)


@app.command()
def verify(
    name: RecipeName,
    overrides: Overrides = None,
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    chat: Chat = False,
    tokens: Tokens = None,
    max_new_tokens: NewTokens = None,
    as_json: AsJson = False,
    timeout: Timeout = 600,
) -> None:
    """Run the same input without context parallelism and compare logits, tokens and caches; exit 1 if they differ."""
    overrides, wanted = split(overrides, prompt, prompt_file, chat, tokens, max_new_tokens)
    with launched("verify", name, overrides, timeout) as launch:
        ids = launch.prompt(wanted)
        data = run_verify(launch.loaded, launch.path, ids, launch.tokenizer, launch.ranks, say)
    emit(data, tables.verify(data), as_json)
    if not data["passed"]:
        raise typer.Exit(1)


@app.command()
def bench(
    name: RecipeName,
    overrides: Overrides = None,
    tokens: Annotated[list[int] | None, typer.Option("--tokens", min=1, help="Prompt length; several allowed.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Times that each is timed, in turn.")] = 3,
    only: Annotated[str, typer.Option("--only", help="Run those whose name begins so, such as cpkit.")] = "",
    as_json: AsJson = False,
    timeout: Timeout = 600,
) -> None:
    """Time prefill, on all ranks and on one, against plain transformers and its own tensor and expert parallelism."""
    with launched("bench", name, overrides or [], timeout) as launch:
        inputs = [launch.prompt(Wanted(tokens=n)) for n in tokens or (None,)]
        data = run_bench(launch.loaded, launch.path, inputs, rounds, launch.ranks, say, only)
    emit(data, tables.bench(data), as_json)


@app.command("recipes")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes that come with cpkit."""
    found = {name: recipes.load(name).recipe for name in recipes.names()}
    data = [
        {"name": name, "description": r.description, "ranks": r.topology.topology().world, "device": r.hardware.device}
        for name, r in found.items()
    ]
    emit(data, tables.recipes(data), as_json)


@app.command()
def show(name: RecipeName, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print a recipe as it is resolved, defaults and overrides included."""
    loaded = recipes.load(name, overrides or [])
    data = loaded.recipe.model_dump(exclude_none=True) | {"file": str(loaded.path)}
    emit(data, tables.as_yaml(data), as_json)


@app.command()
def plan(name: RecipeName, overrides: Overrides = None, tokens: Tokens = None, as_json: AsJson = False) -> None:
    """Dry-run a recipe from its config: rows, balance, bytes on the wire, weights and cache of each rank."""
    data = run_plan(recipes.load(name, overrides or []), tokens)
    emit(data, tables.plan(data), as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show versions, devices, and which backends can serve here, and why not."""
    data = run_doctor()
    emit(data, tables.doctor(data), as_json)


@app.command(context_settings={"ignore_unknown_options": True})
def translate(
    flags: Annotated[list[str], typer.Argument(help="SGLang's flags, quoted as one word or as they are.")],
    as_json: AsJson = False,
) -> None:
    """Turn SGLang's launch flags into a recipe; flags without a counterpart are listed."""
    data = run_translate(flags)
    emit(data, tables.translate(data), as_json)


def _save(recorded: Any, file: str | None) -> None:
    if file is not None and is_first():
        recorded.save(file)


def main() -> None:
    """Run the command line. What cpkit refuses is one message and exit code 1; wrong usage exits with 2."""
    try:
        with _one_voice():
            app()
    except CpkitError as error:
        report_error(str(error))
        sys.exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _one_voice() -> Iterator[None]:
    """Ranks other than 0 read the same words, so help and usage errors would come once a rank: they are silent until
    a verb starts or something is raised."""
    if not is_first():
        _SILENCED.append((sys.stdout, sys.stderr))
        sys.stdout = sys.stderr = io.StringIO()
    try:
        yield
    finally:
        _speak()


def _speak() -> None:
    if _SILENCED:
        sys.stdout, sys.stderr = _SILENCED.pop()
