"""DeepSeek V3.2: multi-head latent attention over the keys that each layer's indexer selects.

Its indexer rotates halves, where its attention rotates pairs.
"""

from cpkit import dsa
from cpkit.patch import Family, register_family


class Indexer(dsa.IndexerBoundary):
    rope = "apply_rotary_pos_emb"


register_family(
    Family(
        model_type="deepseek_v32",
        module="transformers.models.deepseek_v32.modeling_deepseek_v32",
        base_model="DeepseekV32Model",
        classes={"DeepseekV32Attention": dsa.LatentAttentionBoundary, "DeepseekV32Indexer": Indexer},
        head_dims=dsa.head_dims,
        work=dsa.work,
        kept=dsa.kept,
        own_decoding=True,
    )
)
