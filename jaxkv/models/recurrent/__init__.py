"""Mixers that keep a recurrent state of one size per row, beside or in place of attention: one file
each.
"""

from jaxkv.models.recurrent.compressor import Compressor
from jaxkv.models.recurrent.convolved import Convolved
from jaxkv.models.recurrent.delta import GatedDelta
from jaxkv.models.recurrent.lightning import Lightning
from jaxkv.models.recurrent.mamba import Mamba
from jaxkv.models.recurrent.mamba2 import Mamba2
from jaxkv.models.recurrent.mixer import Mixer, StateArray
from jaxkv.models.recurrent.mlstm import MLstm
from jaxkv.models.recurrent.ngrams import Ngrams
from jaxkv.models.recurrent.rg_lru import RgLru
from jaxkv.models.recurrent.rwkv import ChannelMix, TimeMix
from jaxkv.models.recurrent.short_conv import ShortConv
from jaxkv.models.recurrent.short_convs import SAID, SHORT_CONV, SOURCE, ShortConvs

__all__ = [
    "SAID",
    "SHORT_CONV",
    "SOURCE",
    "ChannelMix",
    "Compressor",
    "Convolved",
    "GatedDelta",
    "Lightning",
    "MLstm",
    "Mamba",
    "Mamba2",
    "Mixer",
    "Ngrams",
    "RgLru",
    "ShortConv",
    "ShortConvs",
    "StateArray",
    "TimeMix",
]
