"""Says what a row keeps for what a layer makes of n-grams of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jaxkv.models.recurrent.mixer import StateArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Ngrams:
    """Looks up each token with up to n - 1 before it (`models.ngrams`).

    multipliers: of the token itself, of the one before it, and so on to the last of n. table_sizes:
    the rows of each table, a prime each; those of pairs come first, as many for each length. end:
    the token behind which a new text begins. kernel: tokens that the convolution sees, n apart.
    channels: what it convolves.
    """

    multipliers: tuple[int, ...]
    table_sizes: tuple[int, ...]
    end: int
    kernel: int
    channels: int

    @property
    def size(self) -> int:
        """Counts the tokens of the longest n-grams."""
        return len(self.multipliers)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Lists the last tokens, once for each of them, and the last inputs of the convolution."""
        earlier, before = self.size - 1, (self.kernel - 1) * self.size
        return StateArray((earlier, earlier), axis=None), StateArray(
            (self.channels, before), axis=None
        )
