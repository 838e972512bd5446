"""Peak memory of a stretch of work in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Peak", "measured"]


@dataclass
class Peak:
    """Bytes: ``before`` the work, and the ``highest`` during it."""

    before: int = 0
    highest: int = 0

    @property
    def above(self) -> int:
        """What the work needed on top of what was there."""
        return max(self.highest - self.before, 0)


@contextmanager
def measured(device: str) -> Iterator[Peak]:
    """Fills a ``Peak`` when the block ends: device memory on CUDA, resident memory (Linux) on the CPU."""
    peak = Peak()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        peak.before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.highest = torch.cuda.max_memory_allocated()
        return
    _give_back_free_memory()
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    peak.before = _status("VmRSS")
    yield peak
    peak.highest = _status("VmHWM")


def _give_back_free_memory() -> None:
    """So that memory freed earlier, which malloc keeps, is not taken for memory in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
