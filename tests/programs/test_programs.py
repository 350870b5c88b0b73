"""Ten programs, compiled before the first request, none after; their memory does not grow with
the pool.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import LLM, BeamSearchParams, SamplingParams
from jaxkv.programs import lowerings
from jaxkv.programs.buckets import fit_bucket, row_buckets, token_buckets
from jaxkv.programs.compiled import Programs
from jaxkv.programs.compiler_options import compiler_options
from jaxkv.testing import budget_of, config_of, engine_of, model_of
from tiers import some
from tiny import make_checkpoint, tiny_config
from tokenizers_ import save_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compile")

COMPILED = "/jax/core/compile/backend_compile_duration"
PAGES = (64, 4096)
VOCAB = 420


@pytest.fixture
def compilations() -> Iterator[list[float]]:
    """Grows by one for each run of the compiler, in whatever thread and through whatever door."""
    seen: list[float] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == COMPILED:
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_programs_go_with_their_engine(checkpoints, monkeypatch, own):
    monkeypatch.setattr(lowerings, "own", own.__wrapped__)
    before = len(live_programs())
    llm = LLM(checkpoints["llama"], skip_tokenizer_init=True, max_num_seqs=2, lazy_compile=True)
    llm.generate({"prompt_token_ids": [3, 1, 4]}, SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(live_programs()) > before + 1
    del llm
    gc.collect()
    assert len(live_programs()) == before


def live_programs() -> list[object]:
    """The engine's, of all that are loaded on the device."""
    loaded = jax.devices()[0].client.live_executables()
    return [
        one
        for one in loaded
        if one.hlo_modules()[0].name
        in ("jit_step", "jit_draw", "jit_decode_loop", "jit_copy_pages")
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    made = {
        name: make_checkpoint(folder / name, tiny_config(name))
        for name in ("llama", "qwen2-mixed-windows")
    }
    return made | {
        "with tokenizer": make_checkpoint(
            folder / "tokenizer", tiny_config("llama", vocab_size=VOCAB)
        )
    }


def random_request(rng: np.random.Generator) -> tuple[dict, SamplingParams]:
    """Every parameter that a program reads, in and out of use."""
    max_tokens = int(rng.integers(1, 14))
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.5, 1.3])),
        top_p=float(rng.choice([1.0, rng.uniform(0.1, 1)])),
        top_k=int(rng.choice([0, -1, 1, 7, 1000])),
        min_p=float(rng.choice([0.0, 0.1])),
        seed=None if rng.random() < 0.5 else int(rng.integers(2**40)),
        stop_token_ids=rng.integers(0, 151, rng.integers(0, 40)).tolist(),
        ignore_eos=bool(rng.random() < 0.5),
        max_tokens=max_tokens,
        min_tokens=int(rng.integers(0, max_tokens + 1)),
        **{name: value for name, value in random_processing(rng).items() if rng.random() < 0.3},
    )
    return {"prompt_token_ids": rng.integers(0, VOCAB, rng.integers(1, 50)).tolist()}, params


def random_processing(rng: np.random.Generator) -> dict[str, object]:
    """The parameters that are off by default."""
    return {
        "logprobs": int(rng.integers(0, 21)),
        "prompt_logprobs": int(rng.integers(0, 21)),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "logit_bias": {
            int(token): float(rng.normal())
            for token in rng.integers(0, VOCAB, rng.integers(1, 300))
        },
        "allowed_token_ids": rng.integers(200, VOCAB, rng.integers(1, 99)).tolist(),
        "bad_words": [["t"], ["the end"], ["One", "x"]][rng.integers(3)],
    }


def test_the_counter_sees_every_kind_of_compilation(compilations):
    x = np.arange(7.0, dtype=np.float32)
    jax.block_until_ready(x)
    assert not compilations
    jitted = jax.jit(lambda x: x * 3 + 1)
    jitted(x)
    assert len(compilations) == 1
    jitted(x + 1)
    assert len(compilations) == 1
    jitted(np.arange(8, dtype=np.float32))
    assert len(compilations) == 2
    jax.jit(lambda x: x * 5 + 1).lower(x).compile()
    assert len(compilations) == 3
    jnp.add(
        jnp.asarray(np.zeros((3, 5, 7, 11), np.float32)), 1
    )  # op by op: something must be compiled here, too
    assert len(compilations) > 3


