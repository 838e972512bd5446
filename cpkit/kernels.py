"""The kinds of kernels that a layer may use, by the names of ``cpkit.apply``'s options."""

from .attention import ATTENTION
from .backends import Registry
from .indexer import INDEXER
from .sparse_attention import SPARSE_ATTENTION

__all__ = ["KINDS"]

KINDS: dict[str, Registry] = {kind.kind: kind for kind in (ATTENTION, SPARSE_ATTENTION, INDEXER)}
