"""The TPU attention kernels alone at one shape: compiled for a chip that need not be here, their
schedule counted.

The ratio is a lower bound on issue cycles (bundles per loop x trips, regions included, the whole
kernel) over the cycles that the bytes of the pages take at the chip's published bandwidth. Above 1
a kernel cannot be memory bound; below 1 nothing is proven. It compares kernels under one compiler.
It is not a speed: latency, stalls and bank conflicts are not in it, and nothing was run.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.config import tpu_page_size
from jaxkv.tools.chips import CHIPS, parse_target
from jaxkv.tools.schedule import Schedule, Span, read_schedule

KERNELS = ("decode", "prefill")
SHAPES: dict[str, tuple[int, ...]] = {  # query heads, KV heads, head_dim; of latent rows: values
    "8b": (32, 8, 128),
    "70b-tp8": (8, 1, 128),
    "70b-tp4": (16, 2, 128),
    "mha": (32, 32, 128),
    "mqa": (16, 1, 128),
    "h64": (32, 8, 64),
    "h64-tp8": (8, 1, 64),
    "h256": (8, 4, 256),
    "mla": (128, 1, 640, 512),
    "mla-tp8": (16, 1, 640, 512),
}
CONTEXT = {"decode": 2048, "prefill": 8192}
LATENT_CONTEXT = {"decode": 4096, "prefill": 8192}

POOL_BYTES, FAR_BYTES = 2**28, 2**33
"""The pool has more than so many: XLA would keep a small one in VMEM, where the kernels' copies of
pages are loops of loads and stores and no DMAs.
"""

QUERIES = 512
"""Those of a prefill's chunk: its context has no fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kernel at one shape. heads: query heads, KV heads, head_dim of one device, and of latent
    rows how many of their numbers are the value. context: tokens that each of `batch` rows holds;
    queries: of the one prefill chunk. tiles: instead of the tuned ones. far: a pool of more than
    2^31 bytes. is_part: pages are one device's part of them, of decode.
    """

    kernel: str
    name: str
    heads: tuple[int, ...]
    chip: str
    dtype: str = "bfloat16"
    page_size: int = 64
    context: int
    batch: int
    queries: int = QUERIES
    tiles: tuple[tuple[str, int], ...] = ()
    far: bool = False
    is_part: bool = False

    @property
    def rank(self) -> int | None:
        """Returns how many numbers of a latent row are its value; None: values are apart."""
        return self.heads[3] if len(self.heads) > 3 else None

    @property
    def itemsize(self) -> int:
        """Bytes of a matmul's input."""
        return 4 if self.dtype == "float32" else 2

    @property
    def bits(self) -> int:
        """Returns the bits of each stored element, its scales apart."""
        return {"int8": 8, "int4": 4}.get(self.dtype, 8 * self.itemsize)

    @property
    def token_nbytes(self) -> int:
        """Returns the bytes of a token's page, its scales apart."""
        _, kv_heads, head_dim, *latent = self.heads
        return kv_heads * head_dim * (1 if latent else 2) * self.bits // 8

    def __str__(self) -> str:
        page = f"{'parts of ' * self.is_part}pages of {self.page_size}"
        page += f", {self.batch} x {self.context} tokens"
        return f"{self.kernel} {self.name} {self.chip} {self.dtype}, {page}"


def case_of(
    kernel: str,
    name: str,
    chip: str,
    *,
    context: int | None = None,
    page_size: int | None = None,
    **others: Any,
) -> Case:
    """Makes the case at a named shape, or with `heads` at any: decode of 64 rows x 2,048 tokens,
    or 4,096 latent ones; or 512 queries that end at 8,192. page_size: None: what an engine takes.
    """
    batch = 64 if kernel == "decode" else 1
    given = {"heads": SHAPES.get(name), "batch": batch} | others
    usual = LATENT_CONTEXT if len(given["heads"] or ()) > 3 else CONTEXT
    context = usual[kernel] if context is None else context
    case = Case(kernel=kernel, name=name, chip=chip, context=context, **given)
    return replace(case, page_size=page_size or tpu_page_size(case.token_nbytes))


def layout_of(case: Case) -> Any:
    """Returns how the pages are laid out. Raises: NotImplementedError for heads that the kernels
    do not take.
    """
    from kernels_pallas import tpu

    _, kv_heads, head_dim, *_ = case.heads
    if case.rank is not None:
        return tpu.latent_layout_of(width=head_dim, rank=case.rank)
    return tpu.layout_of(kv_heads=kv_heads, head_dim=head_dim)


