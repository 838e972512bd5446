"""interleave: rank r holds global rows r, r+C, r+2C, … of the flattened batch.

Two requests of 5 and 3 tokens, C = 4 (the index does not restart at requests)::

    row      0  1  2  3  4 | 5  6  7
    rank     0  1  2  3  0 | 1  2  3

Every rank has queries from everywhere, so work stays equal also where it stops growing with the position (top-k).
"""

from collections.abc import Sequence

from . import Segment


def deal(lengths: Sequence[int], prefixes: Sequence[int], size: int, align: int) -> list[list[Segment]]:
    """One segment of stride C for each request and rank. Strided rows have no block edges to align."""
    dealt: list[list[Segment]] = [[] for _ in range(size)]
    offset = 0
    for request, length in enumerate(lengths):
        for rank in range(size):
            start = (rank - offset) % size
            dealt[rank].append(Segment(request, start, len(range(start, length, size)), size))
        offset += length
    return dealt
