"""Tiny random models in which a mistake moves the logits: no constant norms or biases, sharp attention."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

BASE = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4)
BASE |= dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=4096)
DSA = BASE | dict(
    num_hidden_layers=4, num_key_value_heads=4, head_dim=8, moe_intermediate_size=32, n_routed_experts=8,
    num_experts_per_tok=2, n_shared_experts=1, topk_group=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=16, v_head_dim=16, index_topk=16, index_n_heads=16, index_head_dim=16, first_k_dense_replace=1,
)  # fmt: skip
CONFIGS = {
    "qwen3_moe": BASE
    | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3": BASE,
    "llama": BASE,
    "mistral": BASE | dict(sliding_window=None),
    "mixtral": BASE | dict(num_local_experts=8, num_experts_per_tok=2),
    "deepseek_v32": DSA | dict(n_group=2),
    "glm_moe_dsa": DSA | dict(n_group=1, indexer_types=["full", "full", "shared", "shared"]),
}


@lru_cache
def _made(model_type: str, seed: int, attn: str, overrides: tuple) -> PreTrainedModel:
    wanted = {name: list(value) if isinstance(value, tuple) else value for name, value in overrides}
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type] | wanted)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn).float().eval()
    noise = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                middle = 0 if name.endswith("bias") else 1
                parameter.copy_(middle + 0.2 * torch.randn(parameter.shape, generator=noise))
            else:
                parameter.mul_(4.0)  # std 0.02 -> 0.08
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=noise))
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def make(model_type: str = "qwen3_moe", seed: int = 0, attn: str = "sdpa", **overrides) -> PreTrainedModel:
    """A fresh copy of the tiny model of that kind, on the CPU in fp32."""
    frozen = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in overrides.items())
    return copy.deepcopy(_made(model_type, seed, attn, frozen))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids, never the padding id 0."""
    return torch.randint(1, 512, shape, generator=torch.Generator().manual_seed(seed))
