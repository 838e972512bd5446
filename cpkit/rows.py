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
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from .faults import watched
from .layout import Layout
from .topology import Group
from .trace import Event, record

__all__ = ["AllRows", "ListedRows", "Pending", "exchange", "gather_uneven"]


@dataclass
class Pending:
    """Rows on their way; ``wait()`` returns them. Wait in the order of issue."""

    work: dist.Work | None
    finish: Callable[[], torch.Tensor]
    event: Event | None = None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            with watched(self.event.name if self.event else "rows"):
                self.work.wait()
        if self.event is not None:
            self.event.end = time.perf_counter()
        return self.finish()


def _wire(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous, and 8-bit floats as raw bytes, which gloo does not know otherwise."""
    rows = rows.contiguous()
    return rows.view(torch.uint8) if rows.dtype.is_floating_point and rows.element_size() == 1 else rows


def _row_bytes(rows: torch.Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()


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
        if self.group.size == 1:
            return Pending(None, lambda: local[self.position])
        wire = _wire(local)
        padded = wire.new_empty(self.layout.padded_rows, *wire.shape[1:])
        padded[: len(wire)] = wire
        gathered = wire.new_empty(self.group.size * len(padded), *wire.shape[1:])
        event = record(
            name,
            "fetch all",
            self.group.size,
            self.layout.rows - self.local_rows,
            (self.group.size - 1) * padded.nbytes,
        )
        with watched(name):
            work = dist.all_gather_single(gathered, padded, group=self.group.handle, async_op=True)
        return Pending(work, lambda: gathered[self.position].view(local.dtype), event)

    def return_sum(self, partial: torch.Tensor, name: str = "rows") -> Pending:
        """``[rows, …]`` of partial values on each rank to ``[local, …]``, each row summed over the ranks."""
        if len(partial) != self.layout.rows:
            raise ValueError(f"{name}: there are {self.layout.rows} rows and {len(partial)} were given")
        padded = partial.new_zeros(self.group.size * self.layout.padded_rows, *partial.shape[1:])
        padded[self.position] = partial
        if self.group.size == 1:
            return Pending(None, lambda: padded)
        summed = partial.new_empty(self.layout.padded_rows, *partial.shape[1:])
        event = record(
            name,
            "return all",
            self.group.size,
            (self.group.size - 1) * self.local_rows,
            (self.group.size - 1) * summed.nbytes,
        )
        with watched(name):
            work = dist.reduce_scatter_single(summed, padded, group=self.group.handle, async_op=True)
        return Pending(work, lambda: summed[: self.local_rows], event)


class ListedRows:
    """Each rank gets the global rows that it listed, in its order; ``wanted[rank]`` must be the same on all ranks."""

    def __init__(
        self, layout: Layout, wanted: Sequence[torch.Tensor], group: Group, device: torch.device | str = "cpu"
    ):
        self.layout, self.group = layout, group
        mine = wanted[group.rank]
        senders = layout.owner[mine]
        self.position = torch.argsort(senders, stable=True).to(device)  # arrival -> place in my list
        self.receives = torch.bincount(senders, minlength=group.size).tolist()
        sent = [layout.index[rows[layout.owner[rows] == group.rank]] for rows in wanted]
        self.sends = [len(rows) for rows in sent]
        self.sent = torch.cat(sent).to(device)  # local rows in order of departure, one entry a receiver

    @cached_property
    def _received_rows(self) -> int:
        return sum(n for rank, n in enumerate(self.receives) if rank != self.group.rank)

    def fetch(self, local: torch.Tensor, name: str = "rows") -> Pending:
        """``[local, …]`` of any dtype on each rank to ``[listed, …]`` in the order of this rank's list."""
        arrived, work, event = exchange(local[self.sent], self.sends, self.receives, self.group, name, "fetch listed")

        def finish() -> torch.Tensor:
            result = torch.empty_like(arrived)
            result[self.position] = arrived
            return result

        return Pending(work, finish, event)

    def return_sum(self, partial: torch.Tensor, name: str = "rows") -> Pending:
        """``[listed, …]`` of partial values on each rank to ``[local, …]``: each row the sum of what was returned."""
        arrived, work, event = exchange(
            partial[self.position], self.receives, self.sends, self.group, name, "return listed"
        )
        local_rows = self.layout.local_rows[self.group.rank]
        return Pending(
            work, lambda: arrived.new_zeros(local_rows, *arrived.shape[1:]).index_add_(0, self.sent, arrived), event
        )


def exchange(
    rows: torch.Tensor, sends: list[int], receives: list[int], group: Group, name: str, verb: str = "exchange"
) -> tuple[torch.Tensor, dist.Work | None, Event | None]:
    """One uneven all-to-all: ``rows`` ``[sum(sends), …]`` in order of receiver; arrived rows in order of sender."""
    if group.size == 1:
        return rows, None, None
    wire = _wire(rows)
    arrived = wire.new_empty(sum(receives), *wire.shape[1:])
    foreign = sum(receives) - receives[group.rank]
    event = record(name, verb, group.size, foreign, foreign * _row_bytes(wire))
    with watched(name):
        work = dist.all_to_all_single(arrived, wire, receives, sends, group=group.handle, async_op=True)
    return arrived.view(rows.dtype), work, event


def gather_uneven(rows: torch.Tensor, counts: Sequence[int], group: Group, name: str) -> torch.Tensor:
    """The ranks' ``[counts[rank], …]`` rows one after the other, ``[sum(counts), …]``, on every rank."""
    most = max(counts)
    if group.size == 1 or most == 0:
        return rows
    padded = rows.new_empty(most, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = rows.new_empty(group.size * most, *rows.shape[1:])
    event = record(name, "gather", group.size, sum(counts) - len(rows), (group.size - 1) * padded.nbytes)
    with watched(name):
        dist.all_gather_single(gathered, padded, group=group.handle)
    event.end = time.perf_counter()
    return torch.cat([gathered[r * most : r * most + n] for r, n in enumerate(counts)])
