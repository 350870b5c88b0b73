"""One checkpoint in transformers (float32, eager attention) and here: equal logits at every
position, equal tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import LLM, SamplingParams
from jaxkv.kv.state import PageTables
from jaxkv.models import decoder
from jaxkv.models.families import read_config, read_family
from jaxkv.programs.inputs import empty_batch
from jaxkv.testing import config_of, engine_of, model_of
from jaxkv.weights.load import load_weights
from poison import poison_kv, poisoned
from tiny import VARIANTS, make_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compile")

PROMPT_LENS = (1, 5, 23, 41)
NUM_NEW = 16
TOLERANCE = 1e-4
"""Of the logits' standard deviation. Both sides compute in float32 and add in another order."""


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    before = torch.is_grad_enabled(), torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)  # these models are too small for two, which would wait for each other
    yield torch
    torch.set_grad_enabled(before[0])
    torch.set_float32_matmul_precision(before[1])
    torch.set_num_threads(before[2])


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(0, 151, length).tolist() for length in PROMPT_LENS]


def reference_model(torch: Any, directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(
        loading[kind]
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    )
    assert model.config._attn_implementation == "eager"
    model.generation_config.eos_token_id = None  # ignore_eos
    return model.eval()


def tiny_llm(directory: Path, **options: object) -> LLM:
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": sum(PROMPT_LENS),
        "block_size": 8,
        "num_gpu_blocks_override": 256,
        "lazy_compile": True,
    }
    return LLM(directory, skip_tokenizer_init=True, **{"dtype": "float32"} | limits | options)


@partial(jax.jit, static_argnames="spec", compiler_options={"xla_backend_optimization_level": "0"})
def all_logits(weights, kv, batch, *, spec):
    kv, x_TD, _ = decoder.forward(weights, kv, batch, spec=spec, backend="xla")
    return decoder.logits(weights, x_TD, spec=spec)


def logits_of(llm: LLM, sequences: list[list[int]], *, weights: Any = None) -> list[np.ndarray]:
    """[T, V] of each sequence (one of a single token comes first): all in one packed step, in a
    pool full of NaN.
    """
    kv, lengths = poison_kv(engine_of(llm).kv, []), [len(ids) for ids in sequences]
    num_rows, num_tokens = len(lengths), sum(lengths)
    size, width = kv.stores[0].page_size, -(-max(lengths) // kv.stores[0].page_size)
    num_tables = len(config_of(llm).windows)
    table_MBW = (
        np.random.default_rng(0)
        .permutation(kv.stores[0].num_pages)[: num_tables * num_rows * width]
        .reshape(num_tables, num_rows, width)
        .astype(np.int32)
    )
    first_BW, len_B = (
        np.tile(np.int32(np.arange(width) * size), (num_rows, 1)),
        np.zeros(num_rows, np.int32),
    )
    rows = tuple(PageTables(table_BW, first_BW, len_B) for table_BW in table_MBW)
    kv = replace(kv, rows=rows)
    batch = empty_batch(num_tokens, num_rows)
    batch.token_T[:] = np.concatenate(sequences)
    batch.position_T[:] = np.concatenate([np.arange(length) for length in lengths])
    batch.row_T[:] = np.repeat(np.arange(num_rows), lengths)
    batch.count_B[:] = lengths
    batch.start_B[1:] = np.cumsum(lengths)[:-1]
    batch = replace(batch, num_decode=np.int32(lengths[0] == 1), num_rows=np.int32(num_rows))
    logits_TV = all_logits(
        model_of(llm).weights if weights is None else weights, kv, batch, spec=model_of(llm).spec
    )
    return np.split(np.asarray(logits_TV), np.cumsum(lengths)[:-1])


def expected_tokens(torch: Any, model: Any) -> list[list[int]]:
    options = {"do_sample": False, "max_new_tokens": NUM_NEW, "pad_token_id": 0}
    return [
        model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts()
    ]


def assert_logits_equal(torch: Any, model: Any, llm: LLM) -> None:
    """At every position of every prompt, and of it with its greedy tokens, where each is the
    likeliest here as well.
    """
    tokens = expected_tokens(torch, model)
    sequences = prompts() + [ids + new for ids, new in zip(prompts(), tokens, strict=True)]
    logits = logits_of(llm, sequences)
    for ids, got in zip(sequences, logits, strict=True):
        want = model(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * want.std())
    greedy = [got[-NUM_NEW - 1 : -1].argmax(axis=1).tolist() for got in logits[len(tokens) :]]
    assert greedy == tokens


def assert_generates_equal(torch: Any, model: Any, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    with poisoned(engine_of(llm)):
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False
        )
    assert [output.outputs[0].token_ids for output in outputs] == expected_tokens(torch, model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_their_greedy_tokens_equal_transformers(torch, tmp_path, variant):
    make_checkpoint(tmp_path, tiny_config(variant))
    assert_logits_equal(torch, reference_model(torch, tmp_path), tiny_llm(tmp_path))


QUICK = {"llama-3", "llama-biases", "mistral-window", "qwen2-mixed-windows", "qwen3"}
"""Compiling an engine's programs takes seconds: one variant of each kind, and llama in the next
test; all when slow.
"""


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=[] if variant in QUICK else pytest.mark.slow)
        for variant in VARIANTS
    ],
)
def test_generate_equals_transformers_generate(torch, tmp_path, variant):
    make_checkpoint(tmp_path, tiny_config(variant))
    assert_generates_equal(torch, reference_model(torch, tmp_path), tiny_llm(tmp_path))


