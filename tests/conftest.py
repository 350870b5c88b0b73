"""What every test runs under. That each warning is an error is set in pyproject.toml."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported: it reads this once

import jax

# [B] + [T, B] is an error, not a guess. NaN checks stay off: tests poison unused pages with NaN on purpose.
jax.config.update("jax_numpy_rank_promotion", "raise")
