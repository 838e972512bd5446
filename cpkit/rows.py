"""The one verb: fetch rows of a tensor that a group holds, and its mirror image, return rows with a sum.

A plan is made from a layout, which every rank knows whole, so each rank works out alone what it sends and receives:
one collective, no handshake. ``AllRows`` gathers equal shards padded at the tail; ``ListedRows`` moves just the rows
that each rank asked for. Collectives are asynchronous: the caller gets a ``Pending`` and waits when it needs the rows.

    layout (zigzag, C = 2)      rank 0: rows 0 1 6      rank 1: rows 2 3 4 5
    AllRows.fetch               both:   rows 0 1 2 3 4 5 6
    ListedRows([[5], [0, 6]])   rank 0: row  5          rank 1: rows 0 6
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .faults import watched
from .layout import Layout
from .topology import Group
from .trace import Event, record

__all__ = ["AllRows", "ListedRows", "Pending", "divided", "exchange", "gather_uneven", "issue", "scatter_sums"]


class Pending:
    """Rows on their way; ``wait()`` returns them, the second time too. Issue in the same order on all ranks; wait in
    any."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], Any], event: Event | None = None):
        self.work, self.event = work, event
        self.finish: Callable[[], Any] | None = finish
        self.result: Any = None

    def wait(self) -> Any:
        if self.finish is not None:
            if self.work is not None and self.event is not None:
                with watched(self.event.name):
                    self.work.wait()
                self.event.end = time.perf_counter()
            self.result, self.finish, self.work = self.finish(), None, None
        return self.result

    def then(self, step: Callable[[Any], Any]) -> Pending:
        """What ``step`` makes of what arrives, once it is waited for."""
        return Pending(None, lambda: step(self.wait()))


def issue(
    name: str, verb: str, group: Group, rows: int, nbytes: int, start: Callable[[], dist.Work], result: torch.Tensor
) -> Pending:
    """Start a collective under a name: counted, and its failure told as ``RankFailure``."""
    event = record(name, verb, group.size, rows, nbytes)
    with watched(name):
        work = start()
    return Pending(work, lambda: result, event)


