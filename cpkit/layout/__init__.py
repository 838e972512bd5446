"""Which rank holds which rows: pure index arithmetic on host integers, the same on every rank.

The coordinate is the *global row*: the new tokens of a forward, request after request, padding left out. A strategy
cuts every request into segments and deals them to the ranks; everything else (positions, key limits, who owns a row
and where it lies, what a rank must send) is derived from the segments by ``Layout``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..errors import ConfigurationError

__all__ = ["Layout", "Segment", "layout", "register_strategy", "strategies"]


@dataclass(frozen=True)
class Segment:
    """``count`` rows of one request: its new tokens ``start, start + step, start + 2 * step, …``."""

    request: int
    start: int
    count: int
    step: int = 1

    @property
    def stop(self) -> int:
        """One past the last new token of the request that the segment holds."""
        return self.start + (self.count - 1) * self.step + 1


# (lengths, prefixes, ranks, align) -> for each rank its segments, in local order
Strategy = Callable[[Sequence[int], Sequence[int], int, int], list[list[Segment]]]
_STRATEGIES: dict[str, Strategy] = {}


def register_strategy(name: str, strategy: Strategy) -> None:
    """Make ``strategy`` available under ``name``.

    It is called as ``strategy(lengths, prefixes, size, align)``: new tokens and cached tokens of each request, the
    number of ranks, and the token count to whose multiples (in absolute position) block edges should be moved where
    the model asks for it (1 otherwise). It returns, for each rank, the segments that the rank holds in local order.
    """
    if name == "auto" or name in _STRATEGIES:
        raise ConfigurationError(f"strategy name {name!r} is taken; registered are {strategies()}")
    _STRATEGIES[name] = strategy


def strategies() -> list[str]:
    """Names of the registered strategies."""
    return list(_STRATEGIES)


@dataclass(frozen=True, eq=False)
class Layout:
    """Who holds which global row, and where.

    ``lengths`` and ``prefixes`` are the new and the cached tokens of each request; ``segments[rank]`` lists the
    rank's segments in local order, empty ones left out.
    """

    strategy: str
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    segments: tuple[tuple[Segment, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.segments)

    @property
    def rows(self) -> int:
        """Number of global rows."""
        return sum(self.lengths)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first global row of each request."""
        return tuple(sum(self.lengths[:i]) for i in range(len(self.lengths)))

    @cached_property
    def local_rows(self) -> tuple[int, ...]:
        """How many rows each rank really holds."""
        return tuple(sum(s.count for s in held) for held in self.segments)

    @property
    def padded_rows(self) -> int:
        """Rows of the largest rank, which equal-sized collectives pad to."""
        return max(self.local_rows)

    @cached_property
    def local_to_global(self) -> tuple[torch.Tensor, ...]:
        """For each rank the global row of each of its local rows, ``[local]`` int64 on the CPU."""
        none = torch.empty(0, dtype=torch.int64)
        return tuple(
            torch.cat([none, *(self.offsets[s.request] + torch.arange(s.start, s.stop, s.step) for s in held)])
            for held in self.segments
        )

    @cached_property
    def owner(self) -> torch.Tensor:
        """The rank that holds each global row, ``[rows]`` int64 on the CPU."""
        return self._place()[0]

    @cached_property
    def index(self) -> torch.Tensor:
        """Where its owner holds each global row, ``[rows]`` int64 on the CPU."""
        return self._place()[1]

    def _place(self) -> tuple[torch.Tensor, torch.Tensor]:
        owner, index = torch.full((2, self.rows), -1).unbind()
        for rank, held in enumerate(self.local_to_global):
            owner[held] = rank
            index[held] = torch.arange(len(held))
        return owner, index

    def keys_seen(self, rank: int) -> torch.Tensor:
        """How many keys of its own request each local row of ``rank`` sees, itself included, ``[local]`` int64."""
        none = torch.empty(0, dtype=torch.int64)
        limits = (self.prefixes[s.request] + 1 + torch.arange(s.start, s.stop, s.step) for s in self.segments[rank])
        return torch.cat([none, *limits])


@lru_cache(maxsize=8)
def layout(strategy: str, lengths: tuple[int, ...], prefixes: tuple[int, ...], size: int, align: int = 1) -> Layout:
    """The layout of requests with ``lengths`` new and ``prefixes`` cached tokens over ``size`` ranks.

    Raises ``ConfigurationError`` for an unknown strategy, or one whose segments do not hold every row exactly once.
    """
    if strategy not in _STRATEGIES:
        raise ConfigurationError(f"strategy {strategy!r} is not known; use 'auto' or one of {strategies()}")
    dealt = _STRATEGIES[strategy](lengths, prefixes, size, align)
    result = Layout(strategy, lengths, prefixes, tuple(tuple(s for s in held if s.count) for held in dealt))
    every_row_once = (
        len(dealt) == size
        and sum(result.local_rows) == result.rows
        and all(s.start >= 0 and s.stop <= lengths[s.request] for held in result.segments for s in held)
        and bool((result.owner >= 0).all())
    )
    if not every_row_once:
        raise ConfigurationError(
            f"strategy {strategy!r} does not hold every row of lengths {list(lengths)} exactly once over {size} ranks"
        )
    return result


from . import interleave, zigzag  # noqa: E402  (they need Segment)

register_strategy("zigzag", zigzag.deal)
register_strategy("interleave", interleave.deal)
