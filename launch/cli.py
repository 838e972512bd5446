"""The command line: one application with all verbs, for ``cpkit`` and for ``python -m cpkit.launch``."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch.distributed as dist
import typer

from cpkit import CpkitError

from . import recipe as recipes
from .bench import bench as run_bench
from .checkpoint import checkpoint, config_of
from .inputs import Wanted, prompt_ids, tokenizer_of
from .ranks import is_first, report_error, start
from .recipe import Loaded
from .report import emit, say
from .tables import bench_tables

app = typer.Typer(
    name="cpkit",
    help="Prefill context parallelism for Hugging Face transformers. Start prefill, generate, verify and bench with "
    "torchrun --nproc-per-node N -m cpkit.launch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a path to a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides: topology.cp=4")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
PromptText = Annotated[str | None, typer.Option("--prompt", help="The prompt; - reads stdin.")]
PromptFile = Annotated[str | None, typer.Option("--prompt-file", help="A file with the prompt; - reads stdin.")]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a collective may take.")]


@app.callback()
def _verbs() -> None:
    pass


@app.command()
def bench(
    name: RecipeName,
    overrides: Overrides = None,
    tokens: Annotated[list[int] | None, typer.Option("--tokens", min=1, help="Prompt length; several allowed.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Times that each is timed, in turn.")] = 3,
    as_json: AsJson = False,
    timeout: Timeout = 600,
) -> None:
    """Time prefill against plain transformers and its own tensor and expert parallelism, in one run."""
    loaded = recipes.load(name, overrides or [])
    ranks = start(loaded, "bench", timeout)
    with checkpoint(loaded, ranks) as path:
        tokenizer, vocab = tokenizer_of(loaded, path), config_of(loaded).vocab_size
        inputs = [prompt_ids(loaded, Wanted(tokens=n), tokenizer, vocab, ranks) for n in tokens or [None]]
        data = run_bench(loaded, path, inputs, rounds, ranks, say)
    emit(data, bench_tables(data), as_json)


def main() -> None:
    """Run the command line; one clear message and a non-zero exit code for what cpkit refuses."""
    try:
        app()
    except CpkitError as error:
        report_error(str(error))
        sys.exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
