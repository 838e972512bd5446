"""zigzag: each request in 2C contiguous blocks; rank r holds block r and block 2C-1-r.

16 tokens, C = 4::

    block    0     1     2     3     4     5     6     7
    tokens  0-1   2-3   4-5   6-7   8-9  10-11 12-13 14-15
    rank     0     1     2     3     3     2     1     0

An early, cheap block comes with a late, dear one, so causal attention work is equal; blocks stay contiguous.
"""

from collections.abc import Sequence

from . import Segment


def deal(lengths: Sequence[int], prefixes: Sequence[int], size: int, align: int) -> list[list[Segment]]:
    """All requests' early blocks in request order, then all their late blocks."""
    edges = [block_edges(length, prefix, 2 * size, align) for length, prefix in zip(lengths, prefixes, strict=True)]

    def blocks(number: int) -> list[Segment]:
        return [Segment(i, edge[number], edge[number + 1] - edge[number]) for i, edge in enumerate(edges)]

    return [blocks(rank) + blocks(2 * size - 1 - rank) for rank in range(size)]


def block_edges(length: int, prefix: int, blocks: int, align: int = 1) -> list[int]:
    """Edges of ``blocks`` blocks of ``length // blocks`` tokens, the first ``length % blocks`` one more.

    With ``align`` the inner edges move to the nearest multiple of it in absolute position (``prefix + edge``), so
    that a model's windows are not cut; blocks may then be empty.
    """
    small, larger = divmod(length, blocks)
    edges = [number * small + min(number, larger) for number in range(blocks + 1)]
    moved = [round((prefix + edge) / align) * align - prefix for edge in edges[1:-1]]
    return [0, *(min(max(edge, 0), length) for edge in moved), length]
