"""Pallas kernels and their jnp oracle. Imports jax only."""
