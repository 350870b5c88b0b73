"""Which backend runs, and that the kernels' one gives what XLA's gives."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import families
from jaxkv import LLM, SamplingParams
from jaxkv.kv.codecs import PlainCodec, get_codec
from jaxkv.ops.attention import BACKENDS, Heads, Needs, choose_backend
from jaxkv.ops.attention.pallas_tpu import PallasTpu
from jaxkv.testing import engine_of
from tiny import VARIANTS, make_checkpoint, tiny_config

HEADS = Heads(num_heads=8, num_kv_heads=2, head_dim=128, window=None)
ODD = Heads(num_heads=8, num_kv_heads=2, head_dim=80, window=None)
NEEDS = Needs(
    page_size=64, num_rows=64, pages_per_row=128, codec=PlainCodec(dtype="bfloat16"), platform="tpu"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize(
    ("name", "platform", "heads", "page_size", "expected"),
    [
        ("auto", "cpu", HEADS, 16, ("xla", "chosen by auto on a cpu")),
        ("auto", "tpu", ODD, 64, ("pallas_tpu", "chosen by auto on a tpu")),
        (
            "auto",
            "tpu",
            HEADS,
            8,
            (
                "xla",
                (
                    "chosen by auto on a tpu: pallas_tpu: page_size: expected one of (16, 32, 64, "
                    "128), got 8"
                ),
            ),
        ),
        (
            "auto",
            "gpu",
            HEADS,
            64,
            ("mosaic_gpu", "chosen by auto on a gpu"),
        ),
        ("mosaic_gpu", "gpu", HEADS, 64, ("mosaic_gpu", "asked for by name")),
        ("xla", "tpu", HEADS, 64, ("xla", "asked for by name")),
        pytest.param(
            *("pallas_tpu", "tpu", HEADS, 64, ("pallas_tpu", "asked for by name")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_auto_takes_the_first_that_can_and_says_why_not_the_others(
    name, platform, heads, page_size, expected
):
    needs = replace(NEEDS, page_size=page_size, platform=platform, compute_capability="9.0")
    assert choose_backend(name, [HEADS, heads], [needs, needs]) == expected


@pytest.mark.parametrize(
    ("platform", "heads", "page_size", "message"),
    [
        ("gpu", HEADS, 64, "expected a TPU, got gpu"),
        ("tpu", HEADS, 8, "page_size: expected one of .16, 32, 64, 128., got 8"),
    ],
)
def test_a_named_backend_that_cannot_says_why(platform, heads, page_size, message):
    with pytest.raises(NotImplementedError, match=f"backend='pallas_tpu': {message}"):
        choose_backend(
            "pallas_tpu",
            [HEADS, heads],
            [replace(NEEDS, page_size=page_size, platform=platform)] * 2,
        )


LATENT = Heads(num_heads=16, num_kv_heads=1, head_dim=576, window=None, latent_dim=512)


ONE_HEAD = Heads(num_heads=4, num_kv_heads=1, head_dim=64, window=None)


@pytest.mark.parametrize(
    ("heads", "asked", "change", "reason"),
    [
        (
            LATENT,
            {},
            {"codec": get_codec("int8", platform="tpu")},
            "kv_cache_dtype: expected bfloat16",
        ),
        (ONE_HEAD, {"window": 100}, {}, "expected attention without a window, got 100"),
        (ONE_HEAD, {"has_sinks": True}, {}, "expected scores without sinks"),
        (
            ONE_HEAD,
            {"head_dim": 80},
            {"page_size": 64},
            "page_size: expected one of (16, 32, 64, 128), got 8",
        ),
    ],
)
def test_the_tpu_kernels_take_parts_of_pages_and_say_of_which_they_do_not(
    heads, asked, change, reason
):
    needs = replace(NEEDS, page_size=128, num_rows=300, token_parts=8)
    assert choose_backend("auto", [heads], [needs]) == ("pallas_tpu", "chosen by auto on a tpu")
    name, why = choose_backend("auto", [replace(heads, **asked)], [replace(needs, **change)])
    assert name == "xla"
    assert f"pallas_tpu: a part of pages on each device: {reason}" in why


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"compute_capability": "8.0"},
            "expected a GPU of compute capability 9.0 .H100, H200., got 8.0",
        ),
        ({"compute_capability": None}, "expected a GPU of compute capability 9.0 .*, got None"),
        ({"codec": PlainCodec(dtype="float32")}, "pages: expected bfloat16, got float32"),
        (
            {"codec": get_codec("fp8", platform="gpu")},
            "kv_cache_dtype: expected bfloat16, int8 or int4, got fp8_e4m3",
        ),
        (
            {"codec": get_codec("int4", platform="gpu", dtype="float32")},
            "kv_cache_dtype int4: expected a model in bfloat16, got float32",
        ),
        (
            {"codec": get_codec("int4", platform="gpu"), "page_size": 16},
            "page_size: expected one of .64, 128. for int4, got 16",
        ),
        (
            {"codec": get_codec("int8", platform="gpu", dtype="float32")},
            "kv_cache_dtype int8: expected a model in bfloat16, got float32",
        ),
        (
            {"codec": get_codec("int8", platform="gpu"), "page_size": 32},
            "page_size: expected one of .64, 128. for int8, got 32",
        ),
        ({"page_size": 8}, "page_size: expected one of .16, 32, 64, 128., got 8"),
    ],
)
def test_the_gpu_kernels_say_what_they_do_not_take(change, reason):
    needs = replace(NEEDS, platform="gpu", compute_capability="9.0")
    with pytest.raises(NotImplementedError, match=f"backend='mosaic_gpu': {reason}"):
        choose_backend("mosaic_gpu", [HEADS], [replace(needs, **change)])


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_gpu_kernels_take_quantised_pages(codec):
    needs = replace(
        NEEDS, platform="gpu", compute_capability="9.0", codec=get_codec(codec, platform="gpu")
    )
    for head_dim in (64, 128, 256):
        heads = Heads(num_heads=8, num_kv_heads=2, head_dim=head_dim, window=None)
        assert choose_backend("mosaic_gpu", [heads], [needs])[0] == "mosaic_gpu"


def test_the_gpu_kernels_refuse_heads_that_leave_no_shared_memory():
    needs = replace(NEEDS, platform="gpu", compute_capability="9.0")
    for per_head, head_dim in ((64, 64), (64, 128), (32, 256)):
        heads = Heads(num_heads=2 * per_head, num_kv_heads=2, head_dim=head_dim, window=None)
        assert choose_backend("mosaic_gpu", [heads], [needs])[0] == "mosaic_gpu"
    for heads, reason in (
        (
            Heads(num_heads=128, num_kv_heads=2, head_dim=256, window=None),
            "64 query heads of 256 per KV head leave no",
        ),
        (replace(ODD, head_dim=320), "head_dim: expected one of .64, 128, 256., got 320"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            choose_backend("mosaic_gpu", [heads], [needs])


@pytest.mark.parametrize("name", ["pallas_tpu", "mosaic_gpu"])
def test_the_kernels_refuse_attention_within_chunks(name):
    needs = replace(NEEDS, platform=name[-3:], compute_capability="9.0")
    heads = replace(HEADS, window=64, chunk=64)
    with pytest.raises(NotImplementedError, match="attention within chunks runs on xla"):
        choose_backend(name, [heads], [needs])
    assert choose_backend("auto", [heads], [needs])[0] == "xla"


def test_what_deterministic_asks_for_has_no_name_of_its_own():
    """Also with `deterministic=True`, which takes it."""
    needs = replace(NEEDS, platform="cpu")
    for deterministic in (False, True):
        with pytest.raises(
            ValueError,
            match=r"backend: expected 'auto' or one of \['mosaic_gpu', 'pallas_tpu', 'xla'\], got "
            "'xla_deterministic'",
        ):
            choose_backend("xla_deterministic", [HEADS], [needs], deterministic=deterministic)
    chosen = choose_backend("auto", [HEADS], [needs], deterministic=True)
    assert chosen == ("xla_deterministic", "deterministic=True")


def test_only_a_row_too_long_for_scalar_memory_runs_on_xla():
    needs = replace(NEEDS, num_rows=256, pages_per_row=2048)
    assert choose_backend("auto", [HEADS], [needs])[0] == "pallas_tpu"
    backend, reason = choose_backend(
        "auto", [HEADS], [replace(needs, num_rows=2, pages_per_row=100_000)]
    )
    assert backend == "xla"
    assert re.fullmatch(
        r"chosen by auto on a tpu: pallas_tpu: rows of 100000 pages take \d+ bytes of scalar "
        r"memory, "
        r"expected at most 786432",
        reason,
    )


def test_rows_too_many_for_vector_memory_and_pages_of_another_dtype_run_on_xla():
    bits = PlainCodec(dtype="bfloat16", as_bits=True)
    int4, fp8 = (get_codec(name, platform="tpu") for name in ("int4", "fp8"))
    of_floats = get_codec("int8", platform="tpu", dtype="float32")
    for needs, reason in (
        (replace(NEEDS, num_rows=4096, pages_per_row=2), "4096 decode rows: \\d+ bytes do not fit"),
        (replace(NEEDS, codec=bits), "pages: expected bfloat16 or float32, got uint16"),
        (
            replace(NEEDS, codec=int4, page_size=32),
            "page_size: expected one of \\(64, 128\\), got 32",
        ),
        (
            replace(NEEDS, codec=fp8),
            "kv_cache_dtype: expected bfloat16, float32, int8 or int4, got fp8_e4m3",
        ),
        (
            replace(NEEDS, codec=of_floats),
            "kv_cache_dtype int8: expected a model in bfloat16, got float32",
        ),
    ):
        backend, why = choose_backend("auto", [HEADS], [needs])
        assert backend == "xla"
        assert re.match(f"chosen by auto on a tpu: pallas_tpu: {reason}", why)


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_pages_of_padded_heads_are_counted_as_they_are(codec):
    stored = get_codec(codec, platform="tpu")
    for backend, head_dim, padded in (
        ("pallas_tpu", 80, 128),
        ("pallas_tpu", 192, 256),
        ("mosaic_gpu", 96, 128),
        ("mosaic_gpu", 192, 256),
    ):
        own, larger = (
            BACKENDS[backend].page_layout(replace(HEADS, head_dim=size), 64, stored)
            for size in (head_dim, padded)
        )
        assert own == larger
        assert own.nbytes > 2 * HEADS.num_kv_heads * 64 * head_dim


def shape(num_heads: int, num_kv_heads: int, head_dim: int) -> dict:
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }


@pytest.mark.usefixtures("quick_compile", "small_tiles")  # what is compiled is the interpreter
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        # Two heads side by side; sinks, windows in some layers, a scale of its own.
        ("granite_swa", shape(4, 2, 64) | {"hidden_size": 256}),
        pytest.param(  # padded in the pages
            "llama", shape(2, 1, 80) | {"hidden_size": 64}, marks=pytest.mark.slow
        ),
        pytest.param("gemma2", shape(4, 2, 64), marks=pytest.mark.slow),  # capped scores
        pytest.param("llama", shape(4, 2, 64), marks=pytest.mark.slow),
        pytest.param(
            "qwen3", shape(3, 1, 64), marks=pytest.mark.slow
        ),  # key and value side by side
        pytest.param("mistral-window", shape(4, 2, 128), marks=pytest.mark.slow),
        pytest.param("qwen3-layer-types", shape(4, 2, 64), marks=pytest.mark.slow),
    ],
)
def test_an_engine_on_the_tpu_kernels_gives_the_tokens_of_xla(
    monkeypatch, tmp_path, variant, changes
):
    """Chunks, mixed steps, decode loops and cached prefixes, in the kernels' plain interpreter."""
    monkeypatch.setitem(BACKENDS, "interpreted", PallasTpu(interpret=True))
    config = tiny_config(variant) if variant in VARIANTS else families.text_config(variant)
    path = make_checkpoint(tmp_path / "model", config | changes)
    limits = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "block_size": 16,
    }
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(0, 151, n).tolist()} for n in (3, 40, 17)]
    found = []
    for backend in ("xla", "interpreted"):
        llm = LLM(
            path,
            backend=backend,
            dtype="float32",
            skip_tokenizer_init=True,
            lazy_compile=True,
            **limits,
        )
        outputs = [
            output for _ in range(2) for output in llm.generate(prompts, GREEDY, use_tqdm=False)
        ]
        assert any(output.num_cached_tokens for output in outputs[3:])
        engine_of(llm).check()
        found.append([output.outputs[0] for output in outputs])
    xla, kernels = found
    assert [one.token_ids for one in kernels] == [one.token_ids for one in xla]
    logprobs = [
        [[one.logprob for entry in out.logprobs for one in entry.values()] for out in side]
        for side in found
    ]
    np.testing.assert_allclose(logprobs[1], logprobs[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("codec", "heads", "page_size"),
    [
        ("int8", shape(4, 2, 64), 32),
        ("int4", shape(4, 2, 64), 64),
        ("int4", shape(3, 1, 128), 64),
        ("int8", shape(3, 1, 64), 128),
    ],
)
@pytest.mark.slow
def test_an_engine_on_the_tpu_kernels_reads_and_writes_quantised_pages(
    monkeypatch, tmp_path, codec, heads, page_size
):
    """Prompts in chunks, decode loops and a cached prefix give the logprobs of XLA on the same
    codec, but for rounding; both are further from those of unquantised pages than from each
    other.
    """
    monkeypatch.setitem(BACKENDS, "interpreted", PallasTpu(interpret=True))
    path = make_checkpoint(tmp_path / "model", tiny_config("llama", **heads))
    limits = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 256,
        "block_size": page_size,
    }
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 151, page_size).tolist()
    prompts = [{"prompt_token_ids": shared + rng.integers(0, 151, n).tolist()} for n in (3, 21)]
    # One token to choose from: what each is given after its prompt does not depend on rounding.
    forced = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, allowed_token_ids=[7]
    )
    found = []
    for backend, kind in (("xla", codec), ("interpreted", codec), ("xla", "auto")):
        options = {"backend": backend, "kv_cache_dtype": kind, "dtype": "bfloat16"}
        llm = LLM(path, skip_tokenizer_init=True, lazy_compile=True, **options, **limits)
        outputs = [llm.generate(prompt, forced, use_tqdm=False)[0] for prompt in prompts]
        assert outputs[1].num_cached_tokens == page_size
        outputs += llm.generate(prompts, replace(forced, prompt_logprobs=0), use_tqdm=False)
        engine_of(llm).check()
        lists = [
            [*(out.prompt_logprobs or [None])[1:], *out.outputs[0].logprobs] for out in outputs
        ]
        entries = [entry for entries in lists for entry in entries]
        found.append(np.array([one.logprob for entry in entries for one in entry.values()]))
        assert (engine_of(llm).kv.stores[0].scales is not None) == (backend == "interpreted")
    xla, kernels, exact = found
    assert len(xla) == len(kernels)
    assert np.std(xla[-6:]) > 0
    apart, lost = (np.sqrt(np.mean((xla - other) ** 2)) for other in (kernels, exact))
    assert 0 < apart < lost / 3
