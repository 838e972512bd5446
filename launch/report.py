"""What a verb prints: tables or one JSON document on stdout, progress on stderr, both on rank 0 alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from .ranks import is_first

__all__ = ["amount", "emit", "say", "table"]


def emit(data: Any, text: Any, as_json: bool) -> None:
    """Print ``data`` as JSON or ``text`` (anything that rich prints) for people."""
    if not is_first():
        return
    if as_json:
        print(json.dumps(data, indent=2, default=str), flush=True)
    else:
        _console(sys.stdout).print(text)


def say(message: str) -> None:
    """One line of progress."""
    if is_first():
        print(message, file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Group:
    """A title and a table; columns of figures are aligned to the right."""
    made = Table()
    cells = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows]
    for name, column in zip(columns, zip(*cells, strict=True), strict=True):
        figures = all(cell[:1].isdigit() or cell[:1] in "-<" for cell in column)
        made.add_column(name, justify="right" if figures else "left")
    for row in cells:
        made.add_row(*row)
    return Group(title, made)


def amount(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves a whole part."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _console(stream: Any) -> Console:
    """Of the terminal's width, or wide where a program reads it, so that no figure is cut."""
    return Console(file=stream, width=None if stream.isatty() else 160, markup=False, highlight=False)
