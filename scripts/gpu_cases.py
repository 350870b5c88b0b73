"""Lists what the attention kernels are compiled, compared and timed at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

SHAPES = {  # query heads, KV heads, head_dim
    "8b": (32, 8, 128),
    "70b": (64, 8, 128),
    "70b-tp8": (8, 1, 128),
    "mha": (32, 32, 128),
    "h64": (32, 8, 64),
    "h256": (8, 4, 256),
}
PAGES, QUANTISED_PAGES = (16, 64), (64,)
QUANTISED = ("int8", "int4")
CHUNK, CHUNK_CONTEXT = 2048, 8192


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel. Decode: `batch` rows of `context` tokens; prefill: one chunk of CHUNK queries
    that ends there.
    """

    kernel: str
    shape: str
    page_size: int
    batch: int
    context: int
    window: int | None = None
    codec: str = "bfloat16"

    @property
    def pages_per_row(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def num_tokens(self) -> int:
        return self.batch if self.kernel == "decode" else CHUNK

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        _, kv_heads, head_dim = SHAPES[self.shape]
        return self.batch * self.pages_per_row, 2 * kv_heads, self.page_size, head_dim

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values that a decode step reads."""
        _, kv_heads, head_dim = SHAPES[self.shape]
        sizes = {"bfloat16": 2 * head_dim, "int8": head_dim + 2, "int4": head_dim // 2 + 4}
        return self.batch * self.context * 2 * kv_heads * sizes[self.codec]

    @property
    def flops(self) -> int:
        """Of a chunk's two matmuls, what the causal mask leaves of them."""
        num_heads, _, head_dim = SHAPES[self.shape]
        return 4 * num_heads * head_dim * (CHUNK * self.context - CHUNK * (CHUNK - 1) // 2)

    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of what `attend` takes."""
        num_heads, kv_heads, head_dim = SHAPES[self.shape]
        rows = (self.batch,)
        return {
            "q_TNH": ((self.num_tokens, num_heads, head_dim), "bfloat16"),
            "k_TKH": ((self.num_tokens, kv_heads, head_dim), "bfloat16"),
            "v_TKH": ((self.num_tokens, kv_heads, head_dim), "bfloat16"),
            **self._pools(),
            "table_BW": ((self.batch, self.pages_per_row), "int32"),
            "first_BW": ((self.batch, self.pages_per_row), "int32"),
            "len_B": (rows, "int32"),
        }

    def _pools(self) -> dict[str, tuple[tuple[int, ...], str]]:
        if self.codec == "bfloat16":
            return {"pages": (self.page_shape, "bfloat16")}
        num_pages, num_heads, size, head_dim = self.page_shape
        width, scale = (head_dim, "bfloat16") if self.codec == "int8" else (head_dim // 2, "int32")
        return {
            "pages": ((num_pages, num_heads, size, width), "int8"),
            "scales": ((num_pages, 1, num_heads * size), scale),
        }


def placed(case: Case, backend: Any) -> tuple[Any, Any]:
    """Returns what the case asks of attention, and how the backend lays its pages out."""
    from jaxkv.kv.codecs import get_codec
    from jaxkv.ops.attention import Heads

    num_heads, kv_heads, head_dim = SHAPES[case.shape]
    heads = Heads(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, window=case.window)
    codec = get_codec(case.codec, platform="gpu")
    return heads, backend.page_layout(heads, case.page_size, codec)


def attend(case: Case, backend: Any, repeats: int = 1) -> Callable[..., Any]:
    """A step's schedule and attention of so many layers, each asking with what the one before it
    answered, all with the same pages, by a backend of jaxkv. -> (out, pages, scales or None)
    """
    import jax
    import jax.numpy as jnp

    from jaxkv.kv.state import PageTables, Store
    from jaxkv.ops.attention import Batch, Place, Terms

    count = 1 if case.kernel == "decode" else CHUNK
    heads, layout = placed(case, backend)

    def run(q_TNH, k_TKH, v_TKH, pages, table_BW, first_BW, len_B, scales=None):  # type: ignore[no-untyped-def]
        store = Store(pages, layout=layout, num_layers=1, scales=scales)
        stepped = PageTables(table_BW, first_BW, len_B)
        before = replace(stepped, len_B=len_B - count)
        token_T = jnp.arange(case.num_tokens, dtype=jnp.int32)
        decodes = case.kernel == "decode"
        batch = Batch(
            token_T=token_T,
            position_T=len_B - 1 if decodes else len_B[0] - CHUNK + token_T,
            row_T=token_T if decodes else jnp.zeros_like(token_T),
            start_B=jnp.arange(case.batch, dtype=jnp.int32) * count,
            count_B=jnp.full(case.batch, count, jnp.int32),
            num_decode=jnp.int32(case.batch if decodes else 0),
            num_rows=jnp.int32(case.batch),
            decode_only=decodes,
        )
        prepared = backend.prepare(store, before, batch, heads)
        terms = Terms(heads.head_dim**-0.5, q_TNH.dtype)

        def layer(_: Any, carried: tuple[Any, ...]) -> tuple[Any, ...]:
            at = Place(store.with_arrays(*carried[1:]), 0, stepped)
            out, after, _ = backend.attend(carried[0], k_TKH, v_TKH, at, batch, prepared, terms)
            return out.astype(q_TNH.dtype), after.pages, after.scales

        return jax.lax.fori_loop(0, repeats, layer, (q_TNH, pages, scales))

    return run
