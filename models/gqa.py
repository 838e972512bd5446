"""Other grouped-query models that run as Qwen3 MoE does, with nothing of their own: those that the tests show."""

from cpkit.boundary import AttentionBoundary
from cpkit.patch import Family, register_family

for _model_type, _prefix in {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral", "mixtral": "Mixtral"}.items():
    register_family(
        Family(
            model_type=_model_type,
            module=f"transformers.models.{_model_type}.modeling_{_model_type}",
            base_model=f"{_prefix}Model",
            classes={f"{_prefix}Attention": AttentionBoundary},
        )
    )
