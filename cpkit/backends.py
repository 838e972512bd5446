"""Kernels by kind and name: which are known, which can serve, which one ``auto`` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import ConfigurationError

__all__ = ["Backend", "Registry"]


@dataclass(frozen=True)
class Backend:
    """A kernel. ``run`` is called as its kind says; ``missing(device_type, dtype, head_dim)`` says why it cannot serve,
    or ''. One that is not ``exact`` gives other results than transformers by design (8-bit scores, say): it runs when
    it is asked for by name, never by ``auto``."""

    name: str
    run: Callable[..., Any]
    missing: Callable[[str, torch.dtype, int], str]
    exact: bool = True


@dataclass(frozen=True)
class Registry:
    """The backends of one kind, in the order in which ``auto`` tries them."""

    kind: str
    known: dict[str, Backend] = field(default_factory=dict)

    def register(self, backend: Backend) -> None:
        """Make a backend available under its name; ``auto`` takes the first registered that can serve."""
        if backend.name == "auto" or backend.name in self.known:
            raise ConfigurationError(f"{self.kind} backend name {backend.name!r} is taken; registered are {self.names}")
        self.known[backend.name] = backend

    @property
    def names(self) -> list[str]:
        return list(self.known)

    def choose(self, name: str, device_type: str, dtype: torch.dtype, head_dim: int) -> tuple[Backend, str]:
        """The backend to use and why. Raises ``ConfigurationError`` where ``name`` is unknown or cannot serve."""
        if name != "auto":
            if name not in self.known:
                raise ConfigurationError(
                    f"{self.kind} backend {name!r} is not known; use 'auto' or one of {self.names}"
                )
            reason = self.known[name].missing(device_type, dtype, head_dim)
            if reason:
                raise ConfigurationError(f"{self.kind} backend {name!r} cannot serve: {reason}; use 'auto' or 'torch'")
            return self.known[name], "asked for"
        passed: list[str] = []
        for backend in self.known.values():
            reason = "not transformers' own arithmetic, ask for it by name"
            if backend.exact:
                reason = backend.missing(device_type, dtype, head_dim)
            if not reason:
                return backend, "; ".join([*passed, f"{backend.name} is the first that can serve"])
            passed.append(f"{backend.name}: {reason}")
        raise ConfigurationError(f"no {self.kind} backend can serve: " + "; ".join(passed))
