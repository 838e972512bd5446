"""The ranks of a launch: starting them, work that rank 0 does alone, and who reports an error."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cpkit import ConfigurationError, RankFailure

from .recipe import Loaded

__all__ = ["Ranks", "is_first", "start"]

T = TypeVar("T")
POLL_SECONDS = 0.05


def is_first() -> bool:
    """Whether this process is rank 0, also before the process group exists."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))) == 0


@dataclass
class Ranks:
    """This process among the others of a launch."""

    rank: int
    world: int
    device: str
    turns: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    def alone(self, function: Callable[[], T], member: int = 0) -> T | None:
        """Run ``function`` on rank ``member``; the others wait in the process group's store, not in a collective, so
        it may take longer than the timeout. They get None, or ``RankFailure`` where it raised."""
        self.turns += 1
        if self.world == 1:
            return function()
        key, store = f"turn/{self.turns}", _store()
        if self.rank == member:
            try:
                result = function()
            except BaseException as error:
                store.set(key, f"raised {type(error).__name__}: {error}")
                raise
            store.set(key, "")
            return result
        while not store.check([key]):
            time.sleep(POLL_SECONDS)
        if message := store.get(key).decode():
            raise RankFailure(f"rank {member} {message}")
        return None

    def shared(self, function: Callable[[], T]) -> T:
        """What ``function`` returns on rank 0, on every rank."""
        result: list[Any] = [self.alone(function)]
        if self.world > 1:
            dist.broadcast_object_list(result, 0)
        return result[0]

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def synchronize(self) -> None:
        """Wait for the other ranks and for the device."""
        if self.world > 1:
            self.gathered(None)
        self.finish()

    def finish(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def start(loaded: Loaded, verb: str, timeout: float) -> Ranks:
    """Check that the right number of ranks is running, and connect them. Raises ``ConfigurationError``."""
    topology, device = loaded.recipe.topology.topology(), loaded.recipe.hardware.device
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if topology.dp != 1:
        raise ConfigurationError(
            f"topology.dp = {topology.dp}: {verb} runs one prompt, and the other DP groups would have nothing to do; "
            f"set topology.dp=1, or start one launch a DP group"
        )
    if topology.world != world:
        words = " ".join([loaded.name if loaded.path.parent.name == "recipes" else str(loaded.path), *loaded.overrides])
        raise ConfigurationError(
            f"{loaded.name} needs {topology.world} ranks ({topology}) and {world} {'is' if world == 1 else 'are'} "
            f"running; start it with: torchrun --nproc-per-node {topology.world} -m cpkit.launch {verb} {words}"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"{loaded.name} runs on CUDA, and torch {torch.__version__} sees no CUDA device here; `cpkit doctor` shows "
            f"what there is, `cpkit plan {loaded.name}` needs none, hardware.device=cpu runs on the CPU"
        )
    groups = topology.connect(device, timedelta(seconds=timeout))
    return Ranks(groups.rank, world, device)


def _store() -> dist.Store:
    return dist.PrefixStore("cpkit/launch", dist.distributed_c10d._get_default_store())


def report_error(message: str) -> None:
    """Print ``message`` once: on rank 0, or on a rank that raised where rank 0 has not."""
    if is_first():
        print(f"error: {message}", file=sys.stderr, flush=True)
        if dist.is_initialized():
            _store().set("reported", "")
    elif dist.is_initialized() and not _first_reports():
        print(f"error on rank {dist.get_rank()}: {message}", file=sys.stderr, flush=True)


def _first_reports(seconds: float = 2.0) -> bool:
    deadline = time.monotonic() + seconds
    try:
        while not _store().check(["reported"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
    except RuntimeError:  # the store went with rank 0, which had its say
        return True
    return True
