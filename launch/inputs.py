"""Where a prompt comes from, and the token ids that it becomes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from cpkit import ConfigurationError

from .ranks import Ranks
from .recipe import Loaded
from .schema import Prompt

__all__ = ["Bytes", "Wanted", "prompt_ids", "stdlib_text", "tokenizer_of"]

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__", "lib2to3"}


@dataclass(frozen=True)
class Wanted:
    """What the command line says of the prompt."""

    text: str | None = None
    file: str | None = None  # "-" is stdin
    chat: bool = False
    tokens: int | None = None


class Bytes:
    """The tokenizer of a random model, which has none: UTF-8 bytes as token ids."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, **_: Any) -> str:
        ids = [int(i) for i in (ids if hasattr(ids, "__iter__") else [ids])]
        return "".join(chr(i) if 32 <= i < 127 or i == 10 else f"<{i}>" for i in ids)


def tokenizer_of(loaded: Loaded, path: str) -> Any:
    """The checkpoint's tokenizer, or bytes for a random model."""
    return Bytes() if loaded.recipe.random_model else AutoTokenizer.from_pretrained(path)


def prompt_ids(loaded: Loaded, wanted: Wanted, tokenizer: Any, vocab: int, ranks: Ranks) -> torch.Tensor:
    """Token ids ``[1, tokens]`` on this rank's device. Rank 0 alone reads files and stdin."""
    ids = torch.tensor([ranks.shared(lambda: read_ids(loaded, wanted, tokenizer, vocab))])
    return ids.to(ranks.torch_device())


def read_ids(loaded: Loaded, wanted: Wanted, tokenizer: Any, vocab: int) -> list[int]:
    """The ids; raises ``ConfigurationError`` for no prompt, an empty one, or one above the recipe's ``max_tokens``."""
    prompt, limit = loaded.recipe.prompt or Prompt(text=""), wanted.tokens
    text = _given_text(loaded, wanted)
    if text is None:
        limit = limit or prompt.tokens
        text = _recipe_text(loaded, prompt, limit, tokenizer)
    ids = _random(limit or 1, vocab) if text is None else _encoded(text, tokenizer, wanted.chat)[:limit]
    if not ids:
        raise ConfigurationError("the prompt is empty; give one with --prompt, --prompt-file or on stdin")
    if limit and len(ids) < limit:
        raise ConfigurationError(f"the prompt has {len(ids)} tokens, fewer than the {limit} that were asked for")
    most = loaded.recipe.max_tokens
    if most and len(ids) > most:
        raise ConfigurationError(f"the prompt has {len(ids)} tokens and {loaded.name} allows max_tokens = {most}")
    if max(ids) >= vocab:
        raise ConfigurationError(f"token id {max(ids)} is outside the model's vocabulary of {vocab}")
    return ids


def _given_text(loaded: Loaded, wanted: Wanted) -> str | None:
    """The prompt of the command line; stdin where it is a pipe and there is no other prompt."""
    if wanted.text is not None and wanted.file is not None:
        raise ConfigurationError("--prompt and --prompt-file exclude each other; give one")
    if wanted.text is not None:
        return wanted.text
    if wanted.file == "-":
        return sys.stdin.read()
    if wanted.file is not None:
        return _read(Path(wanted.file), "--prompt-file")
    if loaded.recipe.prompt is not None:
        return None
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigurationError(f"{loaded.name} has no prompt of its own; give --prompt, --prompt-file or stdin")
    return sys.stdin.read()


def _recipe_text(loaded: Loaded, prompt: Prompt, tokens: int | None, tokenizer: Any) -> str | None:
    """The recipe's text, or None for random ids."""
    if prompt.file is not None:
        return _read(loaded.file(prompt.file), "prompt.file")
    if prompt.source == "python-stdlib":
        return stdlib_text(8 * (tokens or 1))  # no tokenizer makes a token of more than some characters on average
    return prompt.text


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what} {str(path)!r} could not be read: {error}") from error


def _encoded(text: str, tokenizer: Any, chat: bool) -> list[int]:
    if not chat:
        return tokenizer.encode(text) if isinstance(tokenizer, Bytes) else tokenizer(text, verbose=False).input_ids
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigurationError("--chat: the model has no chat template; leave --chat out")
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)


def _random(tokens: int, vocab: int) -> list[int]:
    return torch.randint(1, vocab, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()


def stdlib_text(characters: int) -> str:
    """The first ``characters`` of the Python standard library's sources, module after module in sorted order."""
    parts, length = [], 0
    for path in _sources(Path(os.__file__).parent):
        parts.append(path.read_text(errors="replace"))
        length += len(parts[-1])
        if length >= characters:
            break
    return "".join(parts)[:characters]


def _sources(folder: Path) -> Iterator[Path]:
    """Python files, those of a folder before those of its subfolders."""
    entries = sorted(folder.iterdir())
    yield from (e for e in entries if e.suffix == ".py" and e.is_file())
    for entry in entries:
        if entry.is_dir() and entry.name not in _SKIPPED:
            yield from _sources(entry)
