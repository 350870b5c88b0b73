"""The text part of Emu3: Llama. Source: arXiv 2409.18869."""

from jaxkv.models.families.llama import read

__all__ = ["read"]
