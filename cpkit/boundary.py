"""The classes that are mixed in front of transformers' own: a model's entry and exit, and its attention.

Each is swapped in by ``cpkit.patch`` under the name of the class it extends. With context parallelism off, or while
decoding one token at a time, they call straight through.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_utils import slice_logits_to_keep

from .attention import attend
from .context import ForwardContext
from .errors import CpkitError, UnsupportedInput
from .faults import guarded, watched
from .rows import Pending
from .session import Session

__all__ = ["AttentionBoundary", "BaseModelBoundary", "CausalLMBoundary", "packed_attention"]

ATTENTION_NAME = "cpkit"  # our own entry in transformers' attention registry
_IGNORED = {"position_ids", "use_cache", "dropout"}  # that layers pass on, and that change nothing here


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Pending,
    value: Pending,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cp_context=None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' own socket: ``query [1, heads, held, dim]`` of this rank over the packed keys and
    values that ``key`` is the ``Pending`` of, to ``[1, held, heads, value_dim]``. The mask is a placeholder: who sees
    what comes from the context. Unknown arguments (sinks, biases, soft caps) are refused, never dropped.
    """
    refuse_unknown(module, kwargs, cp_context)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = key.wait()
    if not cp_context.local_rows:
        return query.new_zeros(1, query.shape[2], query.shape[1], values.shape[-1]), None
    rounds = cp_context.rounds(cp_context.cache.spans[module.layer_idx], sliding_window)
    out = attend(query[0].transpose(0, 1), keys, values, rounds, scale, cp_context.kernels["attention"])
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, packed_attention)


def refuse_unknown(module: torch.nn.Module, given: dict[str, Any], context: ForwardContext) -> None:
    """Raise for what a layer passes to its attention and nobody here looks at; what the caller passed has been looked
    at, at the entry."""
    expected = _IGNORED | context.callers
    if unknown := sorted(name for name, value in given.items() if value is not None and name not in expected):
        raise UnsupportedInput(
            f"{type(module).__name__} passes {unknown} to its attention, and context parallelism does not know "
            "what that does; leave it out, or use cpkit.disabled(model)"
        )


if TYPE_CHECKING:  # what they are mixed in front of

    class Attention(torch.nn.Module):
        config: PreTrainedConfig

    class Model(PreTrainedModel):
        pass

else:
    Attention = Model = object


class AttentionBoundary(Attention):
    """Runs the family's own attention forward with ours, registered under ``attention_name``, in place of the
    configured function."""

    cp_session: Session
    attention_name = ATTENTION_NAME

    def forward(self, *args, cp_context=None, **kwargs):
        if cp_context is None:
            return super().forward(*args, **kwargs)
        plain = self.config
        self.config = self.cp_session.attention_config(plain, self.attention_name)
        try:
            return super().forward(*args, cp_context=cp_context, **kwargs)
        finally:
            self.config = plain


class WholeWeights(Model):
    """A patched model as a thing to keep: saved with whole weights, never copied."""

    cp_session: Session

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As transformers' own; sharded weights are gathered first, so then every rank must call it."""
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            return super().save_pretrained(save_directory, *args, **kwargs)
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in self.state_dict().items()}
        kwargs = {"state_dict": whole, "is_main_process": self.cp_session.groups.rank == 0, **kwargs}
        saved = super().save_pretrained(save_directory, *args, **kwargs)
        with watched("saving"):
            dist.barrier()  # nobody goes on to a half-written folder
        return saved

    def __reduce_ex__(self, protocol):
        raise CpkitError(
            "a patched model cannot be copied or pickled: its process groups and hooks belong to this process; "
            "call cpkit.remove(model) first, or save it with save_pretrained"
        )


