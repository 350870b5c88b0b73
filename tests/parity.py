"""Compares a model in transformers (float32, eager attention) with the same checkpoint here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.kv.state import PageTables
from jaxkv.models import decoder
from jaxkv.ops.attention import Backend
from jaxkv.programs.inputs import empty_batch
from jaxkv.testing import config_of, engine_of, model_of
from poison import poison_kv, poisoned

PROMPT_LENS = (1, 5, 23, 41)
NUM_NEW = 16
NUM_SCORED = 8
"""Of the greedy tokens, where logits are compared."""
TOLERANCE, RECURRENT = 1e-4, 1e-3
"""Of the logits' standard deviation. Both sides compute in float32 and add in another order, which
recurrent states hand on from token to token.
"""


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


@partial(
    jax.jit,
    static_argnames=("spec", "backend"),
    compiler_options={"xla_backend_optimization_level": "0"},
)
def all_logits(weights, kv, batch, *, spec, backend):
    kv, x_TD, *_ = decoder.forward(weights, kv, batch, spec=spec, backend=backend)
    return decoder.logits(weights, x_TD, spec=spec)


def logits_of(
    llm: LLM, sequences: list[list[int]], *, weights: Any = None, backend: str | Backend = "xla"
) -> list[np.ndarray]:
    """[T, V] of each sequence (one of a single token comes first), which gets no longer: all in one
    packed step, in a pool full of NaN.
    """
    kv, lengths = poison_kv(engine_of(llm).kv, []), [len(ids) for ids in sequences]
    num_rows, num_tokens = len(lengths), sum(lengths)
    num_slots = config_of(llm).num_slots
    more = -(-num_rows // max(num_slots, 1))  # rows may be more than the engine has slots for
    states = jax.tree.map(
        lambda x: jnp.full((more * len(x), *x.shape[1:]), jnp.nan, x.dtype), kv.states
    )
    kv = replace(kv, states=states)
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
    context_B = np.int32(lengths) if config_of(llm).has_contexts else None
    slot_B = np.arange(num_rows, dtype=np.int32) if config_of(llm).has_states else None
    rows = tuple(
        PageTables(table_BW, first_BW, len_B, context_B=context_B, slot_B=slot_B)
        for table_BW in table_MBW
    )
    kv = replace(kv, rows=rows)
    batch = empty_batch(num_tokens, num_rows)
    batch.token_T[:] = np.concatenate(sequences)
    batch.position_T[:] = np.concatenate([np.arange(length) for length in lengths])
    batch.row_T[:] = np.repeat(np.arange(num_rows), lengths)
    batch.count_B[:] = lengths
    batch.start_B[1:] = np.cumsum(lengths)[:-1]
    batch = replace(batch, num_decode=np.int32(lengths[0] == 1), num_rows=np.int32(num_rows))
    weights = model_of(llm).weights if weights is None else weights
    logits_TV = all_logits(weights, kv, batch, spec=model_of(llm).spec, backend=backend)
    return np.split(np.asarray(logits_TV), np.cumsum(lengths)[:-1])


def expected_tokens(torch: Any, model: Any, count: int = NUM_NEW) -> list[list[int]]:
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    return [
        model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts()
    ]


def reference_logits(torch: Any, model: Any, ids: list[int]) -> np.ndarray:
    """[T, V] of a sequence. Where decays are by channel token by token: what transformers computes
    of many at once divides by them, which here costs 1e-3 of the standard deviation.
    """
    if model.config.model_type not in ("kimi_linear", "bailing_hybrid", "glm5_next"):
        return model(torch.tensor([ids])).logits[0].numpy()
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    made = [model(torch.tensor([[token]]), cache=cache).logits[0].numpy() for token in ids]
    return np.concatenate(made)


def assert_logits_equal(torch: Any, model: Any, llm: LLM, backend: str | Backend = "xla") -> None:
    """At every position of every prompt, and of it with its greedy tokens, where each is the
    likeliest here as well.
    """
    tokens = expected_tokens(torch, model, NUM_SCORED)
    sequences = prompts() + [ids + new for ids, new in zip(prompts(), tokens, strict=True)]
    logits = logits_of(llm, sequences, backend=backend)
    tolerance = RECURRENT if model_of(llm).spec.states else TOLERANCE
    for ids, got in zip(sequences, logits, strict=True):
        want = reference_logits(torch, model, ids)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * want.std())
    greedy = [got[-NUM_SCORED - 1 : -1].argmax(axis=1).tolist() for got in logits[len(tokens) :]]
    assert greedy == tokens


def assert_generates_equal(torch: Any, model: Any, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    with poisoned(engine_of(llm)):
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False
        )
    assert [output.outputs[0].token_ids for output in outputs] == expected_tokens(
        torch, model, NUM_NEW
    )
