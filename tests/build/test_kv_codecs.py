"""Engines whose pages are quantised: what they store, and that caching, sharing and preemption
change no bit of it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import families
from jaxkv import LLM, BeamSearchParams, SamplingParams
from jaxkv.build.codecs import group_codecs
from jaxkv.build.model import CALIBRATION, DEMO, FIT_TOKENS, calibration_tokens
from jaxkv.build.tokenizer import load_tokenizer
from jaxkv.errors import CheckpointError
from jaxkv.kv.codecs import CODECS, PlainCodec
from jaxkv.models.families import ConfigReader, read_config, read_family
from jaxkv.programs.fit_keys import fit_keys
from jaxkv.testing import blueprint_of, engine_of, intake_of, model_of
from poison import poisoned
from tiers import some
from tiny import make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
QUANTISED = some((name for name in CODECS if name not in ("bfloat16", "float32")), "int4")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    config = tiny_config(
        "qwen3", hidden_size=64, head_dim=32, num_key_value_heads=2, num_attention_heads=4
    )
    return make_checkpoint(tmp_path_factory.mktemp("codecs") / "model", config)


def make(directory: Path, codec: str, **options: object) -> LLM:
    options = {
        "max_model_len": 160,
        "max_num_seqs": 4,
        "block_size": 8,
        "deterministic": True,
    } | options
    return LLM(
        directory,
        kv_cache_dtype=codec,
        dtype="float32",
        skip_tokenizer_init=True,
        lazy_compile=True,
        **options,
    )


def test_a_size_of_heads_that_a_codec_does_not_have_is_the_model_s_own():
    spec, _ = read_family(ConfigReader(families.text_config("doge"), "config.json"))
    message = r"turboquant4 expects .* multiple of 8, got 10, since .* doge's heads than their 8 "
    with pytest.raises(ValueError, match=message):
        group_codecs(spec, "turboquant4", None, platform="cpu", dtype="float32")


def prompts(*lengths: int) -> list[dict]:
    rng = np.random.default_rng(11)
    return [{"prompt_token_ids": rng.integers(3, 150, n).tolist()} for n in lengths]


def generate(llm: LLM, asked: list[dict], params: SamplingParams = GREEDY) -> list:
    """Tokens and the bits of their logprobs, with NaN in all memory that nobody owns."""
    with poisoned(engine_of(llm)):
        outputs = llm.generate(asked, params, use_tqdm=False)
    assert engine_of(llm).scheduler.allocator.num_used == 0

    def bits(step: dict) -> dict[int, float]:
        return {token: one.logprob for token, one in step.items()}

    return [
        [(one.token_ids, [bits(step) for step in one.logprobs or []]) for one in out.outputs]
        for out in outputs
    ]


def metrics(llm: LLM) -> dict[str, float]:
    return {
        metric.name: metric.value for metric in engine_of(llm).metrics() if hasattr(metric, "value")
    }


def stored(llm: LLM, prompt: dict, chunk: int, number: int = 0) -> np.ndarray:
    """What the pages of a store hold of a prompt that is computed in such chunks: [L, tokens, 2K, X]."""
    engine, length = engine_of(llm), len(prompt["prompt_token_ids"])
    object.__setattr__(
        engine.scheduler.config, "max_num_batched_tokens", chunk
    )  # fewer than an engine is made for
    (submission,) = intake_of(llm).accept([prompt], [replace(GREEDY, max_tokens=40)])
    (request,) = submission.samples
    engine.add(submission)
    while request.hold.num_stored < length:
        engine.step()
    store = engine.kv.stores[number]
    pages = np.asarray(jax.device_get(store.pages)).reshape(
        store.num_layers, store.num_pages, *store.pages.shape[1:]
    )
    held = pages[:, list(request.hold.handle().pages)].swapaxes(2, 3)
    engine.abort(submission)
    return held.reshape(store.num_layers, -1, *held.shape[3:])[:, :length]


@pytest.mark.slow
@pytest.mark.usefixtures("as_users")
@pytest.mark.parametrize("codec", QUANTISED)
def test_chunks_change_no_byte_of_what_is_stored(directory, codec):
    (prompt,) = prompts(75)
    found = [
        stored(make(directory, codec, enable_prefix_caching=False), prompt, chunk)
        for chunk in (1, 7, 64, 128)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    assert len(np.unique(found[0])) > 8


@pytest.mark.slow
@pytest.mark.usefixtures("as_users")
@pytest.mark.parametrize("codec", QUANTISED)
def test_a_hit_is_a_miss_and_samples_and_neighbours_change_nothing(directory, codec):
    asked = prompts(40, 9, 33, 64)
    llm = make(directory, codec)
    miss = generate(llm, asked)
    assert generate(llm, asked) == miss
    assert metrics(llm)["prefix_cache_hits"] > 0
    alone = make(directory, codec, enable_prefix_caching=False)
    assert [generate(alone, [one])[0] for one in asked] == miss
    drawn = SamplingParams(temperature=1.0, max_tokens=6, n=3, seed=5, ignore_eos=True, logprobs=1)
    assert generate(llm, asked[:1], drawn) == generate(alone, asked[:1], drawn)


@pytest.mark.slow
@pytest.mark.usefixtures("as_users")
@pytest.mark.parametrize("codec", QUANTISED)
def test_preemption_and_beams_change_nothing(directory, codec):
    asked, long = prompts(30, 31, 29), replace(GREEDY, max_tokens=40)
    roomy, tight = make(directory, codec), make(directory, codec, num_gpu_blocks_override=20)
    assert generate(tight, asked, long) == generate(roomy, asked, long)
    assert engine_of(tight).scheduler.num_preemptions > 0
    beams = [
        [
            (sequence.tokens, sequence.cum_logprob)
            for output in llm.beam_search(asked[:2], BeamSearchParams(beam_width=3, max_tokens=10))
            for sequence in output.sequences
        ]
        for llm in (
            roomy,
            make(directory, codec, max_num_batched_tokens=16, enable_prefix_caching=False),
        )
    ]
    assert beams[0] == beams[1]


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_what_is_generated_is_near_what_unquantised_pages_give(directory, codec):
    """And not equal: the codec is on."""
    (prompt,) = prompts(100)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    nll = {}
    for name in ("float32", codec):
        (output,) = make(directory, name).generate([prompt], params, use_tqdm=False)
        of_tokens = [next(iter(step.values())).logprob for step in output.prompt_logprobs[1:]]
        nll[name] = np.array(of_tokens)
    apart = np.abs(nll[codec] - nll["float32"]).mean()
    assert 0 < apart < {"int8": 0.05, "int4": 0.5}[codec]


def test_the_pool_and_its_metric_count_the_bytes(directory):
    plain, small = make(directory, "bfloat16"), make(directory, "int8")
    options = {"kv_cache_memory_bytes": 10**6}
    tokens = [make(directory, name, **options).num_kv_tokens for name in ("bfloat16", "int8")]
    assert tokens[1] / tokens[0] == pytest.approx(
        64 / 34, rel=0.02
    )  # head_dim 32: 2 bytes each, 1 byte each and 2
    for llm, per_value in ((plain, 2.0), (small, 34 / 32)):
        generate(llm, prompts(33, 64), replace(GREEDY, logprobs=None))
        seen = metrics(llm)
        whole = 3 * 2 * 2 * 32 * per_value  # layers, keys and values, heads, head_dim
        assert seen["kv_cache_bytes_per_token"] == pytest.approx(
            whole / seen["kv_cache_utilization"]
        )
    assert "int8" in small.describe()


def test_a_codec_that_a_backend_cannot_do_is_refused_before_any_work(directory, tmp_path):
    """Weights are not even looked for."""
    shutil.copy(directory / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="safetensors"):
        make(tmp_path, "int8")
    with pytest.raises(ValueError, match=r"kv_cache_dtype: expected auto or one of .*, got 'int2'"):
        make(tmp_path, "int2")
    with pytest.raises(NotImplementedError, match="backend='pallas_tpu': expected a TPU, got cpu"):
        LLM(tmp_path, kv_cache_dtype="int8", backend="pallas_tpu", skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="kv_cache_dtype_skip_layers: expected layers"):
        make(tmp_path, "int8", kv_cache_dtype_skip_layers=[7])
    with pytest.raises(NotImplementedError, match="without a rotation, got int4"):
        make(tmp_path, "int4", kv_policy="entropy", kv_budget=64)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3", "qwen2-mixed-windows", "diffllama"])
def test_fitted_keys_give_the_same_model(tmp_path, variant, monkeypatch):
    is_pair = variant == "diffllama"  # two keys side by side
    config = families.text_config(variant) if is_pair else tiny_config(variant)
    directory = make_checkpoint(tmp_path, config)
    (prompt,), params = (
        prompts(90),
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0),
    )
    plain = make(directory, "float32")
    monkeypatch.setattr(PlainCodec, "fits_keys", True)
    fitted = make(directory, "float32")
    (want,), (got,) = (generate(llm, [prompt], params)[0] for llm in (plain, fitted))
    assert got[0] == want[0]
    apart = [abs(x[t] - y[t]) for x, y, t in zip(got[1], want[1], want[0], strict=True)]
    assert 0 < max(apart) < 1e-4


@pytest.mark.parametrize("variant", some(("qwen3", "qwen2-mixed-windows"), "qwen3"))
def test_keys_are_fitted_to_those_that_are_stored_and_to_their_queries(tmp_path, variant):
    (prompt,) = prompts(64)
    llm = make(make_checkpoint(tmp_path, tiny_config(variant)), "float32")
    spec, token_T = model_of(llm).spec, np.array(prompt["prompt_token_ids"])
    placement = blueprint_of(llm).placement
    affine = fit_keys(model_of(llm).weights, token_T, spec=spec, placement=placement)
    heads = (spec.num_layers, -1, 2, spec.head_dim)
    # One store and one table: the layers of a group come behind those of the one before.
    layers = [layer for group in spec.groups for layer in group.layers]
    keys = stored(llm, prompt, 128)[:, :, : spec.groups[0].num_kv_heads]
    mean = affine.reshape(heads)[layers][:, :, 0]
    np.testing.assert_allclose(mean, keys.mean(axis=1), atol=1e-5)


def test_channels_that_differ_in_keys_and_queries_are_brought_together(tmp_path):
    """The same model with a channel of keys 64 times as large, and 1/64 of it in queries, is fitted
    by just that.
    """
    path = make_checkpoint(tmp_path, tiny_config("qwen2"))
    model, token_T = model_of(make(path, "float32")), np.arange(48)
    head_dim, heads, layers = (
        model.spec.head_dim,
        model.spec.groups[0].num_kv_heads,
        model.weights["layers"],
    )
    scale = np.ones((heads, head_dim), np.float32)
    scale[0, [3, 3 + head_dim // 2]] = 64.0  # a rotary pair
    of_queries = 1 / scale.repeat(model.spec.num_heads // heads, axis=0)
    larger = {}
    for name, by in (("k", scale), ("q", of_queries)):
        larger[name] = layers[name].at[0].multiply(by.reshape(-1, 1))
        larger[f"{name}_bias"] = layers[f"{name}_bias"].at[0].multiply(by.reshape(-1))
    other = dict(model.weights) | {"layers": layers | larger}

    def factors(weights):
        found = fit_keys(weights, token_T, spec=model.spec, placement=None)[0]
        return found.reshape(heads, 2, head_dim)[:, 1]

    # All factors of a head are relative to each other.
    apart = factors(other) / factors(model.weights) * scale
    np.testing.assert_allclose(apart[0], apart[0, 0], rtol=1e-4)
    np.testing.assert_allclose(factors(other)[1:], factors(model.weights)[1:], rtol=1e-4)


def test_keys_are_fitted_to_text_as_far_as_a_tokenizer_reads_it():
    spec, _ = read_family(read_config(DEMO))
    tokenizer = load_tokenizer(DEMO)
    token_T = calibration_tokens(spec, tokenizer)
    assert 900 < len(token_T) <= FIT_TOKENS
    assert tokenizer.decode(token_T, skip_special_tokens=True) == CALIBRATION.read_text(
        encoding="utf-8"
    )
    np.testing.assert_array_equal(
        calibration_tokens(replace(spec, max_len=64), tokenizer), token_T[:64]
    )
    small = calibration_tokens(
        replace(spec, vocab_size=100), tokenizer
    )  # ids that the model has not
    assert small.max() == 99
    drawn = calibration_tokens(spec, None)
    assert len(drawn) == FIT_TOKENS
    assert 500 < len(np.unique(drawn)) <= len(drawn[(drawn >= 0) & (drawn < spec.vocab_size)])


@pytest.mark.parametrize(
    "options", [{"kv_cache_dtype": "int8"}, {"kv_policy": "entropy", "kv_budget": 64}]
)
def test_keys_that_hold_their_position_are_not_quantised(tmp_path, options):
    sizes = {"vocab_size": 151, "hidden_size": 48, "n_layer": 2, "n_head": 6}
    make_checkpoint(tmp_path, {"model_type": "bloom", **sizes})
    with pytest.raises(NotImplementedError, match="bloom: expected pages in bfloat16 or float32"):
        LLM(tmp_path, skip_tokenizer_init=True, **options)
