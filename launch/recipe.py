"""Recipes by name or path, with overrides from the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from cpkit import ConfigurationError

from .schema import Recipe, nearest, validated

__all__ = ["Loaded", "load", "names"]


@dataclass(frozen=True)
class Loaded:
    """A checked recipe, the file that it came from and the overrides that were put on top."""

    name: str
    path: Path
    recipe: Recipe
    overrides: tuple[str, ...]

    def model(self) -> str | None:
        """The checkpoint: a folder beside the recipe or in the working directory, or else a Hub name."""
        name = self.recipe.model
        if name is None or os.path.isabs(name):
            return name
        places = [self.path.parent, Path.cwd()]
        if any(o.startswith("model=") for o in self.overrides):
            places.reverse()
        return next((str(place / name) for place in places if (place / name).is_dir()), name)

    def file(self, name: str) -> Path:
        """A file named in the recipe, relative to it."""
        return self.path.parent / name


def folder() -> Path:
    """Where the recipes that come with cpkit lie."""
    return Path(str(files("cpkit.recipes")))


def names() -> list[str]:
    """Names of the recipes that come with cpkit."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def load(name: str, overrides: Sequence[str] = ()) -> Loaded:
    """The recipe ``name`` (one of ``names()``, or a path to a YAML file) with ``key.sub=value`` overrides.

    Raises ``ConfigurationError`` for what does not exist or does not fit, with the nearest that does.
    """
    path = _find(name)
    data = _parse(path.read_text(), str(path))
    for override in overrides:
        _override(data, override)
    where = f"{path.name} with {' '.join(overrides)}" if overrides else str(path)
    return Loaded(path.stem, path, validated(data, where), tuple(overrides))


def _find(name: str) -> Path:
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise ConfigurationError(f"recipe {name!r}: there is no such file")
        return path.resolve()
    if name not in names():
        raise ConfigurationError(f"recipe {name!r} is not known{nearest(name, names())}; or give a path to a .yaml")
    return folder() / f"{name}.yaml"


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{where} is not YAML: {' '.join(str(error).split())}") from None


def _override(data: Any, override: str) -> None:
    """Put ``key.sub=value`` into ``data``; the value is a YAML scalar, list or mapping."""
    path, equals, value = override.partition("=")
    if not equals or not path:
        raise ConfigurationError(f"override {override!r} is not of the form key=value, such as topology.cp=4")
    *parents, last = path.split(".")
    for name in parents:
        if data.get(name) is None:
            data[name] = {}
        data = data[name]
        if not isinstance(data, dict):
            raise ConfigurationError(f"override {override!r}: {name} is {data!r}, which has no keys below it")
    data[last] = _parse(value, f"the value of override {override!r}")