def test_after_warm_up_200_random_requests_compile_nothing(checkpoints, compilations):
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "max_model_len": 64,
        "dtype": "float32",
    }
    save_tokenizer(checkpoints["with tokenizer"])
    llm = LLM(checkpoints["with tokenizer"], num_gpu_blocks_override=20, **limits)
    llm.wait_until_compiled()
    programs = engine_of(llm).programs
    num_steps, num_loops = len(programs.token_buckets), len(programs.row_buckets)
    assert programs.num_compiled == num_steps + num_loops + 2 == 6  # a draw, a copy of pages
    assert len(compilations) >= 6
    compilations.clear()
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    llm.generate({"prompt_token_ids": [3, 1, 4]}, scored, use_tqdm=False)
    assert len(compilations) == num_steps  # the first scored prompt compiles for all of them
    compilations.clear()
    rng = np.random.default_rng(0)
    outputs = []
    for count in (1, 60, 99, 1, 2, 30):
        prompts, params = zip(*(random_request(rng) for _ in range(count)), strict=True)
        outputs += llm.generate(prompts, list(params), use_tqdm=False)
    for width in (1, 2, 4):
        prompts = [
            {"prompt_token_ids": rng.integers(0, VOCAB, length).tolist()}
            for length in (3, 20, 31 - 4 * width)
        ]
        searched = llm.beam_search(prompts, BeamSearchParams(beam_width=width, max_tokens=9))
        assert [len(output.sequences) for output in searched] == [width] * 3
    for count in range(7):
        stream = llm.stream(*random_request(rng))
        outputs += [part for _, part in zip(range(count), stream, strict=False)][-1:]
        stream.close()  # most of them half way
    assert len(outputs) > 193
    assert sum(output.prompt_logprobs is not None for output in outputs) > 30
    assert {output.outputs[0].finish_reason for output in outputs[:193]} == {"stop", "length"}
    assert compilations == []
    assert programs.num_compiled == 6 + num_steps


@pytest.mark.parametrize(("max_num_seqs", "num_loops", "num_draws"), [(None, 4, 2), (256, 5, 2)])
def test_an_engine_with_default_limits_has_about_ten_programs(
    checkpoints, max_num_seqs, num_loops, num_draws
):
    llm = LLM(
        checkpoints["llama"], skip_tokenizer_init=True, max_num_seqs=max_num_seqs, lazy_compile=True
    )
    programs = engine_of(llm).programs
    assert programs.token_buckets[-1] == 2048
    assert programs.row_buckets[-1] == (max_num_seqs or 64)
    assert (len(programs.token_buckets), len(programs.row_buckets)) == (4, num_loops)
    # A draw of few rows and one of all, a copy of pages.
    assert programs.num_programs == 4 + num_draws + num_loops + 1


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 5, 15, 16, 17, 32, 33, 100, 256, 1000, 1024, 2047, 2048, 8192]
)
@pytest.mark.parametrize(("platform", "fewest"), [("cpu", 2), ("gpu", 8)])
def test_buckets_rise_to_the_limit_and_one_fits_every_size_without_much_waste(
    size, platform, fewest
):
    rows, tokens = row_buckets(size, platform), token_buckets(max(size, 16))
    for buckets, limit, factor in ((rows, max(size, 2), 4), (tokens, max(size, 16), 4)):
        assert list(buckets) == sorted(set(buckets))
        assert buckets[-1] == limit
        for wanted in range(1, limit + 1):
            bucket = fit_bucket(buckets, wanted)
            assert wanted <= bucket <= max(factor * (wanted + 1), buckets[0])
        with pytest.raises(ValueError, match=f"at most {limit}, got {limit + 1}"):
            fit_bucket(buckets, limit + 1)
    assert rows[0] >= min(fewest, max(size, 2))
    assert 16 <= tokens[0] < 64


