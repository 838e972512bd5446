"""Many ranks cheaply: fork after the imports, gloo over a file store, many cases a start."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 60


def _child(rank: int, world: int, store: str, timeout: float, pipe, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    poison_empty()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        answer = True, function(*args)
    except BaseException as error:
        answer = False, (error, traceback.format_exc())
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    pipe.send_bytes(buffer.getvalue())
    os._exit(0)


def start_ranks(world: int, function: Callable, *args: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
    """Run ``function(*args)`` on ``world`` forked ranks; for each rank ``(ok, result or (error, traceback))``.

    A rank that dies without a word gives ``(False, (EOFError, ''))``.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends, children = [], []
        for rank in range(world):
            mine, theirs = context.Pipe(duplex=False)
            child = context.Process(
                target=_child, args=(rank, world, f"{folder}/store", timeout, theirs, function, args)
            )
            child.start()
            theirs.close()
            ends.append(mine)
            children.append(child)
        results, deadline = [], time.monotonic() + 600
        for end in ends:
            try:
                answered = end.poll(max(timeout * 4, deadline - time.monotonic()))
                answer = torch.load(io.BytesIO(end.recv_bytes()), weights_only=False) if answered else None
                results.append(answer or (False, (TimeoutError("no answer"), "")))
            except EOFError as error:
                results.append((False, (error, "")))
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()
    return results


def run_ranks(world: int, function: Callable, *args: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
    """``start_ranks`` where every rank must succeed; their results."""
    results = start_ranks(world, function, *args, timeout=timeout)
    for rank, (ok, value) in enumerate(results):
        if not ok:
            raise AssertionError(f"rank {rank} of {world} failed: {value[0]!r}\n{value[1]}")
    return [value for _, value in results]


def poison_empty() -> None:
    """Fill what ``torch.empty`` and its kin give with NaN, so that rows nobody wrote are seen."""

    def poisoned(plain: Callable) -> Callable:
        def make(*args, **kwargs):
            made = plain(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() and not made.is_meta else made

        return make

    torch.empty = poisoned(torch.empty)
    torch.empty_like = poisoned(torch.empty_like)
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)
