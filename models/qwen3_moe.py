"""Qwen3 MoE: grouped-query attention, and experts behind transformers' expert-parallel socket.

The family's own attention forward runs unchanged on a rank's rows (q, k, v, their norms, RoPE with true positions);
keys and values meet in the prefill cache, in one gather a layer, and only the attention function is ours.
"""

from cpkit.boundary import AttentionBoundary
from cpkit.patch import Family, register_family

register_family(
    Family(
        model_type="qwen3_moe",
        module="transformers.models.qwen3_moe.modeling_qwen3_moe",
        base_model="Qwen3MoeModel",
        classes={"Qwen3MoeAttention": AttentionBoundary},
    )
)
