"""On a CPU a request gets the same bits whatever runs beside it, however its prompt was cut, cached
or preempted.
"""

from __future__ import annotations

import numpy as np
import pytest

import families
from jaxkv import LLM, RequestOutput, SamplingParams
from jaxkv.testing import engine_of
from tiers import some
from tiny import make_checkpoint, tiny_config

NUM_NEW = 20
ANSWER = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=20)
SHAPES = {
    "64": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "256": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "576": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "768": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}
COMMON = {"num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 512}
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 128}
"""Two sizes of steps and two of loops."""
CASES = ["256-bfloat16", "64-float32", "256-float32", "576-float32", "576-bfloat16", "768-bfloat16"]

Bits = list[list[tuple[int, float]]]


@pytest.fixture(scope="module", params=some(CASES, CASES[0]))
def new_llm(request, tmp_path_factory):
    width, dtype = request.param.split("-")
    config = tiny_config("llama", **COMMON, **SHAPES[width])
    path = make_checkpoint(tmp_path_factory.mktemp("model"), config, dtype=dtype)

    def new(**options: object) -> LLM:
        # Where nothing is rounded to bfloat16, both ways are the same.
        options = {"deterministic": dtype == "bfloat16", "enable_prefix_caching": False} | options
        limits = LIMITS | {"skip_tokenizer_init": True, "lazy_compile": True, "dtype": dtype}
        return LLM(path, **limits | options)

    return new


def prompts(*lengths: int) -> list[list[int]]:
    return [
        np.random.default_rng([i, length]).integers(0, 1000, length).tolist()
        for i, length in enumerate(lengths)
    ]


def bits(output: RequestOutput) -> Bits:
    """Every token with its log-probability and the likeliest ones."""
    return [
        [(token, one.logprob) for token, one in entry.items()]
        for entry in output.outputs[0].logprobs
    ]


def answers(llm: LLM, ids: list[list[int]], params: SamplingParams = ANSWER) -> list[Bits]:
    outputs = llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
    return [bits(output) for output in outputs]


OURS = prompts(5, 61, 150)
OTHERS = prompts(1, 2, 3, 9, 17, 30, 64, 65, 127, 128, 129, 200, 250, 300) * 3


@pytest.fixture(scope="module")
def llm(new_llm):
    return new_llm()


@pytest.fixture(scope="module")
def alone(llm):
    """What each of OURS gets when nothing runs beside it."""
    return [answers(llm, [ids])[0] for ids in OURS]


@pytest.mark.parametrize("num_neighbours", some([1, 4, 13, 40], 13))
def test_neighbours_change_nothing(llm, alone, num_neighbours):
    assert answers(llm, OTHERS[:num_neighbours] + OURS)[num_neighbours:] == alone


@pytest.mark.parametrize("max_num_seqs", some([1, 5, 64]))
def test_the_number_of_rows_changes_nothing(new_llm, alone, max_num_seqs):
    assert answers(new_llm(max_num_seqs=max_num_seqs), OURS) == alone


@pytest.mark.parametrize("budget", some([16, 23, 64, 100], 23))
def test_the_way_a_prompt_is_cut_changes_nothing(new_llm, alone, budget):
    limited = new_llm(max_num_batched_tokens=budget)
    assert answers(limited, OURS) == alone
    assert answers(limited, OTHERS[:5] + OURS)[5:] == alone


@pytest.mark.parametrize("block_size", some([32, 128]))
def test_the_page_size_changes_nothing(new_llm, alone, block_size):
    assert answers(new_llm(block_size=block_size), OURS) == alone


@pytest.mark.slow
def test_with_the_option_a_page_size_that_machine_code_has_no_form_for_changes_nothing(new_llm):
    few, many = (new_llm(block_size=size, deterministic=True) for size in (8, 16))
    assert answers(few, OURS) == answers(many, OURS)


@pytest.mark.slow
def test_without_the_option_neighbours_change_nothing_either(new_llm):
    llm = new_llm(deterministic=False, max_num_batched_tokens=512)  # no prompt is cut
    expected = [answers(llm, [ids])[0] for ids in OURS]
    for num_neighbours in (1, 13):
        assert answers(llm, OTHERS[:num_neighbours] + OURS)[num_neighbours:] == expected


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int8_dynamic"])
def test_neighbours_change_nothing_where_products_are_scaled(tmp_path, quantization):
    path = make_checkpoint(
        tmp_path, tiny_config("llama", **COMMON, **SHAPES["768"]), dtype="bfloat16"
    )
    options = {"quantization": quantization, "enable_prefix_caching": False, "lazy_compile": True}
    llm = LLM(path, skip_tokenizer_init=True, dtype="bfloat16", **options)
    expected = [answers(llm, [ids])[0] for ids in OURS]
    assert answers(llm, OTHERS[:40] + OURS)[40:] == expected