class BaseModelBoundary(WholeWeights):
    """The model without its head: takes whole inputs, runs this rank's rows, gives whole outputs back."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        use_cache=None,
        cp_logits_to_keep=0,
        **kwargs,
    ):
        cache = kwargs.pop("past_key_values", cache)
        return_dict = kwargs.pop("return_dict", None)
        return_dict = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        problem = _refusal(self, input_ids, inputs_embeds, kwargs)
        given = {"tokens": tokens, "attention_mask": attention_mask, "position_ids": position_ids}
        with guarded():
            if problem is None and not self.cp_session.takes(tokens.shape[1], cache):
                if self.cp_session.enabled:
                    self.cp_session.enter_decode(tokens, attention_mask, cache)
                if self.cp_session.enabled and self.cp_session.own_decoding:
                    context = self.cp_session.enter_own_decode(given, cache)
                    outputs = self._run(context, tokens, input_ids is None, kwargs)
                    outputs = self._whole(outputs, context, cache, cp_logits_to_keep)
                else:
                    arguments = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, **given, **kwargs}
                    del arguments["tokens"]
                    outputs = super().forward(cache=cache, use_cache=use_cache, return_dict=True, **arguments)
                    outputs.last_hidden_state = slice_logits_to_keep(outputs.last_hidden_state, cp_logits_to_keep)
            else:
                use_cache = self.config.use_cache if use_cache is None else use_cache
                given["cu_seq_lens"] = kwargs.pop("cu_seq_lens_q", None)
                kwargs.pop("cu_seq_lens_k", None)
                rest = (cp_logits_to_keep, sorted((k, v) for k, v in kwargs.items() if isinstance(v, bool | int)))
                context, store = self.cp_session.enter(given, cache, use_cache, problem, rest)
                self.cp_session.context = context
                try:
                    outputs = self._run(context, tokens, input_ids is None, kwargs)
                finally:
                    self.cp_session.context = None
                outputs = self._whole(outputs, context, store, cp_logits_to_keep)
        return outputs if return_dict else outputs.to_tuple()

    @torch.no_grad()
    def _run(self, context, tokens, embedded, kwargs):
        """The family's own forward on this rank's rows."""
        context.callers = frozenset(kwargs)
        flat = tokens.flatten(0, 1)[context.batch.slots[context.held].to(tokens.device)].unsqueeze(0)
        return super().forward(
            input_ids=None if embedded else flat,
            inputs_embeds=flat if embedded else None,
            attention_mask=torch.zeros(1, 1, 1, 1, device=context.device),  # 4-D: transformers takes it as it is
            position_ids=context.batch.positions[context.held].to(context.device).unsqueeze(0),
            cache=context.cache,
            use_cache=True,
            return_dict=True,
            cp_context=context,
            **kwargs,
        )

    @torch.no_grad()
    def _whole(self, outputs, context, store, keep):
        """The outputs in the caller's shapes, the caller's cache among them."""
        collect = self.cp_session.collect
        hidden = outputs.get("hidden_states")
        if hidden is not None:  # its last entry is the last hidden state
            outputs.hidden_states = tuple(h if h is None else collect(context, h, 0) for h in hidden)
        if outputs.get("router_logits") is not None:
            outputs.router_logits = tuple(
                collect(context, r.unsqueeze(0), 0).flatten(0, 1) for r in outputs.router_logits
            )
        outputs.last_hidden_state = collect(context, outputs.last_hidden_state, keep)
        outputs.cache = store
        return outputs


_HONOURED_ELSEWHERE = {"is_causal", "softcap", "position_bias", "s_aux", "sliding_window", "scaling"}


def _refusal(model, input_ids, inputs_embeds, kwargs) -> CpkitError | None:
    """What cannot be kept under context parallelism, by name."""
    if not model.cp_session.enabled:
        return None
    if (input_ids is None) == (inputs_embeds is None):
        return UnsupportedInput("pass exactly one of input_ids and inputs_embeds")
    for name, given, dims in (("input_ids", input_ids, 2), ("inputs_embeds", inputs_embeds, 3)):
        if given is not None and getattr(given, "ndim", None) != dims:
            shape = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
            return UnsupportedInput(f"{name} must be a tensor of {dims} dimensions, batch first, and is {shape}")
    if model.training:
        return UnsupportedInput("context-parallel prefill has no backward pass; call model.eval() first")
    if kwargs.get("output_attentions", getattr(model.config, "output_attentions", False)):
        return UnsupportedInput(
            "output_attentions=True needs the [tokens, tokens] weights that context parallelism never builds; use "
            "`with cpkit.disabled(model):` for it"
        )
    if changed := sorted(k for k in kwargs.keys() & _HONOURED_ELSEWHERE if kwargs[k] is not None):
        return UnsupportedInput(f"{changed} would change the attention, which context parallelism does not know")
    queries, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if keys is not None and (queries is None or not torch.equal(keys, queries)):
        return UnsupportedInput("cu_seq_lens_k must equal cu_seq_lens_q: packed requests have no cached prefix")
    return None


class HeadBoundary(WholeWeights):
    """Any head on top: no half-connected graph, which a backward pass would take for a whole one."""

    def forward(self, *args, **kwargs):
        exchanges = self.cp_session.enabled or self.cp_session.groups.ep.size > 1  # which have no backward pass
        with torch.set_grad_enabled(torch.is_grad_enabled() and not exchanges):
            return super().forward(*args, **kwargs)


class CausalLMBoundary(HeadBoundary):
    """The model with its head: hands ``logits_to_keep`` to the exit, so that only those rows leave the ranks, and
    lets all ranks sample alike."""

    def forward(self, *args, **kwargs):
        given = inspect.signature(self.forward).bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        keep = given.pop("logits_to_keep", 0)
        places = isinstance(keep, torch.Tensor) and keep.ndim == 1 and keep.dtype == torch.int64
        if given.get("labels") is not None or not (places or isinstance(keep, int)):
            return super().forward(**given, logits_to_keep=keep)  # all rows leave, and transformers picks
        return super().forward(**given, logits_to_keep=0, cp_logits_to_keep=keep)

    def create_masks_for_generate(self, config, inputs_embeds, attention_mask, **kwargs):
        """For static caches ``generate`` builds 4-D masks in advance; our forwards want the 2-D one."""
        session = self.cp_session
        if session.takes(inputs_embeds.shape[1], kwargs.get("cache")) or (session.enabled and session.own_decoding):
            return attention_mask
        plain = getattr(super(), "create_masks_for_generate", create_masks_for_generate)
        return plain(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **kwargs)

    def generate(self, *args, **kwargs):
        share_random_state(self.cp_session)
        return super().generate(*args, **kwargs)  # type: ignore[misc]


def share_random_state(session: Session) -> None:
    """Give every rank of a DP group the random state of its first rank, so that they sample the same tokens."""
    group = session.groups.replica
    if group.size == 1:
        return
    on_cpu = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if session.groups.device_type == "cuda" else on_cpu[:0]
    state = torch.cat([on_cpu, on_device]).to(session.groups.device_type)
    with watched("random state"):
        dist.broadcast(state, group.ranks[0], group=group.handle)
    state = state.cpu()
    torch.set_rng_state(state[: len(on_cpu)])
    if len(on_device):
        torch.cuda.set_rng_state(state[len(on_cpu) :])
