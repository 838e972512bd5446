"""One module a model family: what is mixed in front of its classes, and nothing that a second family also needs."""

if __name__ != "cpkit.models":
    raise ImportError(f"this folder is the package cpkit.models, imported here as {__name__!r}: import cpkit.models")

from . import deepseek_v32, glm_moe_dsa, gqa, qwen3_moe

__all__ = ["deepseek_v32", "glm_moe_dsa", "gqa", "qwen3_moe"]
