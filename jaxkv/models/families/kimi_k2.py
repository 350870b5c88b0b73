"""Kimi K2: DeepSeek V3 under a name of its own. Source: arXiv 2507.20534."""

from jaxkv.models.families.deepseek_v3 import read

__all__ = ["read"]