def test_a_checkpoint_in_several_files_equals_transformers(torch, tmp_path):
    make_checkpoint(tmp_path, tiny_config("llama"), seed=1, shards=3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    model, llm = reference_model(torch, tmp_path), tiny_llm(tmp_path)
    assert_logits_equal(torch, model, llm)
    assert_generates_equal(torch, model, llm)


def test_a_tied_head_stored_with_other_values_is_used_as_transformers_uses_it(torch, tmp_path):
    make_checkpoint(tmp_path, tiny_config("llama-3"), seed=2)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_logits_equal(torch, reference_model(torch, tmp_path), tiny_llm(tmp_path))


@pytest.mark.parametrize(
    "variant", ["llama-biases", pytest.param("qwen3-layer-types", marks=pytest.mark.slow)]
)
def test_bfloat16_weights_kept_as_bits_give_the_logits_of_bfloat16_weights(tmp_path, variant):
    # A vocabulary of more than one, but no whole number, of the pieces in which the head is
    # multiplied.
    config = tiny_config(variant, vocab_size=2048 + 100)
    llm = tiny_llm(make_checkpoint(tmp_path, config, dtype="bfloat16"), kv_cache_dtype="float32")
    spec, layout = read_family(read_config(tmp_path))
    bits, values = (
        load_weights(tmp_path, spec, layout, dtype="bfloat16", as_bits=flag)
        for flag in (True, False)
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(bits)} == {"uint16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(values)} == {"bfloat16"}
    for got, want in zip(
        *(logits_of(llm, prompts(), weights=weights) for weights in (bits, values)), strict=True
    ):
        # The same products and roundings; where two sums differ in their last bit, one of 48 inputs
        # may round to the other bfloat16 neighbour (2^-8 apart), in some layer.
        np.testing.assert_allclose(got, want, rtol=0, atol=2**-8 * want.std())


@pytest.mark.parametrize("variant", ["qwen3-biases", "llama-biases"])
def test_every_tensor_of_a_tiny_checkpoint_matters_far_more_than_the_tolerance(tmp_path, variant):
    llm = tiny_llm(make_checkpoint(tmp_path, tiny_config(variant)))
    weights, layers = dict(model_of(llm).weights), model_of(llm).weights["layers"]
    want = logits_of(llm, prompts())[2]
    for name, leaf in layers.items():
        neutral = jnp.ones_like(leaf) if "norm" in name else jnp.zeros_like(leaf)
        got = logits_of(llm, prompts(), weights=weights | {"layers": layers | {name: neutral}})[2]
        assert np.abs(got - want).max() > 100 * TOLERANCE * want.std(), name
