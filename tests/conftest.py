"""What every test runs under. That each warning is an error is set in pyproject.toml."""

import os

# Before jax is imported: it reads these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # nothing is written to, or comes from, the user's own cache

import jax

# [B] + [T, B] is an error, not a guess. NaN checks stay off: tests poison unused pages with NaN on purpose.
jax.config.update("jax_numpy_rank_promotion", "raise")
