"""Caches in which some layers are in the model's own dtype and the rest is quantised."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from cases import held
from dense import Dense
from jaxkv import LLM, SamplingParams
from jaxkv.build.codecs import exact_layers
from jaxkv.holding.allocator import KVHandle
from jaxkv.kv.codecs.scaled import LARGEST
from jaxkv.models.families import read_config, read_family
from jaxkv.testing import engine_of, model_of
from jaxkv.weights.orbax import convert
from poison import poisoned
from tiers import some
from tiny import make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")

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


STEP = 2.0**-3
"""Of fp8_e4m3 between 1 and 2."""


def held_by_layer(llm: LLM, pages: tuple[int, ...], length: int) -> list[np.ndarray]:
    """What the pages give back of a sequence's keys and values in each layer: [2, K, T, H]."""
    kv, spec = engine_of(llm).kv, model_of(llm).spec
    found = [held(store, KVHandle(pages, length)).swapaxes(2, 3) for store in kv.stores]
    return [found[g][:, index] for g, index in map(spec.group_of, range(spec.num_layers))]


@dataclass(frozen=True)
class Remembering(Dense):
    """Attends to keys and values that somebody else has stored, and notes what it would store."""

    held: list[np.ndarray] = field(default_factory=list)
    own: list[np.ndarray] = field(default_factory=list)

    def stored(self, x: np.ndarray, layer: int) -> np.ndarray:
        is_value = len(self.own) % 2
        self.own.append(x)
        return self.held[layer][is_value]

    def prompt_logprobs(self, ids: list[int]) -> np.ndarray:
        logits = self.logits(ids)[:-1]
        log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return np.take_along_axis(log, np.array(ids)[1:, None], axis=1)[:, 0]


def in_steps(apart: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Distances from x in steps of fp8_e4m3, which are wider where x is larger."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / LARGEST["fp8_e4m3"]
    power = np.floor(np.log2(np.maximum(np.abs(x) / scale, 2.0**-6)))  # the least normal number
    return apart / (scale * 2.0**power * STEP)


@pytest.mark.parametrize(
    ("asked", "exact"), some([([1], (1,)), (["-1", 0], (0, 2))], (["-1", 0], (0, 2)))
)
def test_only_the_other_layers_are_quantised(directory, asked, exact):
    """Each layer stores what it should, to the codec's step, and attention reads just that.

    A value beside a rounding boundary may be stored as either neighbour, so what is stored is
    compared in steps, and what is computed from it with a reference that reads the same pages.
    """
    (prompt,) = prompts(90)
    ids = prompt["prompt_token_ids"]
    options = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": asked}
    llm = make(directory, **options, max_num_batched_tokens=32)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    stream = llm.stream(prompt, params)
    steps = next(stream).prompt_logprobs[1:]
    (pages,) = llm.page_table().values()
    dense = Remembering(directory, (None,) * 3, "float64", held=held_by_layer(llm, pages, len(ids)))
    stream.close()

    got = [next(iter(step.values())).logprob for step in steps]
    np.testing.assert_allclose(got, dense.prompt_logprobs(ids), rtol=0, atol=1e-4)
    for layer, stored in enumerate(dense.held):
        x = np.stack(dense.own[2 * layer : 2 * layer + 2])
        noise = 1e-5 * np.abs(x).max(axis=-1, keepdims=True)  # float32's, from the layers before
        apart = np.abs(stored - x)
        assert layer not in exact or (apart <= noise).all()
        if layer not in exact:
            # The scale is rounded too: to 8 bits, so by at most a sixteenth of a step.
            assert in_steps(apart - noise, x).max() < 0.5 + 1 / 16
            assert np.median(in_steps(apart, x)) > 0.1
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


@pytest.mark.slow
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
