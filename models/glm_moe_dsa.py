"""GLM-5: DeepSeek V3.2's attention, with layers that share the selection of an earlier one.

A layer of the kind "shared" has no indexer and takes the selection that travels with the hidden states; it concerns a
rank's own rows, so it never leaves the rank. The indexer rotates pairs, as the attention does.
"""

from cpkit import dsa
from cpkit.patch import Family, register_family


class Indexer(dsa.IndexerBoundary):
    rope = "apply_rotary_pos_emb_interleave"


register_family(
    Family(
        model_type="glm_moe_dsa",
        module="transformers.models.glm_moe_dsa.modeling_glm_moe_dsa",
        base_model="GlmMoeDsaModel",
        classes={"GlmMoeDsaAttention": dsa.LatentAttentionBoundary, "GlmMoeDsaIndexer": Indexer},
        head_dims=dsa.head_dims,
        work=dsa.work,
        kept=dsa.kept,
        own_decoding=True,
    )
)
