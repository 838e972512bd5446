"""How rows reach the experts that other ranks hold, and come back: transformers' ``EPImplementation`` socket.

    all_to_all   a row travels once to each rank that has one of its experts, however many of its experts live there;
                 the weighted sum over that rank's experts comes back
    gather       every rank of the expert group gets all rows, runs its own experts, and the sums are reduced back
    local        every rank has all experts: nothing travels (no expert parallelism)

Ranks that hold the same rows (a TP group in a context-parallel forward, a whole DP group while decoding) first divide
them, so that no row is sent or computed twice, and share the results afterwards. A few rows that every expert rank
holds already (decoding) are not moved at all: each rank runs its own experts and the sums are reduced. Empty ranks take
part in every collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from .errors import ConfigurationError
from .rows import Pending, divided, exchange, gather_uneven, issue, scatter_sums
from .topology import Group

if TYPE_CHECKING:
    from .session import Session

__all__ = ["AllToAll", "Communicator", "Gather", "choose_communicator", "expected_copies"]


class Communicator(EPImplementation):
    """Base: divides rows that several ranks hold, and brings results back to all of them.

    transformers builds one for each experts module; ``experts.cp_session`` says which forward is running.
    """

    def __init__(self, experts, ep_mesh, tp_mesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        self.session: Session = experts.cp_session
        self.group: Group = self.session.groups.ep
        experts._is_expert_parallel = False  # it never gets a route to an absent expert, so it need mask none

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[rows, hidden]``, ``[rows, k]`` global expert ids and ``[rows, k]`` weights to ``[rows, hidden]`` sums."""
        context, groups = self.session.context, self.session.groups
        if context is None and groups.topology.experts_inside_replica:
            return self.reduce_in_place(hidden_states, top_k_index, top_k_weights)
        share = groups.replica if context is None else groups.tp
        real = len(hidden_states) if context is None else context.local_rows  # without a stand-in row
        bounds = divided(real, share.size)
        mine = slice(bounds[share.rank], bounds[share.rank + 1])
        summed = self.exchange(hidden_states[mine], top_k_index[mine], top_k_weights[mine])
        counts = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
        shared = gather_uneven(summed, counts, share, "share expert sums")
        return shared if len(shared) == len(hidden_states) else torch.zeros_like(hidden_states)

    def exchange(self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted expert sums ``[rows, hidden]`` of this rank's own rows."""
        raise NotImplementedError

    def run_local(self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sums over this rank's own experts; ``experts`` are global ids and the others' are left out.

        The experts see one (row, expert) pair a row, so that absent experts cost nothing.
        """
        local = experts - self.group.rank * self.num_local_experts
        row, choice = ((local >= 0) & (local < self.num_local_experts)).nonzero(as_tuple=True)
        if len(row) == 0:
            return torch.zeros_like(rows)
        pairs = self.experts_forward(rows.index_select(0, row), local[row, choice, None], weights[row, choice, None])
        return _sum_into(len(rows), row, pairs).to(rows.dtype)

    def reduce_in_place(self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """For rows that every rank of the expert group holds: one all-reduce of the local sums."""
        summed = self.run_local(rows, experts, weights)
        size = self.group.size
        return issue(
            "reduce expert sums",
            "all-reduce",
            self.group,
            len(rows),
            2 * summed.nbytes * (size - 1) // size,
            lambda: dist.all_reduce(summed, group=self.group.handle, async_op=True),
            summed,
        ).wait()


class AllToAll(Communicator):
    """A row travels once to each rank that has one of its experts."""

    def exchange(self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ranks = torch.arange(self.group.size, device=rows.device)
        needs = (experts.unsqueeze(0) // self.num_local_experts == ranks.view(-1, 1, 1)).any(-1)  # [ranks, rows]
        receiver, row = needs.nonzero(as_tuple=True)  # sorted by receiver
        sends = needs.sum(1)
        ones = [1] * self.group.size
        receives = exchange(sends, ones, ones, self.group, "expert row counts").wait()
        send_counts, receive_counts = torch.stack([sends, receives]).tolist()  # the layer's one wait for the device

        def travel(tensor: torch.Tensor, name: str) -> Pending:
            return exchange(tensor.index_select(0, row), send_counts, receive_counts, self.group, name)

        there = [travel(rows, "dispatch rows"), travel(experts.int(), "dispatch experts")]
        there.append(travel(weights, "dispatch weights"))
        arrived, chosen, weighed = (pending.wait() for pending in there)
        summed = self.run_local(arrived, chosen.long(), weighed)
        returned = exchange(summed, receive_counts, send_counts, self.group, "combine rows").wait()
        return _sum_into(len(rows), row, returned).to(rows.dtype)


class Gather(Communicator):
    """All rows to every rank of the expert group, and the sums back with a reduce-scatter. No host synchronisation
    where the layout tells the row counts."""

    def exchange(self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        counts = self.session.expert_rows(len(rows), rows.device)
        most = max(counts)
        if most == 0:
            return rows
        everyones = (
            gather_uneven(rows, counts, self.group, "gather rows"),
            gather_uneven(experts.int(), counts, self.group, "gather experts").long(),
            gather_uneven(weights, counts, self.group, "gather weights"),
        )
        summed = self.run_local(*everyones)
        padded = summed.new_zeros(self.group.size, most, summed.shape[-1])
        for rank, part in enumerate(summed.split(counts)):
            padded[rank, : len(part)] = part
        return scatter_sums(padded.flatten(0, 1), len(rows), self.group, "scatter expert sums").wait()


def _sum_into(rows: int, row: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Sum ``parts`` ``[n, hidden]`` into ``row`` ``[n]`` of ``[rows, hidden]`` in fp32: rounded once, as one sum is."""
    return torch.zeros(rows, parts.shape[-1], dtype=torch.float32, device=parts.device).index_add_(
        0, row, parts.float()
    )


COMMUNICATORS = {"all_to_all": AllToAll, "gather": Gather}
for _name, _communicator in COMMUNICATORS.items():
    EPImplementationInterface.register(f"cpkit_{_name}", _communicator)


def expected_copies(experts: int, top_k: int, ranks: int) -> float:
    """Expected number of *other* ranks that have one of a row's ``top_k`` experts, experts drawn without replacement:
    ``(R - 1) * (1 - C(E - E/R, k) / C(E, k))``."""
    elsewhere = experts - experts // ranks
    return (ranks - 1) * (1 - math.comb(elsewhere, top_k) / math.comb(experts, top_k))


def choose_communicator(name: str, experts: int, top_k: int, ranks: int, device_type: str) -> tuple[str, str]:
    """The communicator to use and why. ``auto`` takes the one that moves fewer bytes, which is ``all_to_all``; on a GPU
    it takes ``gather`` within 10%, which saves a round of counts and a wait for the device in each layer."""
    known: Sequence[str] = ["local", *COMMUNICATORS]
    if name != "auto" and name not in known:
        raise ConfigurationError(f"communicator {name!r} is not known; use 'auto' or one of {list(known)}")
    if ranks == 1:
        if name in COMMUNICATORS:
            raise ConfigurationError(f"communicator {name!r} moves rows between expert ranks and ep is 1; use 'local'")
        return "local", "ep is 1: every rank has all experts"
    if name == "local":
        raise ConfigurationError(f"communicator 'local' needs all experts on every rank, and ep is {ranks}; use 'auto'")
    if name != "auto":
        return name, "asked for"
    copies = expected_copies(experts, top_k, ranks)
    share = copies / (ranks - 1)
    reason = f"a row has experts on {copies:.2f} of {ranks - 1} other ranks on average"
    if share > 0.9 and device_type != "cpu":
        return "gather", f"{reason}: all_to_all would save {1 - share:.0%} of the bytes and cost a wait for the device"
    return "all_to_all", f"{reason}: it moves {share:.0%} of the bytes of gather"
