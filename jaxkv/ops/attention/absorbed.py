"""Takes queries of latent attention to the rows that tokens have left, and back what they find
there: the absorbed form (arXiv 2405.04434, section 2.1), where devices may divide the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.axes import MeshAxes
from jaxkv.kv.layout import PageLayout
from jaxkv.ops.attention.base import LatentMaps
from jaxkv.ops.attention.divided import of_all_heads, sum_of_own_heads


class Absorbed(NamedTuple):
    """Says what queries and what they find go through. maps: None where the caller has it all
    absorbed, or where values are beside keys and nothing is; layout: of the pages; scale: of the
    scores; tokens_over: as in `sweep.Scores`.
    """

    maps: LatentMaps | None
    layout: PageLayout
    scale: float
    tokens_over: MeshAxes | None

    def enter(self, q_TNH: jax.Array) -> jax.Array:
        """Returns scaled queries [T, N, H] as they meet rows: of the heads of all devices where
        each has a part of the rows.
        """
        q_TNH = q_TNH if self.maps is None else self.maps.absorb(q_TNH)
        # A row's key for being chosen, behind the others, meets nothing.
        missing = self.layout.head_dim - q_TNH.shape[2]
        q_TNH = jnp.pad(q_TNH * self.scale, ((0, 0), (0, 0), (0, missing)))
        return of_all_heads(self.layout.codec.rotate(q_TNH), self.tokens_over, along=1)

    def leave(self, out_TNH: jax.Array) -> jax.Array:
        """Returns the values [T, N, V] of this device's heads, added up over devices where each
        gives the part that it has found.
        """
        # A codec may have rotated a row as a whole: only now do its first numbers stand apart.
        found_TNR = self.layout.codec.restore(out_TNH)[..., : self.layout.latent_dim]
        found_TNR = sum_of_own_heads(found_TNR, self.tokens_over)
        return found_TNR if self.maps is None else self.maps.values_of(found_TNR)
