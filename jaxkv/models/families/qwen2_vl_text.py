"""The text part of Qwen2-VL: Qwen2, as its rotary embedding is for text alone. Source: arXiv
2409.12191.
"""

from jaxkv.models.families.qwen2 import read

__all__ = ["read"]
