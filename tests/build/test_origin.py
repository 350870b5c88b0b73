"""Weights have a name that is theirs."""

import jax.numpy as jnp

from jaxkv.build.origin import WeightNames


def test_weights_of_which_some_are_replaced_have_another_name():
    names, kept, old = WeightNames(), jnp.ones((3, 4)), jnp.zeros((2, 4))
    first = names.of({"embed": kept, "head": old})
    assert names.of({"embed": kept, "head": old.at[1, 3].set(1.0)}) != first
    assert names.of({"embed": kept, "head": old}) == first
