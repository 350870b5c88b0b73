"""The matmuls of a decoder's layers on a GPU, out of stacked weights, by XLA's options.

    python scripts/gpu_matmuls.py --tokens 2 64 2048 --json out.json

A loop over eight layers of Llama-3.1-8B's seven matrices, bfloat16, nothing between them but norms
and the activation. Printed: microseconds of a layer, the rate at which its weights are read, and
how long XLA compiles.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bench_generate import environment
from gpu_bench import seconds

from jaxkv.programs.compiler_options import COMPILER_OPTIONS

NUM_LAYERS, WIDTH = 8, 4096
SHAPES = {
    "q": (WIDTH, WIDTH),
    "k": (1024, WIDTH),
    "v": (1024, WIDTH),
    "o": (WIDTH, WIDTH),
    "gate": (14336, WIDTH),
    "up": (14336, WIDTH),
    "down": (WIDTH, 14336),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "XLA's own": {},
    "no Triton": {"xla_gpu_enable_triton_gemm": "False"},
    "as engines": COMPILER_OPTIONS["gpu"],
}


def layers(w: dict[str, jax.Array], x_TD: jax.Array) -> jax.Array:
    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    def layer(i: jax.Array, x_TD: jax.Array) -> jax.Array:
        def times(h: jax.Array, name: str) -> jax.Array:
            matrix = jax.lax.dynamic_index_in_dim(w[name], i, keepdims=False)
            contracted = (((1,), (1,)), ((), ()))
            h = h.astype(matrix.dtype)
            return jax.lax.dot_general(h, matrix, contracted, preferred_element_type=jnp.float32)

        h_TD = norm(x_TD)
        mixed = times(h_TD, "q") + jnp.tile(times(h_TD, "k") + times(h_TD, "v"), (1, 4))
        x_TD = x_TD + times(mixed, "o")
        h_TD = norm(x_TD)
        return x_TD + times(jax.nn.silu(times(h_TD, "gate")) * times(h_TD, "up"), "down")

    return jax.lax.fori_loop(0, NUM_LAYERS, layer, x_TD)


def measure(tokens: int, w: dict[str, jax.Array], name: str) -> dict[str, Any]:
    x_TD = jax.random.normal(jax.random.key(1), (tokens, WIDTH), jnp.float32)
    began = time.perf_counter()
    program = jax.jit(layers).lower(w, x_TD).compile(OPTIONS[name])
    compile_s = time.perf_counter() - began
    layer_s = seconds(lambda: program(w, x_TD), repeats=10) / NUM_LAYERS
    nbytes = sum(x.nbytes for x in w.values()) / NUM_LAYERS
    return {
        "tokens": tokens,
        "options": name,
        "layer_us": layer_s * 1e6,
        "bytes_per_s": nbytes / layer_s,
        "compile_s": compile_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 16, 64, 512, 2048])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    keys = iter(jax.random.split(jax.random.key(0), len(SHAPES)))
    w = {
        name: jax.random.normal(next(keys), (NUM_LAYERS, *shape), jnp.bfloat16) * shape[1] ** -0.5
        for name, shape in SHAPES.items()
    }
    result = environment() | {"command": " ".join(sys.argv), "lines": []}
    for tokens in asked.tokens:
        for name in OPTIONS:
            line = measure(tokens, w, name)
            result["lines"].append(line)
            rate = f"{line['bytes_per_s'] / 1e12:6.2f} TB/s"
            compiled = f"compiled in {line['compile_s']:.1f} s"
            print(f"{tokens:5d} tokens  {name:12s}{line['layer_us']:9.1f} us {rate}  {compiled}")
            if asked.json:
                asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
