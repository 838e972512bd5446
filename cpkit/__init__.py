"""Prefill context parallelism for Hugging Face transformers.

A long prompt's tokens are divided over ranks; attention stays exact on each rank's own tokens, and ``generate()`` goes
on from the cache as if nothing had happened.
"""

from .describe import describe
from .errors import (
    CheckpointError,
    ConfigurationError,
    CpkitError,
    RankFailure,
    RankMismatch,
    UnsupportedInput,
    UnsupportedModel,
)
from .layout import register_strategy
from .loading import from_pretrained
from .patch import apply, disabled, remove
from .topology import Topology
from .trace import trace
from .version import __version__

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "CpkitError",
    "RankFailure",
    "RankMismatch",
    "Topology",
    "UnsupportedInput",
    "UnsupportedModel",
    "__version__",
    "apply",
    "describe",
    "disabled",
    "from_pretrained",
    "register_strategy",
    "remove",
    "trace",
]
