"""Caches in which some layers are in the model's own dtype and the rest is quantised."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from dense import Dense
from jaxkv import LLM, SamplingParams
from jaxkv.build.codecs import exact_layers
from jaxkv.kv.codecs import decode, get_codec
from jaxkv.models.families import read_config, read_family
from jaxkv.testing import engine_of
from jaxkv.weights.orbax import convert
from poison import poisoned
from tiny import make_checkpoint, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)
SMALL = {"hidden_size": 64, "head_dim": 32, "num_key_value_heads": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("mixed") / "model", tiny_config("qwen3", **SMALL)
    )


def make(directory: Path, **options: object) -> LLM:
    sizes = {"max_model_len": 160, "max_num_seqs": 4, "block_size": 8, "dtype": "float32"}
    return LLM(directory, skip_tokenizer_init=True, lazy_compile=True, **sizes | options)


def prompts(*lengths: int) -> list[dict]:
    rng = np.random.default_rng(12)
    return [{"prompt_token_ids": rng.integers(3, 150, n).tolist()} for n in lengths]


def prompt_logprobs(llm: LLM, prompt: dict) -> np.ndarray:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return np.array([next(iter(step.values())).logprob for step in output.prompt_logprobs[1:]])


@dataclass(frozen=True)
class Rounding(Dense):
    """Of which some layers are not rounded to fp8 (a codec for which keys are stored as they
    are).
    """

    exact: tuple[int, ...] = ()

    def stored(self, x: np.ndarray, layer: int) -> np.ndarray:
        codec = get_codec("fp8_e4m3", platform="cpu", dtype="float32")
        return x if layer in self.exact else np.asarray(decode(codec, codec.encode(x)), np.float64)

    def prompt_logprobs(self, ids: list[int]) -> np.ndarray:
        logits = self.logits(ids)[:-1]
        log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return np.take_along_axis(log, np.array(ids)[1:, None], axis=1)[:, 0]


@pytest.mark.parametrize(("asked", "exact"), [([1], (1,)), (["-1", 0], (0, 2))])
def test_only_the_other_layers_are_quantised(directory, asked, exact):
    (prompt,) = prompts(90)
    llm = make(
        directory, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=asked, max_num_batched_tokens=32
    )
    found = prompt_logprobs(llm, prompt)

    def apart(*layers: int) -> float:
        dense = Rounding(directory, (None,) * 3, "float64", exact=layers)
        return float(np.abs(dense.prompt_logprobs(prompt["prompt_token_ids"]) - found).max())

    others = [
        apart(*layers) for layers in ((), (0,), (1,), (2,), (0, 2), (0, 1, 2)) if layers != exact
    ]
    assert apart(*exact) < 1e-4
    assert min(others) > 1e-3
    of_layers = "1" if exact == (1,) else "0, 2"
    assert f"fp8_e4m3, layers {of_layers} in float32" in llm.describe()


@pytest.mark.slow
def test_hits_preemption_and_a_policy_change_no_bit(directory):
    asked, params = prompts(30, 31, 29), replace(GREEDY, max_tokens=40)
    options = {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": [0], "deterministic": True}
    roomy, tight = (
        make(directory, **options),
        make(directory, **options, num_gpu_blocks_override=20),
    )

    def generate(llm: LLM) -> list:
        with poisoned(engine_of(llm)):
            outputs = llm.generate(asked, params, use_tqdm=False)
        assert engine_of(llm).scheduler.allocator.num_used == 0
        return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]

    miss = generate(roomy)
    assert generate(roomy) == miss
    assert generate(tight) == miss
    assert engine_of(tight).scheduler.num_preemptions > 0
    options |= {"kv_policy": "streaming:int4", "kv_budget": 64}
    assert generate(bounded := make(directory, **options)) == generate(bounded)


def test_a_page_takes_what_its_layers_take(directory):
    options = {"kv_cache_dtype": "int8", "kv_cache_memory_bytes": 10**6}
    num_tokens = make(directory, **options, kv_cache_dtype_skip_layers=[2]).num_kv_tokens
    of_token = (
        2 * 2 * (2 * 34 + 1 * 32 * 4)
    )  # keys and values, heads; two layers of 34 bytes, one of 32 floats
    assert num_tokens == 10**6 // (8 * of_token) * 8


def test_a_converted_checkpoint_gives_the_same_tokens(directory, tmp_path):
    convert(directory, tmp_path / "converted", dtype="float32")
    asked = prompts(20)
    outputs = [
        make(path, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=[1]).generate(
            asked, GREEDY, use_tqdm=False
        )
        for path in (directory, tmp_path / "converted")
    ]
    (one,), (other,) = outputs
    assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_layers_by_number_from_the_end_and_by_window(tmp_path):
    directory = make_checkpoint(tmp_path, tiny_config("qwen2-mixed-windows"))
    spec, _ = read_family(read_config(directory))
    windowed = {layer for group in spec.groups if group.window for layer in group.layers}
    assert windowed
    assert exact_layers(spec, ["sliding_window"]) == windowed
    assert exact_layers(spec, [0, "1", -1]) == {0, 1, spec.num_layers - 1}
    apart = spec.apart(frozenset({0, 1}))
    assert sorted(layer for group in apart.groups for layer in group.layers) == list(
        range(spec.num_layers)
    )
    assert all(
        group.window == spec.groups[spec.group_of(i)[0]].window
        for group in apart.groups
        for i in group.layers
    )
    assert apart.joined() == spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_cache_dtype_skip_layers": [3]},
            "expected layers from -3 to 2 or 'sliding_window', got 3",
        ),
        ({"kv_cache_dtype_skip_layers": ["first"]}, "expected layers from .*, got 'first'"),
        ({"kv_cache_dtype_skip_layers": [True]}, "expected layers from .*, got True"),
        ({"kv_cache_dtype_skip_layers": 1}, "expected a list, got 1"),
        (
            {"kv_cache_dtype_skip_layers": [1], "kv_cache_dtype": "float32"},
            r"expected None with kv_cache_dtype float32, got \[1\]",
        ),
    ],
)
def test_what_names_no_layer_or_leaves_nothing_to_skip_is_refused(directory, options, message):
    with pytest.raises(ValueError, match=f"kv_cache_dtype_skip_layers: {message}"):
        make(directory, **{"kv_cache_dtype": "int8"} | options)
