"""A layer of DeepSeek sparse attention under context parallelism, for the families whose classes are built alike:
multi-head latent attention, and an indexer that selects keys.

The attention's own forward runs on a rank's rows. Latents and rope keys meet in the prefill cache, index keys after
them; both travel while queries are projected. Nothing is expanded for all heads but what the early rows see:

    q_a, q_b, kv_a, rope -> cache.update ........... latents and rope keys leave
    indexer: wk, norm, rope -> cache.update_indexer  index keys leave
             wq_b, weights_proj                      (both travel)
             wait for index keys, select             latents travel
    wait for latents, attend, o_proj
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface

from .attention import attend, pieces
from .balance import Kept, Term, Work
from .boundary import AttentionBoundary, refuse_unknown
from .cache import PrefillCache
from .context import ForwardContext
from .indexer import everything
from .layout import Segment
from .rows import Pending, gather_padded

__all__ = ["IndexerBoundary", "LatentAttentionBoundary", "head_dims", "kept", "latent_attention", "work"]

LATENT_ATTENTION_NAME = "cpkit_latent"  # our own entry in transformers' attention registry
CHUNK = 1024  # query rows that are multiplied into the latents' space at a time


if TYPE_CHECKING:

    class Indexer(nn.Module):
        def __getattr__(self, name: str) -> Any: ...

else:
    Indexer = object


class IndexerBoundary(Indexer):
    """An indexer that scores this rank's rows against all keys. Families say which of their modeling module's functions
    rotates its queries and keys."""

    rope: str

    def forward(self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache=None):
        """``[1, held, topk]`` int32: for each row the packed keys that it selects, ascending, then ``-1``."""
        if not isinstance(cache, PrefillCache):
            return super().forward(hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache)
        context = cache.context
        keys = cache.update_indexer(self._keys(hidden_states, position_embeddings), self.layer_idx)
        topk = min(self.index_topk, context.longest)
        if not context.local_rows:
            keys.wait()
            selected = torch.zeros(1, topk, dtype=torch.int32, device=context.device)  # of the stand-in row
        elif context.longest <= topk:
            keys.wait()
            selected = everything(*context.visible(cache.spans[self.layer_idx]), topk).to(context.device)
        else:
            tp = context.groups.tp
            mine = slice(tp.rank, context.local_rows, tp.size)  # strided, so that the TP ranks have equal work
            query, weights = self._queries(hidden_states[:, mine], q_resid[:, mine], position_embeddings, mine)
            key = keys.wait()
            starts, ends = context.visible(cache.spans[self.layer_idx])
            kernel = context.kernels["indexer"]
            selected = _together(kernel.run(query, weights, key, starts[mine], ends[mine], topk), context)
        return selected.unsqueeze(0)

    def _keys(self, hidden_states, position_embeddings):
        """``[1, held, dim]`` of this rank's rows."""
        return self._rotated(self.k_norm(self.wk(hidden_states)).unsqueeze(2), *position_embeddings).squeeze(2)

    def _queries(self, hidden_states, q_resid, position_embeddings, rows):
        """``[rows, heads, dim]``, and what each head of a row weighs, with the scales: ``[rows, heads]`` fp32."""
        cos, sin = position_embeddings
        query = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
        scale = self.n_heads**-0.5 * self.softmax_scale
        return self._rotated(query, cos[:, rows], sin[:, rows])[0], weights[0] * scale

    def _rotated(self, x, cos, sin):
        """The model's own rotation of the first numbers of each ``[1, rows, heads, dim]`` vector."""
        rotate = getattr(sys.modules[type(self).__module__], self.rope)
        rotated, rest = x.split([self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim], dim=-1)
        none = rotated[:, :, :0]  # it rotates queries and keys of the same rows; here they are not the same
        return torch.cat([rotate(rotated, none, cos, sin, unsqueeze_dim=2)[0], rest], dim=-1)


