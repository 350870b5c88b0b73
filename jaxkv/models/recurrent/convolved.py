"""Says what a row keeps for attention whose queries and keys see its last tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jaxkv.models.recurrent.mixer import StateArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolved:
    """Convolves queries and keys twice, and takes half of the values from the token before
    (`models.convolved`). channels: numbers of a token's queries and keys. values: those of its
    values. widths: tokens that each convolution sees.
    """

    channels: int
    values: int
    widths: tuple[int, int]

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Lists the last values of those half, the last inputs of the first convolution, and those
        of the second, one array for each token before.
        """
        first, second = self.widths
        inputs = [StateArray((self.channels, size)) for size in (first - 1, *[1] * (second - 1))]
        return (StateArray((self.values // 2, 1), axis=None), *inputs)
