"""Counts the bytes of every collective of a rank, whoever issues it: cpkit, transformers or torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["WireCount"]


class WireCount(TorchDispatchMode):
    """``bytes`` that this rank received from others while the mode was on, and ``calls`` by operator.

    An all-reduce of ``b`` bytes over ``n`` ranks counts ``2 b (n - 1) / n``, as a ring moves them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.name().split("::")[1].split(".")[0], args, result)
        return result

    def _count(self, name: str, args: tuple, result: Any) -> None:
        received = _RECEIVED.get(name)
        if received is None:
            return
        group = next(g for g in map(_group, args) if g is not None)
        self.bytes += received(args, result, group)
        self.calls[name] = self.calls.get(name, 0) + 1


def _group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:  # a ReduceOp
            return None
    if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product"):
        return dist.distributed_c10d._resolve_process_group(argument)
    return None


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors)) if isinstance(tensors, (list, tuple)) else 0


def _reduced(args: tuple, result: Any, group: dist.ProcessGroup) -> int:
    return 2 * _bytes(args[0]) * (group.size() - 1) // group.size()


def _of_output(args: tuple, result: Any, group: dist.ProcessGroup) -> int:
    return _bytes(args[0]) * (group.size() - 1) // group.size()


def _of_input(args: tuple, result: Any, group: dist.ProcessGroup) -> int:
    return _bytes(args[0]) * (group.size() - 1)


def _exchanged(args: tuple, result: Any, group: dist.ProcessGroup) -> int:
    output, sizes = args[0], args[3]
    own = sizes[group.rank()] / max(len(output), 1) if sizes else 1 / group.size()
    return round(output.nbytes * (1 - own))


def _exchanged_functional(args: tuple, result: Any, group: dist.ProcessGroup) -> int:
    sizes = args[1]
    own = sizes[group.rank()] / max(len(result), 1) if sizes else 1 / group.size()
    return round(_bytes(result) * (1 - own))


_RECEIVED = {
    "allreduce_": _reduced,
    "all_reduce": _reduced,
    "all_reduce_": _reduced,
    "_allgather_base_": _of_output,
    "all_gather_into_tensor": _of_input,
    "_reduce_scatter_base_": _of_input,
    "reduce_scatter_tensor": lambda args, result, group: _bytes(result) * (group.size() - 1),
    "alltoall_base_": _exchanged,
    "all_to_all_single": _exchanged_functional,
}