def tiles_of(case: Case) -> Any:
    """Chooses the tiles. Raises: NotImplementedError for heads that the kernels do not take."""
    from kernels_pallas import tpu

    sizes = {"page_size": case.page_size, "itemsize": case.itemsize, "num_heads": case.heads[0]}
    tiles = tpu.choose_tiles(layout=layout_of(case), **sizes, packing=packing_of(case))
    return replace(tiles, **dict(case.tiles))


def packing_of(case: Case) -> Any:
    """Returns how the pages are packed, None for pages of floats."""
    from kernels_pallas import tpu

    return tpu.Packing(case.bits) if case.bits < 16 else None


def lower_case(case: Case) -> Any:
    """Lowers the kernel's call for the chip. jax comes late: `chips.ENVIRONMENT` comes before."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxkv.programs.lowerings import lower
    from kernels_pallas import tpu

    num_heads, kv_heads, head_dim, *_ = case.heads
    layout, tiles, packing = layout_of(case), tiles_of(case), packing_of(case)
    dtype = jnp.dtype(jnp.float32 if case.dtype == "float32" else jnp.bfloat16)
    decodes = case.kernel == "decode"
    width = -(-case.context // case.page_size)
    num_pages = case.batch * width + 1
    page_shape = (layout.rows, case.page_size, layout.width)
    layer_bytes = num_pages * math.prod(page_shape) * case.bits // 8
    num_layers = 1 + (FAR_BYTES if case.far else POOL_BYTES) // layer_bytes
    num_tokens = case.batch if decodes else case.queries
    num_decode, num_rows = jnp.int32(case.batch if decodes else 0), jnp.int32(case.batch)

    def step(q_TNH, k_TKH, v_TKH, pages, table_BW, first_BW, len_B, start_B, count_B, layer):  # type: ignore[no-untyped-def]
        schedule = tpu.make_schedule(
            table_BW,
            first_BW,
            len_B,
            start_B,
            count_B,
            num_decode,
            num_rows,
            num_tokens=num_tokens,
            page_size=case.page_size,
            window=None,
            tiles=tiles,
            packed=packing is not None,
            decode_only=decodes,
        )
        where = {"layer": layer, "num_pages": num_pages, "scale": head_dim**-0.5}
        attend: Any
        if case.rank is not None:
            attend = tpu.latent_decode_part if case.is_part else tpu.ragged_latent_attention
            return attend(q_TNH, k_TKH[:, 0], pages, schedule, rank=case.rank, **where)
        attend = tpu.paged_decode_part if case.is_part else tpu.ragged_paged_attention
        return attend(q_TNH, k_TKH, v_TKH, pages, schedule, **where)

    sharding = NamedSharding(
        Mesh(np.array(parse_target(case.chip).devices()[:1]), ("x",)), PartitionSpec()
    )
    table, row = ((case.batch, width), jnp.int32), ((case.batch,), jnp.int32)
    new: Any = ((num_tokens, kv_heads, head_dim), dtype)
    pages: Any = ((num_layers * num_pages, *page_shape), dtype)
    if packing is not None:
        scale: Any = ((num_tokens, kv_heads), jnp.float32)
        values: Any = (new[0], jnp.int8)
        new = tpu.Quantised(values, scale, scale if packing.words_per_slot > 1 else None)
        pools: Any = [
            ((num_layers * num_pages, *x), jnp.int32)
            for x in packing.page_shapes(layout, case.page_size)
        ]
        pages = tpu.Packed(*pools)
    shapes: list[Any] = [((num_tokens, num_heads, head_dim), dtype), new, new]
    shapes += [pages, table, table, row, row, row, ((), jnp.int32)]

    def abstract(shape: Any) -> Any:
        return jax.ShapeDtypeStruct(*shape, sharding=sharding)

    return lower(
        step, *jax.tree.map(abstract, shapes, is_leaf=lambda x: type(x) is tuple), donate=3
    )


def count(case: Case, folder: Path) -> dict[str, Any]:
    """Compiles the case in this process, whose libtpu dumps to `folder`, and counts."""
    memory = lower_case(case).compile().memory_analysis()
    if case.far:
        return {"temporary_bytes": memory.temp_size_in_bytes}
    tiles, schedule = tiles_of(case), read_schedule(folder, f"paged_{case.kernel}")
    found = (_decode if case.kernel == "decode" else _prefill)(case, schedule, tiles)
    at = {name: one | _against_dma(case, one) for name, one in found.pop("at").items()}
    main = max(schedule.loops, key=lambda loop: loop.units["MXU"])
    busy = {
        name: round(main.units[name] / slots / main.own, 3)
        for name, slots in schedule.capacity.items()
    }
    return {
        **found,
        **_against_dma(case, found),
        "at": at,
        "spills": schedule.spills,
        "loops": [{"depth": loop.depth, "own": loop.own} for loop in schedule.loops],
        "busy": {name: share for name, share in busy.items() if ":" not in name},
        "vmem_bytes": schedule.vmem_bytes,
        "smem_bytes": schedule.smem_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "tiles": asdict(tiles),
    }


def _against_dma(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Compares issue cycles with those that the bytes of what rows hold take."""
    # Whole: of the scales of a page each token has a part.
    dma_bytes, chip = round(found["read_tokens"] * bytes_per_token(case)), CHIPS[case.chip]
    if chip.bandwidth is None or chip.clock is None:
        return {"dma_bytes": dma_bytes, "dma_cycles": None, "ratio": None}
    cycles = dma_bytes / chip.bandwidth * chip.clock
    return {
        "dma_bytes": dma_bytes,
        "dma_cycles": round(cycles),
        "ratio": round(found["issue_cycles"] / cycles, 3),
    }


