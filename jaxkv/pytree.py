"""Declares frozen dataclasses that JAX passes into and out of programs."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(*, default: Any = MISSING) -> Any:
    """Declares a field that is part of the program instead of an argument of it: hashable, and
    another value compiles anew.
    """
    return field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(field, static))
def pytree(cls: type[T]) -> type[T]:
    """Makes the class a frozen dataclass and a node of JAX's trees, whose leaves are those of its
    fields that are not `static`.
    """
    return jax.tree_util.register_dataclass(dataclass(frozen=True)(cls))
