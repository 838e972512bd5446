"""What one patched model needs at run time: the resolved options, and the entry and exit of each forward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache

from .backends import Backend
from .balance import Work, choose_strategy
from .batch import Batch, read_batch
from .cache import PREFILL_CACHES
from .context import ForwardContext
from .errors import CpkitError, UnsupportedInput
from .faults import agree, checksum
from .layout import layout, strategies
from .rows import divided, gather_uneven
from .topology import Group, Groups

__all__ = ["Options", "Session"]

_PADDED_WINDOW = (
    "padding inside the cached prefix of a sliding-window model: its window counts padding; "
    "pad prompts on the left, or send one request at a time"
)


@dataclass(frozen=True)
class Options:
    """What the caller asked for; see ``cpkit.apply``."""

    strategy: str = "auto"
    kernels: Mapping[str, str] = field(default_factory=dict)  # names by kind; those left out are "auto"
    communicator: str = "auto"
    cache: str = "replicated"
    check_inputs: bool = True


@dataclass(eq=False)
class Session:
    """The state that a patched model carries. ``context`` is set while a context-parallel forward runs.

    With ``own_decoding``, decoding steps run on our kernels too; else they are transformers' own.
    """

    config: Any
    groups: Groups
    options: Options
    kernels: dict[str, Backend]
    work: Work
    own_decoding: bool
    communicator: str
    reasons: dict[str, str]
    enabled: bool = True
    context: ForwardContext | None = None
    last_strategy: tuple[str, str] | None = None
    undo: list = field(default_factory=list)
    _attention_configs: dict[tuple[int, str], Any] = field(default_factory=dict)

    def __deepcopy__(self, memo):
        raise CpkitError(
            "a patched model cannot be copied: its process groups and hooks belong to the original; "
            "call cpkit.remove(model), copy it, and cpkit.apply each"
        )

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        kind = self.groups.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def takes(self, new_tokens: int, cache: Cache | None) -> bool:
        """Whether a forward is context-parallel: all but decoding steps, one new token on top of a cache."""
        return self.enabled and (new_tokens > 1 or cache is None or int(cache.get_seq_length()) == 0)

    def attention_config(self, plain: Any, name: str) -> Any:
        """``plain`` under our attention's ``name``, for the attention modules while a context-parallel forward runs."""
        if (id(plain), name) not in self._attention_configs:
            ours = copy.copy(plain)
            ours._attn_implementation_internal = name
            self._attention_configs[id(plain), name] = ours
        return self._attention_configs[id(plain), name]

    def enter(
        self,
        inputs: dict[str, torch.Tensor | None],
        cache: Cache | None,
        use_cache: bool,
        problem: CpkitError | None,
        rest: tuple,
    ) -> tuple[ForwardContext, Cache | None]:
        """Make the context of a forward, or raise the same error on every rank of the replica group.

        ``inputs`` holds ``tokens`` (``[batch, slots]`` ids or ``[batch, slots, hidden]`` embeddings),
        ``attention_mask``, ``position_ids`` and ``cu_seq_lens``; ``rest`` is what else decides which collectives this
        forward issues. Returns the context, and the cache to give back.
        """
        past = int(cache.get_seq_length()) if cache is not None else 0
        batch = None
        if problem is None:
            try:
                batch = self._read(inputs, past, use_cache or cache is not None)
            except CpkitError as error:
                problem = error
        self._agree(problem, *inputs.values(), past, use_cache, *rest)
        assert batch is not None
        name = self.options.strategy
        if name == "auto":
            size = self.groups.cp.size
            name, reason = choose_strategy(self.work, batch.lengths, batch.prefixes, size)
            self.last_strategy = name, reason
        return self._context(batch, name, self.groups, use_cache, cache)

    def _context(
        self, batch: Batch, strategy: str, groups: Groups, use_cache: bool, cache: Cache | None
    ) -> tuple[ForwardContext, Cache | None]:
        placed = layout(strategy, batch.lengths, batch.prefixes, groups.cp.size)
        context = ForwardContext(batch, placed, groups, self.kernels, self.device)
        store = DynamicCache(config=self.config) if use_cache and cache is None else cache
        context.cache = PREFILL_CACHES[self.options.cache](context, store)
        return context, store

    def enter_own_decode(self, inputs: dict[str, torch.Tensor | None], cache: Cache) -> ForwardContext:
        """The context of a decoding step on our kernels: every rank holds all rows, one a request, and nothing
        travels."""
        batch = self._read(inputs, int(cache.get_seq_length()), True)
        alone = Group((self.groups.rank,), 0)
        groups = dataclasses.replace(self.groups, cp=alone, tp=alone)
        return self._context(batch, strategies()[0], groups, True, cache)[0]

    def enter_decode(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None) -> None:
        """The entry of a decoding step, which is transformers' own: the ranks must take the same step."""
        problem: CpkitError | None = None
        if getattr(self.config, "sliding_window", None) and attention_mask is not None and attention_mask.ndim == 2:
            real = attention_mask.bool()
            if bool(((real.cumsum(1) > 0) & ~real).any()):
                problem = UnsupportedInput(_PADDED_WINDOW)
        past = int(cache.get_seq_length()) if cache is not None else 0
        self._agree(problem, "decode", tokens, past)

    def _agree(self, problem: CpkitError | None, *called_with: object) -> None:
        """Raise ``problem`` if there is one; on all ranks alike, and for different calls too, unless unchecked."""
        if self.options.check_inputs:
            agree(self.groups.replica, problem, 0 if problem else checksum(*called_with), self.device)
        elif problem is not None:
            raise problem

    def _read(self, inputs: dict[str, torch.Tensor | None], past: int, cached: bool) -> Batch:
        tokens = inputs["tokens"]
        assert tokens is not None
        shape = (tokens.shape[0], tokens.shape[1])
        rest = (inputs["attention_mask"], inputs["position_ids"], inputs.get("cu_seq_lens"))
        batch = read_batch(shape, past, *rest, cached=cached)
        if batch.prefix_has_holes and getattr(self.config, "sliding_window", None):
            raise UnsupportedInput(_PADDED_WINDOW)
        return batch

    def collect(self, context: ForwardContext, held: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
        """The exit: ``[1, held, …]`` local values to ``[batch, kept, …]`` in the caller's slots on every rank.

        ``keep`` is transformers' ``logits_to_keep``: the last ``keep`` slots, 0 for all, or a tensor of places. Only
        those rows leave the ranks. Padding gives zeros.
        """
        batch, local = context.batch, held[0, : context.local_rows]
        if isinstance(keep, int) and keep == 0:
            return batch.to_slots(context.all_rows.fetch(local, "output").wait())
        slots = torch.arange(batch.shape[1])
        wanted = batch.rows_of_slots(slots[-keep:] if isinstance(keep, int) else slots[keep.cpu()])  # [batch, kept]
        rows = context.listed_rows(wanted[wanted >= 0]).fetch(local, "output").wait()
        out = rows.new_zeros(*wanted.shape, *rows.shape[1:])
        out[(wanted >= 0).to(out.device)] = rows
        return out

    def expert_rows(self, mine: int, device: torch.device) -> list[int]:
        """How many rows each rank of the expert group brings; ``mine`` is this rank's number.

        Inside one DP group the layout tells; otherwise one small gather, in every layer, so that DP groups that are
        in different kinds of forward still issue the same collectives.
        """
        ep, topology = self.groups.ep, self.groups.topology
        if self.context is not None and topology.experts_inside_replica:
            first, counts = self.groups.replica.ranks[0], []
            for rank in ep.ranks:
                cp, tp = divmod(rank - first, topology.tp)
                real = self.context.layout.local_rows[cp]
                bounds = divided(real, topology.tp)
                counts.append(bounds[tp + 1] - bounds[tp])
            return counts
        number = torch.tensor([mine], device=device)
        return gather_uneven(number, [1] * ep.size, ep, "expert row counts").tolist()
