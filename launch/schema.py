"""What a recipe may say: its keys, their types, and errors that name the nearest key that exists."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cpkit import ConfigurationError, Topology
from cpkit.cache import PREFILL_CACHES
from cpkit.communicators import COMMUNICATORS
from cpkit.kernels import KINDS
from cpkit.layout import strategies

__all__ = ["Generation", "Hardware", "Prompt", "Recipe", "Sizes", "nearest", "validated"]


class Strict(BaseModel):
    """A mapping in which unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Sizes(Strict):
    """``cpkit.Topology``'s sizes."""

    dp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)

    def topology(self) -> Topology:
        return Topology(**self.model_dump())


class Hardware(Strict):
    """What the recipe was written for; ``device`` decides where it runs, the rest is for people and for ``plan``."""

    device: Literal["cpu", "cuda"] = "cpu"
    gpus: str | None = None
    memory_gib: float | None = Field(None, gt=0)


class Generation(Strict):
    """Arguments of transformers' ``generate``; those left out are the checkpoint's own."""

    max_new_tokens: int = Field(64, ge=1)
    do_sample: bool | None = None
    temperature: float | None = Field(None, gt=0)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    no_repeat_ngram_size: int | None = Field(None, ge=1)
    num_beams: int | None = Field(None, ge=1)
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``generate``."""
        return self.model_dump(exclude_none=True, exclude={"seed"})


class Prompt(Strict):
    """One of ``text``, ``file`` (beside the recipe) and ``source``, cut to its first ``tokens`` tokens."""

    text: str | None = None
    file: str | None = None
    source: Literal["python-stdlib", "random"] | None = None
    tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_of(self) -> Prompt:
        given = [name for name in ("text", "file", "source") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of text, file and source, not {given or 'none'}")
        if self.source and self.tokens is None:
            raise ValueError(f"source {self.source} has no end of its own: give tokens too")
        return self


class Recipe(Strict):
    """One supported combination of model, hardware, topology and options."""

    description: str
    model: str | None = None
    random_model: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    topology: Sizes = Sizes()
    strategy: str = "auto"
    attention: str = "auto"
    sparse_attention: str = "auto"
    indexer: str = "auto"
    communicator: str = "auto"
    cache: str = "replicated"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    hardware: Hardware = Hardware()
    max_tokens: int | None = Field(None, ge=1)
    prefill_chunk_size: int | None = Field(None, ge=1)
    generation: Generation = Generation()
    prompt: Prompt | None = None

    @model_validator(mode="after")
    def _known_names(self) -> Recipe:
        known = {
            "strategy": ["auto", *strategies()],
            **{kind: ["auto", *registry.names] for kind, registry in KINDS.items()},
            "communicator": ["auto", "local", *COMMUNICATORS],
            "cache": list(PREFILL_CACHES),
        }
        for key, names in known.items():
            if (given := getattr(self, key)) not in names:
                raise ValueError(f"{key} = {given!r} is not known{nearest(given, names)}")
        return self

    @model_validator(mode="after")
    def _one_model(self) -> Recipe:
        if (self.model is None) == (self.random_model is None):
            raise ValueError("give exactly one of model and random_model")
        for name in ("random_model", "config"):
            fields = getattr(self, name)
            if fields is not None and "model_type" not in fields:
                raise ValueError(f"{name} needs model_type, such as qwen3_moe")
        return self


def nearest(word: str, known: Sequence[str], prefix: str = "") -> str:
    """The end of a message about an unknown ``word``: the nearest of ``known``, or all of them where none is near."""

    def likeness(name: str) -> float:
        if sorted(name) == sorted(word):  # the same letters in another order
            return 1.0
        return difflib.SequenceMatcher(None, word, name).ratio()

    best = max(known, key=likeness)
    if likeness(best) >= 0.5:
        return f"; the nearest that exists is {prefix + best!r}"
    return f"; known are {', '.join(known)}"


def validated(data: Any, where: str) -> Recipe:
    """``data`` as a recipe; raises ``ConfigurationError`` with every mistake, its full path and what to do."""
    if not isinstance(data, dict):
        raise ConfigurationError(f"{where}: a recipe is a mapping of keys, not {type(data).__name__}")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise ConfigurationError("\n".join(f"{where}: {_message(e)}" for e in error.errors())) from None


def _message(error: Any) -> str:
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        *above, last = map(str, error["loc"])
        return f"unknown key {path!r}{nearest(last, _known(error['loc'][:-1]), ''.join(f'{n}.' for n in above))}"
    if error["type"] == "missing":
        return f"{path} is missing"
    text = error["msg"].removeprefix("Value error, ")
    if not path:
        return text
    return f"{path}: {text}" if error["type"] == "value_error" else f"{path} = {error['input']!r}: {text}"


def _known(path: tuple) -> list[str]:
    """The keys of the mapping at ``path``."""
    at: Any = Recipe
    for name in path:
        annotation = at.model_fields[name].annotation
        at = next(a for a in (annotation, *getattr(annotation, "__args__", ())) if hasattr(a, "model_fields"))
    return list(at.model_fields)
