"""Says what a row keeps of tokens whose entries are not made yet."""

from __future__ import annotations

from dataclasses import dataclass

from jaxkv.models.recurrent.mixer import StateArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Compressor:
    """Makes one entry of `rate` tokens (`models.compressed`). overlaps: and of as many before them,
    which have numbers of their own for that. sizes: numbers of an entry, part by part.

    A row keeps what its last tokens say of the entries that they are in, token p at p modulo
    `num_kept`: so a token is written once, and nothing is moved.
    """

    rate: int
    overlaps: bool
    sizes: tuple[int, ...]

    @property
    def num_kept(self) -> int:
        """Counts the tokens that an entry is made of."""
        return self.rate * (1 + self.overlaps)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        width = 2 * (1 + self.overlaps) * sum(self.sizes)
        return (StateArray((self.num_kept, width), axis=None),)
