"""Recurrences over the tokens of a ragged batch, whose states are kept by slot between steps."""

from jaxkv.ops.recurrent.rows import Rows

__all__ = ["Rows"]
