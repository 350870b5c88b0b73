"""Draws what happens inside: pages, requests over time, latencies, memory, the prefix cache.

Functions take plain values and return a `Picture`: the text of an SVG file or a piece of HTML,
which needs nothing else and which notebooks show.
"""

from __future__ import annotations

from jaxkv.pictures.latency import latencies
from jaxkv.pictures.markup import Picture
from jaxkv.pictures.memory import stacked_bars
from jaxkv.pictures.pages import PageFrame, page_map
from jaxkv.pictures.prefix import CachedPage, prefix_tree
from jaxkv.pictures.timeline import ChromeTrace, chrome_trace, timeline

__all__ = [
    "CachedPage",
    "ChromeTrace",
    "PageFrame",
    "Picture",
    "chrome_trace",
    "latencies",
    "page_map",
    "prefix_tree",
    "stacked_bars",
    "timeline",
]
