"""On a CPU programs get each layer's bfloat16 matrices as arrays of their own, which lie in the
stacks: the same bits as from the stacks, no copy, and nothing left of weights that have gone.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adapters import make_adapter
from families import text_config
from jaxkv import LLM, LoRARequest, SamplingParams
from jaxkv.config import bfloat16_as_bits
from jaxkv.ops import layers
from jaxkv.ops.layers import linear
from jaxkv.ops.matrices import Matrix, PerLayer
from jaxkv.programs.compiled import Programs
from jaxkv.programs.executables import ProgramFiles
from jaxkv.programs.layer_arrays import LayerArrays, abstract_layers
from jaxkv.testing import engine_of
from jaxkv.weights import tree
from tiers import some
from tiny import SMALL, make_checkpoint, tiny_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 151, length).tolist() for length in (40, 9, 21)]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
"""Rows of all matrices begin where arrays may."""

OPTIONS = SMALL | {"dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch) -> None:
    monkeypatch.setattr(tree, "LEAST_BYTES", 1)


def answers(llm: LLM, **options: object) -> list[list[list[tuple[int, float]]]]:
    """The tokens with their log-probabilities and the likeliest ones."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, **options)
    return [
        [
            [(token, one.logprob) for token, one in entry.items()]
            for entry in output.outputs[0].logprobs
        ]
        for output in outputs
    ]


def arrays_of(llm: LLM) -> list[jax.Array]:
    """The arrays of single layers that the engine's programs get."""
    engine = engine_of(llm)
    leaves = jax.tree.leaves(
        engine.programs.given(engine.weights, 2), is_leaf=lambda x: isinstance(x, PerLayer)
    )
    return jax.tree.leaves([leaf for leaf in leaves if isinstance(leaf, PerLayer)])


def put(shape: tuple[int, ...], dtype: type) -> jax.Array:
    host = np.arange(np.prod(shape)).reshape(shape) % 100
    return jax.device_put(host.astype(dtype), jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def test_layers_lie_in_their_stacks(monkeypatch):
    monkeypatch.setattr(tree, "LEAST_BYTES", 1024)
    monkeypatch.setattr(layers, "PIECE_BYTES", 500)
    bits = [jnp.uint16] if bfloat16_as_bits("cpu") else []
    for dtype in (jnp.bfloat16, *bits):
        q = put((3, 16, 32), dtype)
        others = {
            "norm": put((3, 32), dtype),
            "heads": put((3, 2, 16, 32), dtype),
            "expert_up": put((3, 16, 32), dtype),
            "adapter_up_q": put((3, 16, 32), dtype),
            "k_scales": put((3, 16, 32), dtype),
            "float32": put((3, 16, 32), jnp.float32),
            "begins_anywhere": put((3, 64, 40), dtype),
            "small": put((3, 2, 32), dtype),
        }
        weights = {"embed": put((8, 32), dtype), "layers": {"q": q, **others}}
        weights["draft"] = {"layers_1": {"q": q}}
        made = LayerArrays()
        given = made.of(weights)
        is_same = jax.tree.map(
            lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype),
            given,
            abstract_layers(
                jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
            ),
        )
        assert all(jax.tree.leaves(is_same))
        assert all(given["layers"][name] is leaf for name, leaf in others.items())
        assert given["embed"] is weights["embed"]
        own = given["layers"]["q"]
        assert given["draft"]["layers_1"]["q"] is own
        assert made.of(weights)["layers"]["q"] is own
        values = np.asarray(q).view(jnp.bfloat16)
        for layer, pieces in enumerate(own.pieces):
            assert [piece.shape[0] for piece in pieces] == [6, 6, 4]
            for start, piece in zip((0, 6, 12), pieces, strict=True):
                at = q.unsafe_buffer_pointer() + (layer * 16 + start) * 32 * 2
                assert piece.unsafe_buffer_pointer() == at
                assert np.array_equal(piece, values[layer, start : start + piece.shape[0]])
        other = put((3, 16, 32), dtype)
        changed = made.of(weights | {"layers": {"q": other}})["layers"]["q"]
        assert changed.pieces[0][0].unsafe_buffer_pointer() == other.unsafe_buffer_pointer()