def test_what_was_cached_changes_nothing(new_llm, alone):
    """Pages of prompts and of answers, the latter computed by decode steps."""
    llm = new_llm(enable_prefix_caching=True)
    for _ in range(2):
        assert answers(llm, OURS) == alone
    assert_continued(llm, alone)


@pytest.mark.slow
def test_preemption_changes_nothing(new_llm, alone):
    llm = new_llm(num_gpu_blocks_override=17, block_size=16, max_model_len=200)
    assert answers(llm, OURS) == alone
    assert engine_of(llm).scheduler.num_preemptions > 0


def test_a_prompt_that_ends_in_an_answer_is_continued_as_that_answer_was(llm, alone):
    assert_continued(llm, alone)


def assert_continued(llm: LLM, alone: list[Bits]) -> None:
    for ids, answer in zip(OURS, alone, strict=True):
        tokens = [entry[0][0] for entry in answer]
        for done in (1, NUM_NEW - 1):
            (rest,) = answers(llm, [ids + tokens[:done]])
            assert rest[: NUM_NEW - done] == answer[done:]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_option_keeps_latent_attention_in_one_form(tmp_path, dtype):
    """Without it the whole prompt would be attended expanded, its chunks absorbed."""
    config = families.text_config("deepseek_v3") | {"vocab_size": 1000, "bos_token_id": None}
    path = make_checkpoint(tmp_path, config | {"max_position_embeddings": 512}, dtype=dtype)
    options = {"skip_tokenizer_init": True, "lazy_compile": True, "enable_prefix_caching": False}
    whole, cut = (
        LLM(path, dtype=dtype, deterministic=True, max_num_batched_tokens=size, **options)
        for size in (512, 100)
    )
    ids = prompts(300)
    assert answers(cut, ids) == answers(whole, ids)


HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
FAMILIES = {
    "mamba2": {},
    "lfm2": {},
    "lfm2_moe": {"num_experts": 16, "moe_intermediate_size": 48, "num_dense_layers": 0},
    "minimax": {},
    "falcon_h1": {},
    "granitemoehybrid": {},
    "mamba": {"state_size": 16},
    "rwkv": {},
    "jetmoe": {"kv_channels": 16, "num_local_experts": 16},
    "jamba": {"mamba_d_state": 16},
    "zamba": {"mamba_d_state": 16, "mamba_dt_rank": 16},
    "zamba2": {"adapter_rank": 16},
    "xlstm": {"num_heads": 16},
    "zaya": {"head_dim": 16, "moe_intermediate_size": 48, "router_hidden_size": 16}
    | {"num_experts": 15},
    "inkling_text": {"head_dim": 16, "moe_intermediate_size": 48, "n_routed_experts": 14}
    | {"unpadded_vocab_size": None, "d_rel": 16},
    "inkling2_text": {"head_dim": 16, "intermediate_size": 48, "n_routed_experts": 16}
    | {"unpadded_vocab_size": None, "d_rel": 16, "num_attention_heads": 16, "conv_kernel_size": 8},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 16, "num_local_experts": 16},
    "qwen3_next": HEADS | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "recurrent_gemma": {"hidden_size": 64, "num_attention_heads": 4, "lru_width": 64},
    "deepseek_v32": {"kv_lora_rank": 128, "q_lora_rank": 64, "qk_rope_head_dim": 32}
    | {"qk_nope_head_dim": 32, "v_head_dim": 32, "index_head_dim": 64, "hidden_size": 128},
    "doge": {"head_dim": 16},
    "muse_spark_text": {"head_dim": 16, "moe_intermediate_size": 32, "num_local_experts": 16},
    "minimax_m3_vl_text": {"head_dim": 16, "index_head_dim": 16, "num_local_experts": 16},
}
"""Models with states, with experts and with keys that are chosen, and what makes tiny ones at least
16 numbers wide, rows of latents 128: XLA rounds functions of fewer otherwise for another number of
rows. Always run are the operations: tests/ops/test_recurrent.py and test_experts.py.
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_change_nothing_of_states_and_experts(tmp_path, family):
    """As long as they do not cut a prompt, which is computed in blocks: all of ours are in the first
    step, of whichever size it is.
    """
    config = families.text_config(family) | {"vocab_size": 1000} | FAMILIES[family]
    path = make_checkpoint(tmp_path, config, dtype="float32")
    options = {"skip_tokenizer_init": True, "lazy_compile": True, "enable_prefix_caching": False}
    # All alone and all together: two sizes of steps and two of loops.
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 128}
    llm = LLM(path, dtype="float32", max_model_len=256, **limits, **options)
    ours = prompts(5, 9, 17)
    expected = [answers(llm, [ids])[0] for ids in ours]
    assert answers(llm, ours + OTHERS[:5])[: len(ours)] == expected
