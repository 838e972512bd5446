"""The arguments and options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

from cpkit import ConfigurationError

from .inputs import Wanted

__all__ = [
    "AsJson", "Chat", "NewTokens", "Overrides", "PromptFile", "PromptText", "RecipeName", "Timeout", "Tokens",
    "TraceFile", "split",
]  # fmt: skip

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a path to a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as topology.cp=4; a lone - reads stdin."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
PromptText = Annotated[str | None, typer.Option("--prompt", help="The prompt; - reads stdin.")]
PromptFile = Annotated[str | None, typer.Option("--prompt-file", help="A file with the prompt; - reads stdin.")]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")]
Tokens = Annotated[int | None, typer.Option("--tokens", min=1, help="Use the prompt's first so many tokens.")]
NewTokens = Annotated[int | None, typer.Option("--max-new-tokens", min=1, help="Tokens to generate at most.")]
TraceFile = Annotated[str | None, typer.Option("--trace", help="Write rank 0's collectives as a Chrome trace.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a collective may take.")]


def split(
    words: list[str] | None, text: str | None, file: str | None, chat: bool, tokens: int | None, new: int | None = None
) -> tuple[list[str], Wanted]:
    """The overrides among the trailing words, with ``--max-new-tokens`` as one of them, and what is wanted of the
    prompt."""
    overrides = [word for word in words or [] if word != "-"]
    from_stdin = text == "-" or "-" in (words or [])
    if new is not None:
        overrides.append(f"generation.max_new_tokens={new}")
    if from_stdin:
        if file not in (None, "-") or text not in (None, "-"):
            raise ConfigurationError("stdin (-) and another prompt exclude each other; give one")
        text, file = None, "-"
    return overrides, Wanted(text, file, chat, tokens)