def bytes_per_token(case: Case) -> float:
    """Counts the bytes of the pages, with their scales."""
    _, kv_heads, head_dim, *_ = case.heads
    packing = packing_of(case)
    scales = (
        0.0
        if packing is None
        else 4 * packing.scales_width(kv_heads, case.page_size) / case.page_size
    )
    vectors = 2 * kv_heads if case.rank is None else kv_heads
    return vectors * head_dim * case.bits / 8 + scales


def decode_lengths(case: Case) -> dict[str, list[int]]:
    """Lists what rows may hold besides `context`: few tokens, one more than a block, unlike numbers
    of tokens, and one row alone, beside rows that rest.
    """
    ragged = np.random.default_rng(0).integers(100, 4001, case.batch)
    few = (512, 2048, 2049, 8192)
    every = {f"{case.batch} x {n:,}": [n] * case.batch for n in few}
    return every | {
        f"{case.batch} x 100 to 4,000": [int(n) for n in ragged],
        **{f"1 x {n:,}": [n] for n in few},
    }


PREFILL_LENGTHS = ((512, 512), (2048, 2048), (512, 8192), (512, 8704))
"""Queries of a chunk, and what its row holds with them."""


def _decode(case: Case, schedule: Schedule, tiles: Any) -> dict[str, Any]:
    """Counts rounds of one loop over SLOTS blocks. Where a block may be attended in part, a round
    has a region for full blocks, and one in which each block runs a region by what it holds.

    Of the loops in it those with matmuls go over heads, the others clear what is attended past a
    row's end, where pages are of floats.
    """
    from kernels_pallas.tpu.tiles import SLOTS, sizes_attended

    (main,) = [loop for loop in schedule.loops if loop.depth == 1 and _has_matmuls(schedule, loop)]
    layout, size, pages = layout_of(case), case.page_size, tiles.decode_pages
    sizes = sizes_attended(pages, layout=layout, itemsize=case.itemsize, packing=packing_of(case))

    def bundles_of(span: Span) -> float:
        heads = [loop for loop in schedule.loops if span.holds(loop) and loop.units["MXU"]]
        return span.own + layout.joined // tiles.decode_heads * sum(loop.own for loop in heads)

    clears = [loop.own for loop in schedule.inner(main) if not loop.units["MXU"]]
    clear = sum(clears) / max(1, len(clears))
    # A round of full blocks; any other one without its blocks; a block by the pages attended.
    full = base = bundles_of(main)
    block = {pages: 0.0}
    if len(sizes) > 1:
        busy = [x for x in schedule.regions if main.holds(x) and _has_matmuls(schedule, x)]
        leaves = [one for one in busy if not any(one.holds(other) for other in busy)]
        *parts, whole = sorted(leaves, key=bundles_of)
        others = [one for one in busy if one not in leaves]
        if (len(others), len(parts)) != (1, SLOTS * len(sizes)):
            expected = f"expected one region of {SLOTS * len(sizes)}"
            raise ValueError(f"{expected}, got {len(others)} of {len(parts)}")
        full = main.own - others[0].own - whole.own + bundles_of(whole)
        base = main.own - sum(region.own for region in leaves)
        block = {0: 0.0} | {
            attended: sum(map(bundles_of, parts[i * SLOTS :][:SLOTS])) / SLOTS
            for i, attended in enumerate(sizes)
        }

    def cost(held: int) -> float:
        attended = next(n for n in block if held <= n * size)
        return block[attended] + (attended - held // size) * clear

    def counted(lengths: list[int]) -> dict[str, int]:
        slots = pages * size
        held = [min(slots, n - at) for n in lengths for at in range(0, n, slots)]
        held += [0] * (-len(held) % SLOTS)
        rounds = [held[i : i + SLOTS] for i in range(0, len(held), SLOTS)]
        cycles = schedule.outside_loops + sum(
            full if min(one) == slots else base + sum(map(cost, one)) for one in rounds
        )
        return {"issue_cycles": round(cycles), "trips": len(rounds), "read_tokens": sum(lengths)}

    found = counted([case.context] * case.batch)
    return found | {
        "cycles_per_row": round(found["issue_cycles"] / case.batch),
        "bundles": round(full),
        "at": {name: counted(lengths) for name, lengths in decode_lengths(case).items()},
    }


def _has_matmuls(schedule: Schedule, span: Span) -> bool:
    return span.units["MXU"] > 0 or any(
        loop.units["MXU"] for loop in schedule.loops if span.holds(loop)
    )


def _prefill(case: Case, schedule: Schedule, tiles: Any) -> dict[str, Any]:
    """Counts blocks of queries, and for each the blocks of keys, which run one of two regions:
    without a mask, or with (blocks that hold the queries themselves). Where blocks have parts, one
    that some query does not see runs a loop over parts, which has the two regions of its own.
    """
    regions = sorted(
        (region for region in schedule.regions if region.units["MXU"]),
        key=lambda region: region.start,
    )
    inner = [region for region in regions if not any(region.holds(other) for other in regions)]
    block, masked = inner[0], inner[-1]
    blocks = next(loop for loop in schedule.loops if loop.depth == 2 and loop.holds(block))
    (items,) = [loop for loop in schedule.loops if loop.holds(blocks)]
    clear = sum(loop.own for loop in schedule.inner(blocks) if not loop.holds(masked))
    per_block = tiles.prefill_parts
    if per_block == 1:
        around, whole, around_part = blocks.own - block.own - masked.own, block, 0
    else:
        (part,) = [loop for loop in schedule.inner(blocks) if loop.holds(masked)]
        around, (whole,) = blocks.own - block.own, inner[1:-1]
        around_part = part.own - whole.own - masked.own
    size, slots = tiles.prefill_queries, tiles.prefill_pages * case.page_size
    matmuls = block.units["MXU"] / schedule.capacity["MXU"]

    def counted(queries: int, context: int) -> dict[str, Any]:
        begins = range(context - queries, context, size)
        ends = [min(begin + size, context) for begin in begins]
        # Of blocks, if all of it is seen, and otherwise of parts.
        seen = [(begin + 1) // (slots * per_block) for begin in begins]
        parts = [-(-end // slots) - n * per_block for end, n in zip(ends, seen, strict=True)]
        whole_parts = sum(
            (begin + 1) // slots - n * per_block for begin, n in zip(begins, seen, strict=True)
        )
        trips = sum(-(-end // (slots * per_block)) for end in ends)
        num_parts = sum(seen) * per_block + sum(parts)
        cleared = num_parts * tiles.prefill_pages - sum(end // case.page_size for end in ends)
        cycles = (
            schedule.outside_loops
            + len(ends) * items.own
            + sum(seen) * block.own
            + whole_parts * whole.own
            + (sum(parts) - whole_parts) * masked.own
            + sum(parts) * around_part
            + trips * around
            + cleared * clear
        )
        return {
            "issue_cycles": round(cycles),
            "trips": trips,
            "mxu_share_all": round(num_parts * matmuls / per_block / cycles, 3),
            "read_tokens": sum(ends),
        }

    return counted(case.queries, case.context) | {
        "item_bundles": items.own,
        "bundles": block.own + around,
        "masked_bundles": masked.own + around_part + around,
        "mxu_share": round(matmuls / block.own, 3),
        "busy_whole": {
            n: round(block.units[n] / c / block.own, 3) for n, c in schedule.capacity.items()
        },
        "at": {
            f"{queries:,} of {context:,}": counted(queries, context)
            for queries, context in PREFILL_LENGTHS
        },
    }
