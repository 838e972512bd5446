"""How ranks find out together that something is wrong, so that all raise the same error and nobody waits for ever.

Before a forward, ``agree`` compares a checksum of what each rank was called with, and passes on an error that one of
them met. During it, a collective that fails is turned into ``RankFailure`` with the rank that stopped; a rank that
raises in the middle of a forward leaves its message for the others in the process group's store.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from .errors import CpkitError, RankFailure, RankMismatch
from .topology import Group

__all__ = ["agree", "checksum", "guarded", "watched"]

GRACE_SECONDS = 5.0  # how long survivors wait for each other's word before they name the silent ones


def checksum(*parts: object) -> int:
    """A CRC-32 of tensors (of floats, a sum over their last dimension that each place weighs in differently) and of the
    text of everything else."""
    crc = 0
    for part in parts:
        if isinstance(part, torch.Tensor):
            crc = zlib.crc32(str((tuple(part.shape), part.dtype)).encode(), crc)
            part = part.detach()
            if part.is_floating_point():
                part = part.float() @ torch.arange(1.0, part.shape[-1] + 1, dtype=torch.float32, device=part.device)
            crc = zlib.crc32(part.cpu().contiguous().numpy().tobytes(), crc)
        else:
            crc = zlib.crc32(str(part).encode(), crc)
    return crc


def agree(group: Group, problem: CpkitError | None, digest: int, device: torch.device | str) -> None:
    """Raise on every rank of ``group`` if one of them met ``problem``, or if their digests differ.

    One small collective when all is well.
    """
    if group.size == 1:
        if problem is not None:
            raise problem
        return
    mine = torch.tensor([problem is not None, digest], dtype=torch.int64, device=device)
    everyone = mine.new_empty(2 * group.size)
    with watched("agreement"):
        dist.all_gather_single(everyone, mine, group=group.handle)
    failed, digests = everyone.cpu().view(-1, 2).unbind(1)
    if failed.any():
        problems: list[CpkitError | None] = [None] * group.size
        with watched("agreement"):
            dist.all_gather_object(problems, problem, group=group.handle)
        first = next(p for p in problems if p is not None)
        ranks = [group.ranks[i] for i, p in enumerate(problems) if p is not None]
        where = "" if len(ranks) == group.size else f"rank {ranks[0] if len(ranks) == 1 else ranks}: "
        raise type(first)(f"{where}{first}")
    if len(digests.unique()) > 1:
        calls = {f"{d:08x}": [r for r, e in zip(group.ranks, digests.tolist(), strict=True) if e == d] for d in
                 digests.unique().tolist()}  # fmt: skip
        raise RankMismatch(
            "the ranks of one DP group must be called with the same inputs, and these differ (checksum: ranks): "
            + ", ".join(f"{d}: {ranks}" for d, ranks in calls.items())
            + "; broadcast the batch from one rank, or seed the loaders alike"
        )


@contextmanager
def guarded() -> Iterator[None]:
    """Around a forward: leave word for the other ranks when this one raises, or is interrupted."""
    _forget()
    try:
        yield
    except RankFailure:
        raise
    except BaseException as error:
        _leave_word(f"raised {type(error).__name__}: {error}")
        raise


@contextmanager
def watched(name: str) -> Iterator[None]:
    """Around a collective: turn its failure into ``RankFailure``, which names the rank that stopped."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CpkitError) or not dist.is_initialized():
            raise
        raise RankFailure(f"{_who_stopped()}; noticed in the collective {name!r} ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _store() -> dist.Store:
    return dist.PrefixStore("cpkit/faults", dist.distributed_c10d._get_default_store())


_LEFT: set[str] = set()  # what this rank wrote in the store about an earlier forward


def _leave_word(message: str) -> None:
    if dist.is_initialized():
        with suppress(Exception):  # the store may have gone with its host
            _write(f"word/{dist.get_rank()}", message)


def _write(key: str, message: str) -> None:
    _LEFT.add(key)
    _store().set(key, message)


def _forget() -> None:
    """Take back what this rank said of an earlier forward, so that a later failure is not blamed on it."""
    while _LEFT:
        with suppress(Exception):
            _store().delete_key(_LEFT.pop())


def _who_stopped() -> str:
    me = dist.get_rank()
    others = [r for r in range(dist.get_world_size()) if r != me]
    words: dict[int, str] = {}
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        store = _store()
        _write(f"seen/{me}", "")
        while time.monotonic() < deadline:
            words = {r: store.get(f"word/{r}").decode() for r in others if store.check([f"word/{r}"])}
            silent = [r for r in others if r not in words and not store.check([f"seen/{r}"])]
            if words or not silent:
                break
            time.sleep(0.05)
        if words:
            return "; ".join(f"rank {r} {word}" for r, word in words.items())
        if silent:
            return f"rank {', '.join(map(str, silent))} stopped without a word (killed, or out of memory)"
        return "a collective failed on every rank at once (a timeout, or a network fault)"
    except Exception:
        return "the rank that hosts the process group's store (rank 0 unless torchrun does) stopped"