@pytest.mark.parametrize(
    ("dtypes", "takes_cublas"),
    [(("bfloat16", "float32"), True), (("bfloat16", "int8"), False), (("uint8",), False)],
)
def test_programs_of_a_gpu_leave_matmuls_to_cublas_but_those_of_quantised_weights(
    dtypes, takes_cublas
):
    weights = {f"w{dtype}": jax.ShapeDtypeStruct((2, 4), dtype) for dtype in dtypes}
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    options = compiler_options(device, weights)
    assert (options is not None) == takes_cublas
    if options is not None:
        assert options["xla_gpu_enable_triton_gemm"] == "False"


@pytest.mark.parametrize(
    ("variant", "kv_dtype"),
    some(
        itertools.product(("llama", "qwen2-mixed-windows"), ("float32", "bfloat16")),
        ("llama", "bfloat16"),
    ),
)
def test_programs_update_the_pool_in_place_and_need_no_more_memory_for_a_larger_one(
    checkpoints, variant, kv_dtype
):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8, "max_model_len": 64}
    dtypes = {"dtype": "float32", "kv_cache_dtype": kv_dtype}
    llm = LLM(checkpoints[variant], skip_tokenizer_init=True, lazy_compile=True, **limits, **dtypes)
    page_nbytes, temporaries = budget_of(llm).page_nbytes, []
    for num_pages in PAGES:
        stores = tuple(
            replace(
                store,
                pages=jax.ShapeDtypeStruct(
                    (store.num_layers * num_pages, *store.pages.shape[1:]), store.pages.dtype
                ),
            )
            for store in engine_of(llm).kv.stores
        )
        kv, config = (
            replace(engine_of(llm).kv, stores=stores),
            replace(config_of(llm), num_pages=num_pages),
        )
        programs = Programs(
            model_of(llm).weights, kv, spec=model_of(llm).spec, config=config, backend="xla"
        )
        memory = [program.memory_analysis() for program in (programs.step(16), programs.loop(4))]
        temporaries.append([one.temp_size_in_bytes for one in memory])
        for one, told in zip(memory, programs.memory, strict=True):
            # Beside temporaries inputs and outputs, but neither weights nor pages.
            assert 0 < told.temp_bytes - one.temp_size_in_bytes < 64 * page_nbytes
            assert one.alias_size_in_bytes >= num_pages * page_nbytes
            assert one.output_size_in_bytes < (num_pages + 64) * page_nbytes
    small, large = np.array(temporaries)
    assert (small > 0).all()
    assert (np.abs(large - small) < page_nbytes).all(), temporaries


def test_a_pool_that_is_not_updated_in_place_is_seen_by_that_measure():
    """The same measure on a scatter whose argument is not donated, and on one that copies
    inside.
    """

    def write(pages: jax.Array, x: jax.Array) -> jax.Array:
        return pages.at[3].set(x)

    def copy(pages: jax.Array, x: jax.Array) -> jax.Array:
        return pages[::-1].at[3].set(x)

    pages, x = np.zeros((4096, 128), np.float32), np.zeros(128, np.float32)
    donated, undonated, copied = (
        jax.jit(f, donate_argnums=donate).lower(pages, x).compile().memory_analysis()
        for f, donate in ((write, 0), (write, ()), (copy, 0))
    )
    assert donated.alias_size_in_bytes >= pages.nbytes
    assert donated.temp_size_in_bytes < pages.nbytes
    assert undonated.alias_size_in_bytes < pages.nbytes
    assert copied.temp_size_in_bytes >= pages.nbytes


def test_a_donation_that_cannot_be_used_is_an_error():
    with pytest.raises(UserWarning, match="donated buffers were not usable"):
        jax.jit(lambda x: x.sum(), donate_argnums=0)(jnp.zeros(9))
