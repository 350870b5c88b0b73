"""Recurrences over the tokens of a ragged batch, whose states are kept by slot between steps:
rules, and what runs them.
"""

from jaxkv.ops.recurrent.conv import short_conv
from jaxkv.ops.recurrent.diagonal import Diagonal, Gains, Selected, Selective
from jaxkv.ops.recurrent.drive import run
from jaxkv.ops.recurrent.largest import Largest, Levels
from jaxkv.ops.recurrent.linear import LinearAttention, Tokens
from jaxkv.ops.recurrent.rows import Rows
from jaxkv.ops.recurrent.weighted import DecayingAverage, Weighted

__all__ = [
    "DecayingAverage",
    "Diagonal",
    "Gains",
    "Largest",
    "Levels",
    "LinearAttention",
    "Rows",
    "Selected",
    "Selective",
    "Tokens",
    "Weighted",
    "run",
    "short_conv",
]