def _wire(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous, and 8-bit floats as raw bytes, which gloo does not know otherwise."""
    rows = rows.contiguous()
    return rows.view(torch.uint8) if rows.dtype.is_floating_point and rows.element_size() == 1 else rows


class AllRows:
    """Every rank gets every row: ``[local, …]`` to ``[rows, …]`` in global order, and back with a sum."""

    def __init__(self, layout: Layout, group: Group, device: torch.device | str = "cpu"):
        self.layout, self.group = layout, group
        self.local_rows = layout.local_rows[group.rank]
        self.position = (layout.owner * layout.padded_rows + layout.index).to(device)  # global row -> padded row

    def fetch(self, local: torch.Tensor, name: str = "rows") -> Pending:
        """``[local, …]`` of any dtype on each rank to ``[rows, …]`` in global order on all."""
        if len(local) != self.local_rows:
            raise ValueError(f"{name}: this rank holds {self.local_rows} rows and was given {len(local)}")
        pending = gather_padded(_wire(local), self.layout.padded_rows, self.layout.rows, self.group, name)
        return pending.then(lambda padded: padded.index_select(0, self.position).view(local.dtype))

    def return_sum(self, partial: torch.Tensor, name: str = "rows") -> Pending:
        """``[rows, …]`` of partial values on each rank to ``[local, …]``, each row summed over the ranks."""
        if len(partial) != self.layout.rows:
            raise ValueError(f"{name}: there are {self.layout.rows} rows and {len(partial)} were given")
        padded = partial.new_zeros(self.group.size * self.layout.padded_rows, *partial.shape[1:])
        padded[self.position] = partial
        return scatter_sums(padded, self.local_rows, self.group, name)


class ListedRows:
    """Each rank gets the global rows that it listed, in its order; ``wanted[rank]`` must be the same on all ranks."""

    def __init__(
        self, layout: Layout, wanted: Sequence[torch.Tensor], group: Group, device: torch.device | str = "cpu"
    ):
        self.group, self.local_rows = group, layout.local_rows[group.rank]
        senders = layout.owner[wanted[group.rank]]
        position = torch.argsort(senders, stable=True)  # arrival -> place in my list
        self.position, self.arrival = position.to(device), position.argsort().to(device)
        self.receives = torch.bincount(senders, minlength=group.size).tolist()
        sent = [layout.index[rows[layout.owner[rows] == group.rank]] for rows in wanted]
        self.sends = [len(rows) for rows in sent]
        self.sent = torch.cat(sent).to(device)  # local rows in order of departure, one entry a receiver

    def fetch(self, local: torch.Tensor, name: str = "rows") -> Pending:
        """``[local, …]`` of any dtype on each rank to ``[listed, …]`` in the order of this rank's list."""

        return exchange(
            local.index_select(0, self.sent), self.sends, self.receives, self.group, name, "fetch listed"
        ).then(lambda arrived: arrived.index_select(0, self.arrival))

    def return_sum(self, partial: torch.Tensor, name: str = "rows") -> Pending:
        """``[listed, …]`` of partial values on each rank to ``[local, …]``: each row the sum of what was returned."""

        def summed(arrived: torch.Tensor) -> torch.Tensor:
            return arrived.new_zeros(self.local_rows, *arrived.shape[1:]).index_add_(0, self.sent, arrived)

        back = exchange(partial[self.position], self.receives, self.sends, self.group, name, "return listed")
        return back.then(summed)


def exchange(
    rows: torch.Tensor, sends: list[int], receives: list[int], group: Group, name: str, verb: str = "exchange"
) -> Pending:
    """One uneven all-to-all: ``rows`` ``[sum(sends), …]`` in order of receiver; arrived rows in order of sender."""
    if group.size == 1:
        return Pending(None, lambda: rows)
    wire = _wire(rows)
    arrived = wire.new_empty(sum(receives), *wire.shape[1:])
    foreign = sum(receives) - receives[group.rank]
    nbytes = foreign * math.prod(wire.shape[1:]) * wire.element_size()

    def start() -> dist.Work:
        return dist.all_to_all_single(arrived, wire, receives, sends, group=group.handle, async_op=True)

    return issue(name, verb, group, foreign, nbytes, start, arrived.view(rows.dtype))


def gather_padded(rows: torch.Tensor, most: int, total: int, group: Group, name: str) -> Pending:
    """All ranks' rows, each rank's padded at the tail to ``most``: ``[ranks * most, …]``, ``total`` real ones."""
    if group.size == 1:
        return Pending(None, lambda: rows)
    padded = rows
    if len(rows) < most:
        padded = rows.new_empty(most, *rows.shape[1:])
        padded[: len(rows)] = rows
    gathered = rows.new_empty(group.size * most, *rows.shape[1:])

    def start() -> dist.Work:
        return dist.all_gather_single(gathered, padded, group=group.handle, async_op=True)

    return issue(name, "gather", group, total - len(rows), (group.size - 1) * padded.nbytes, start, gathered)


def divided(rows: int, parts: int) -> list[int]:
    """The ``parts + 1`` bounds at which ``rows`` are divided as evenly as they go."""
    return [rows * part // parts for part in range(parts + 1)]


def gather_uneven(rows: torch.Tensor, counts: Sequence[int], group: Group, name: str) -> torch.Tensor:
    """The ranks' ``[counts[rank], …]`` rows one after the other, ``[sum(counts), …]``, on every rank."""
    most = max(counts)
    if group.size == 1 or most == 0:
        return rows
    gathered = gather_padded(rows, most, sum(counts), group, name).wait()
    return torch.cat([gathered[r * most : r * most + n] for r, n in enumerate(counts)])


def scatter_sums(padded: torch.Tensor, mine: int, group: Group, name: str) -> Pending:
    """``[ranks * most, …]`` partial values on each rank to this rank's ``[mine, …]``, summed over the ranks."""
    if group.size == 1:
        return Pending(None, lambda: padded[:mine])
    summed = padded.new_empty(len(padded) // group.size, *padded.shape[1:])

    def start() -> dist.Work:
        return dist.reduce_scatter_single(summed, padded, group=group.handle, async_op=True)

    nbytes = (group.size - 1) * summed.nbytes
    return issue(name, "scatter sums", group, (group.size - 1) * mine, nbytes, start, summed[:mine])