def _together(selected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    """The selections of all local rows, of which each TP rank made every ``tp``-th."""
    tp, rows = context.groups.tp, context.local_rows
    if tp.size == 1:
        return selected
    most = -(-rows // tp.size)
    gathered = gather_padded(selected, most, rows, tp, "selected keys").wait()
    return gathered.view(tp.size, most, -1).transpose(0, 1).flatten(0, 1)[:rows]


class LatentAttentionBoundary(AttentionBoundary):
    """The family's own attention forward, which finds our cache, indexer and attention function in its sockets; keys
    are not expanded there."""

    attention_name = LATENT_ATTENTION_NAME

    def expand_kv(self, kv_nope, k_rot):
        return (kv_nope, k_rot) if isinstance(kv_nope, Pending) else super().expand_kv(kv_nope, k_rot)


def latent_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: Pending,
    value: Pending,
    attention_mask: torch.Tensor | None,
    scaling: float,
    indices: torch.Tensor,
    cp_context: ForwardContext,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' own socket: ``query [1, heads, held, dim]`` over the latents that ``indices [1, held,
    topk]`` selects of those that ``key`` is the ``Pending`` of, to ``[1, held, heads, value_dim]``."""
    refuse_unknown(module, kwargs, cp_context)
    latent, rope = (x[:, 0] for x in key.wait())
    weight = _weight(module.kv_b_proj, latent).unflatten(0, (query.shape[1], -1))
    layer = _Layer(module, cp_context, weight, latent, rope, scaling)
    out = query.new_zeros(query.shape[2], query.shape[1], module.v_head_dim)
    if cp_context.local_rows:
        layer.attend(query[0].transpose(0, 1), indices[0], out)
    return out.unsqueeze(0), None


AttentionInterface.register(LATENT_ATTENTION_NAME, latent_attention)


def _weight(linear: nn.Module, like: torch.Tensor) -> torch.Tensor:
    """``[out, in]`` of this rank; that of a quantised or offloaded layer comes out of its own forward."""
    if type(linear) is nn.Linear and not hasattr(linear, "_hf_hook"):
        weight = linear.weight
        return weight.to_local() if isinstance(weight, DTensor) else weight
    return linear(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)).transpose(0, 1)


@dataclass(frozen=True)
class _Layer:
    """One layer's attention of a rank's rows over packed ``latent [keys, latent]`` and ``rope [keys, rope]``.

    ``weight [heads, key_dim + value_dim, latent]`` expands a latent to the keys and values of all heads.
    """

    module: Any
    context: ForwardContext
    weight: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    scale: float

    def attend(self, query: torch.Tensor, selected: torch.Tensor, out: torch.Tensor) -> None:
        """Of ``query [rows, heads, key_dim + rope]``, ``selected [rows, topk]``; ``out [rows, heads, value_dim]``."""
        segments, early = self.context.early(selected.shape[1])
        if not self.dense_pays(segments):
            early = []
        if early:
            dense = self.dense(torch.cat([query[r.start : r.stop] for r in early]), segments)
            for run, rows in zip(early, dense.split([len(r) for r in early]), strict=True):
                out[run.start : run.stop] = rows
        late = _between(early, self.context.local_rows)
        if late:
            keys, selected = self._keys(selected)
        for rows in (slice(first, min(first + CHUNK, r.stop)) for r in late for first in r[::CHUNK]):
            out[rows] = self.sparse(query[rows], keys, selected[rows])

    def dense_pays(self, segments: list[Segment]) -> bool:
        """Whether expanding the keys that the early rows see, which are no more than are selected, costs less than
        absorbing their queries: a latent is longer than a head's key, so each pair of the two is dearer then."""
        heads, width, latent = self.weight.shape
        pairs = sum(s.count * self._seen(s) - (s.count - 1) * s.count * s.step // 2 for s in segments)
        expanded = sum(self._most_seen(segments).values()) * width * latent + pairs * (width + self.rope.shape[-1])
        rows = sum(s.count for s in segments)
        absorbed = rows * width * latent + pairs * (2 * latent + self.rope.shape[-1])
        return rows > 0 and expanded <= absorbed

    def _seen(self, segment: Segment) -> int:
        """Keys that the last row of a segment sees."""
        return self.context.layout.prefixes[segment.request] + segment.stop

    def _most_seen(self, segments: list[Segment]) -> dict[int, int]:
        """For each request, how many of its keys its rows in ``segments`` see."""
        most: dict[int, int] = {}
        for s in segments:
            most[s.request] = max(self._seen(s), most.get(s.request, 0))
        return most

    def dense(self, query: torch.Tensor, segments: list[Segment]) -> torch.Tensor:
        """Plain causal attention of the rows of ``segments`` over expanded keys and values."""
        spans, starts, parts, total = self.context.cache.spans[self.module.layer_idx], {}, [], 0
        for request, count in self._most_seen(segments).items():
            start, starts[request] = spans[request][0], total
            parts.append(torch.arange(start, start + count, device=self.latent.device))
            total += count
        at = torch.cat(parts)
        nope, values = (
            torch.matmul(self.latent[at], self.weight.flatten(0, 1).t())
            .unflatten(1, self.weight.shape[:2])
            .split([self.module.qk_nope_head_dim, self.module.v_head_dim], dim=-1)
        )
        rope = self.rope[at].unsqueeze(1).expand(-1, nope.shape[1], -1)
        rounds = pieces(segments, starts, self.context.layout.prefixes)
        kernel = self.context.kernels["attention"]
        return attend(query, torch.cat([nope, rope], -1), values, rounds, self.scale, kernel)

    def sparse(self, query: torch.Tensor, keys: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """Attention of queries in the latents' space; the sums of latents become values afterwards."""
        wide = torch.promote_types(query.dtype, torch.float32) if query.device.type == "cpu" else query.dtype
        to_latent, to_value = self.weight.to(wide).split([self.module.qk_nope_head_dim, self.module.v_head_dim], 1)
        nope, rope = query.to(wide).split([to_latent.shape[1], self.rope.shape[-1]], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), to_latent).transpose(0, 1)
        kernel = self.context.kernels["sparse_attention"]
        summed = kernel.run(torch.cat([absorbed, rope], -1), keys, selected, self.scale, self.latent.shape[-1])
        return torch.bmm(summed.transpose(0, 1).to(wide), to_value.transpose(1, 2)).transpose(0, 1).to(query.dtype)

    def _keys(self, selected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents with their rope keys ``[keys, latent + rope]``, and the selection among them: all of them, or where
        fewer than all are selected (decoding), those alone."""
        if selected.numel() >= len(self.latent):
            return torch.cat([self.latent, self.rope], -1), selected
        used = selected.clamp(min=0).flatten()
        own = torch.arange(len(used), dtype=torch.int32, device=used.device).view_as(selected)
        keys = torch.cat([self.latent.index_select(0, used), self.rope.index_select(0, used)], -1)
        return keys, own.masked_fill(selected < 0, -1)


def _between(runs: list[range], rows: int) -> list[range]:
    """The rest of ``rows`` rows, in order."""
    edges = [0, *(edge for run in runs for edge in (run.start, run.stop)), rows]
    return [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def head_dims(config: Any) -> dict[str, int]:
    """Head sizes by the kinds of kernels that a layer uses."""
    return {
        "attention": max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim),
        "sparse_attention": config.kv_lora_rank + config.qk_rope_head_dim,
        "indexer": config.index_head_dim,
    }


def kept(config: Any) -> list[Kept]:
    """Latents with their rope keys in all layers, index keys in those that have an indexer of their own; all heads, and
    so all TP ranks, share them."""
    return [
        Kept("kv", config.kv_lora_rank + config.qk_rope_head_dim, config.num_hidden_layers, shared=True),
        Kept("index keys", config.index_head_dim, _scoring_layers(config), shared=True),
    ]


def _scoring_layers(config: Any) -> int:
    """Layers that have an indexer of their own."""
    return (getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers).count("full")


def work(config: Any) -> Work:
    """What a layer costs: scores of all keys that a row sees in the layers that have an indexer of their own, and
    attention to at most ``index_topk`` of them."""
    c, heads = config, config.num_attention_heads
    width, rope = c.qk_nope_head_dim + c.v_head_dim, c.qk_rope_head_dim
    query = c.q_lora_rank * heads * (c.qk_nope_head_dim + rope)
    projections = query + c.hidden_size * (c.q_lora_rank + c.kv_lora_rank + rope)
    attention = projections + heads * (width * c.kv_lora_rank + c.v_head_dim * c.hidden_size)
    experts = 3 * c.hidden_size * c.moe_intermediate_size * (c.num_experts_per_tok + c.n_shared_experts)
    scored = _scoring_layers(c) / c.num_hidden_layers
    indexer = scored * (c.q_lora_rank * c.index_n_heads * c.index_head_dim + c.hidden_size * c.index_head_dim)
    return Work(
        2.0 * (attention + indexer + experts),
        (
            Term(scored * 2.0 * c.index_n_heads * (c.index_head_dim + 1), above=c.index_topk),
            Term(2.0 * heads * (2 * c.kv_lora_rank + rope), most=c.index_topk),
        ),
    )
