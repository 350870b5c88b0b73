"""The text part of Qwen2.5-Omni: Qwen2, as its rotary embedding is for text alone. Source: arXiv
2503.20215.
"""

from jaxkv.models.families.qwen2 import read

__all__ = ["read"]
