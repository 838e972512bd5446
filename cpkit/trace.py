"""What went over the wire: every collective that cpkit issues, by name.

>>> with cpkit.trace() as trace:
...     model.generate(**inputs)
>>> trace.totals()["kv"]["bytes"]
>>> trace.save("trace.json")          # open in Perfetto or chrome://tracing
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

__all__ = ["Event", "Trace", "trace"]


@dataclass
class Event:
    """One collective of this rank: ``rows`` and ``bytes`` are those that it received from other ranks, tail padding
    of equal shards included in ``bytes`` and not in ``rows``; ``start`` and ``end`` are ``time.perf_counter`` seconds
    from issue to the end of the wait."""

    name: str
    verb: str
    ranks: int
    rows: int
    bytes: int
    start: float
    end: float = 0.0


@dataclass
class Trace:
    """The events that this rank issued while the trace was open."""

    events: list[Event] = field(default_factory=list)

    def totals(self) -> dict[str, dict[str, float]]:
        """Calls, rows, bytes and seconds by name."""
        sums: dict[str, dict[str, float]] = {}
        for event in self.events:
            entry = sums.setdefault(event.name, {"calls": 0, "rows": 0, "bytes": 0, "seconds": 0.0})
            entry["calls"] += 1
            entry["rows"] += event.rows
            entry["bytes"] += event.bytes
            entry["seconds"] += event.end - event.start
        return sums

    @property
    def bytes(self) -> int:
        """All bytes received from other ranks."""
        return sum(event.bytes for event in self.events)

    def save(self, path: str | Path) -> None:
        """Write the events as a Chrome trace file (JSON, microseconds; one process row a rank)."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        events = [
            {
                "name": e.name,
                "cat": e.verb,
                "ph": "X",
                "ts": e.start * 1e6,
                "dur": (e.end - e.start) * 1e6,
                "pid": rank,
                "tid": 0,
                "args": {"verb": e.verb, "ranks": e.ranks, "rows": e.rows, "bytes": e.bytes},
            }
            for e in self.events
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


_OPEN: list[Trace] = []


@contextmanager
def trace() -> Iterator[Trace]:
    """Record this rank's collectives until the block ends. Traces may be nested; each sees all events within it."""
    opened = Trace()
    _OPEN.append(opened)
    try:
        yield opened
    finally:
        _OPEN.remove(opened)


def record(name: str, verb: str, ranks: int, rows: int, nbytes: int) -> Event:
    """Add an event to every open trace; whoever waits for the collective sets its ``end``."""
    now = time.perf_counter()
    event = Event(name, verb, ranks, rows, nbytes, now, now)
    for opened in _OPEN:
        opened.events.append(event)
    return event
