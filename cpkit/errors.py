"""The errors that cpkit raises. Each message says what was wrong, the value, and what to do."""

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "CpkitError",
    "RankFailure",
    "RankMismatch",
    "UnsupportedInput",
    "UnsupportedModel",
]


class CpkitError(Exception):
    """Base class of everything that cpkit raises on purpose."""


class ConfigurationError(CpkitError, ValueError):
    """Sizes, names or options that cannot work together."""


class UnsupportedModel(CpkitError, ValueError):
    """A model, a transformers version or a state of a model that cpkit cannot patch."""


class CheckpointError(CpkitError, RuntimeError):
    """A checkpoint that is broken, or does not hold what the model needs."""


class UnsupportedInput(CpkitError, ValueError):
    """A forward argument that context parallelism cannot honour exactly."""


class RankMismatch(CpkitError, RuntimeError):
    """The ranks of one DP group were called with different inputs, or one of them could not start."""


class RankFailure(CpkitError, RuntimeError):
    """Another rank stopped in the middle of a forward."""
