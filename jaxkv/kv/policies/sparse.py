"""Sparse attention: everything stays, and a decoding query reads only part of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseAttention:
    """Stands in place of a policy where nothing ever goes. As many pages as the budget has are read
    of each row, chosen anew for every query and KV head (`ops.attention.select`).

    Source: Quest, arXiv 2406.10774.
    """

    name: str

    @property
    def asks_backend(self) -> bool:
        """Tells whether it wants more of an attention backend than page tables with gaps, as
        `Policy.asks_backend`.
        """
        return True