def test_matmuls_give_the_bits_that_they_give_of_a_stack():
    """In pieces of which the last is shorter."""
    w = RNG.standard_normal((2, 2051, 768)).astype(jnp.bfloat16)
    stack = jax.device_put(w.view(np.uint16) if bfloat16_as_bits("cpu") else w)
    given = LayerArrays().of({"layers": {"q": stack}})["layers"]["q"]
    assert len(given.pieces[0]) == 2
    run = jax.jit(lambda x, leaf, layer: linear(x, Matrix(leaf, layer)))
    for num_tokens in (2, 33):
        x = RNG.standard_normal((num_tokens, 768)).astype(np.float32)
        for layer in (0, 1):
            assert np.array_equal(run(x, given, layer), run(x, stack, layer))


@pytest.mark.parametrize("case", some(["lora", "draft", "qwen3_next", "mixtral"], "lora"))
def test_tokens_and_logprobs_are_those_of_stacked_matrices(
    case, tmp_path, monkeypatch, quick_compile
):
    config = text_config(case) if case not in ("lora", "draft") else tiny_config("llama")
    path, options, asked = make_checkpoint(tmp_path / "model", config | SIZES), {}, {}
    if case == "lora":
        adapter = make_adapter(tmp_path / "adapter", path, seed=1, rank=4)
        options = {"enable_lora": True, "max_lora_rank": 8}
        asked = {"lora_request": [LoRARequest("one", 1, adapter), None, None]}
    if case == "draft":
        draft = make_checkpoint(tmp_path / "draft", config | SIZES, seed=1)
        options = {"speculative_config": {"model": draft, "num_speculative_tokens": 2}}
    llm = LLM(path, **OPTIONS, **options)
    assert arrays_of(llm)
    found = answers(llm, **asked)
    with monkeypatch.context() as patch:
        patch.setattr(Programs, "_takes_layers", lambda self, num_tokens: False)
        stacked = LLM(path, **OPTIONS, **options)
        assert not arrays_of(stacked)
        assert answers(stacked, **asked) == found


def test_they_are_those_of_the_weights_that_there_are(tmp_path, quick_compile):
    old, new = (
        make_checkpoint(tmp_path / str(seed), tiny_config("llama", **SIZES), seed=seed)
        for seed in (0, 1)
    )
    llm, other = LLM(old, **OPTIONS), LLM(new, **OPTIONS)
    engine_of(other).programs.executables = engine_of(llm).programs.executables
    before, after = answers(llm), answers(other)
    assert before != after

    def gone() -> list[weakref.ref]:
        return [weakref.ref(array) for array in arrays_of(llm)]

    def are_gone(arrays: list[weakref.ref]) -> bool:
        gc.collect()
        return len(arrays) > 0 and all(array() is None for array in arrays)

    held = gone()
    llm.update_weights(new)
    assert are_gone(held)
    assert answers(llm) == after
    held = gone()
    llm.sleep()
    assert are_gone(held)
    llm.wake_up()
    assert answers(llm) == after
    held = gone()
    llm.sleep(level=2)
    assert are_gone(held)
    llm.update_weights(old)
    llm.wake_up()
    assert answers(llm) == before
    held = gone()
    llm.shutdown()
    assert are_gone(held)
    other.shutdown()


def test_a_program_with_them_is_found_in_files(tmp_path: Path):
    files = ProgramFiles(tmp_path, tuple(jax.devices()[:1]))
    weights = LayerArrays().of({"layers": {"q": put((3, 16, 32), jnp.bfloat16)}})
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), weights
    )

    def take() -> tuple[jax.stages.Compiled, bool]:
        jitted = jax.jit(lambda weights: weights["layers"]["q"].pieces[2][0] + 1)
        return files.take(lambda: jitted.lower(shapes).compile(), (shapes,), name="one")

    (first, _), (second, is_loaded) = take(), take()
    assert is_loaded
    assert np.array_equal(first(weights), second(weights))
