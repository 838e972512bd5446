"""What was resolved for a patched model, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .errors import ConfigurationError
from .patch import session_of

__all__ = ["Description", "describe"]


@dataclass(frozen=True)
class Description:
    """Resolved options with reasons; ``as_dict()`` is plain data, ``str()`` a table."""

    model_type: str
    topology: dict[str, int]
    device: str
    enabled: bool
    check_inputs: bool
    resolved: dict[str, dict[str, str]]
    groups: dict[str, list[int]]
    changed: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        sizes = ", ".join(f"{k}={v}" for k, v in self.topology.items())
        lines = [f"{self.model_type} on {self.device}: {sizes}{'' if self.enabled else ' (disabled)'}"]
        lines += [f"  {name:<17}{r['choice']:<12}{r['why']}" for name, r in self.resolved.items()]
        lines += [f"  {name + ' ranks':<17}{ranks}" for name, ranks in self.groups.items()]
        lines += [f"  changed          {count} x {name}" for name, count in self.changed.items()]
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """What cpkit resolved for ``model``. Raises ``ConfigurationError`` for a model that is not patched."""
    session = session_of(model)
    if session is None:
        raise ConfigurationError(f"{type(model).__name__} is not patched by cpkit; call cpkit.apply first")
    resolved = {
        "strategy": session.options.strategy,
        **{kind: backend.name for kind, backend in session.kernels.items()},
        "communicator": session.communicator,
        "cache": session.options.cache,
    }
    entries = {name: {"choice": choice, "why": session.reasons[name]} for name, choice in resolved.items()}
    if session.last_strategy is not None and session.options.strategy == "auto":
        choice, why = session.last_strategy
        entries["last strategy"] = {"choice": choice, "why": why}
    changed: dict[str, int] = {}
    for module in model.modules():
        if "cp_session" in module.__dict__:
            changed[type(module).__name__] = changed.get(type(module).__name__, 0) + 1
    groups = session.groups
    return Description(
        session.config.model_type,
        asdict(groups.topology),
        groups.device_type,
        session.enabled,
        session.options.check_inputs,
        entries,
        {name: list(getattr(groups, name).ranks) for name in ("cp", "tp", "ep", "replica")},
        changed,
    )
