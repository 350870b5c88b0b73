"""Beam search: the tokens of transformers' for every beam, whatever runs beside it and whoever has to give way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from poison import poisoned
from tiny import SMALL, make_checkpoint, tiny_config

PAGE = SMALL["block_size"]
VOCAB = 151
EOS = {"no": None, "one": [7], "three": [7, 30, 77]}
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 21)
"""Of prompts: around page borders."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints by family and end tokens; the weights do not depend on these."""
    folder = tmp_path_factory.mktemp("beam")
    for family in ("llama", "qwen3-layer-types"):
        for name, ids in EOS.items():
            config = tiny_config(family, vocab_size=VOCAB) | {"eos_token_id": ids, "bos_token_id": None}
            make_checkpoint(folder / f"{family} {name}", config)
    return folder


@pytest.fixture
def make(folder, compile_once):
    def make(family: str = "llama", eos: str = "three", **options: Any) -> LLM:
        return LLM(folder / f"{family} {eos}", **SMALL | {"max_num_seqs": 5, "max_logprobs": 40} | options)

    return make


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [{"prompt_token_ids": rng.integers(0, VOCAB, length).tolist()} for length in lengths]


def tokens_of(outputs: list[BeamSearchOutput]) -> list[list[list[int]]]:
    return [[sequence.tokens for sequence in output.sequences] for output in outputs]


def assert_empty(llm: LLM) -> None:
    engine = llm._engine
    engine.check()
    assert not engine.has_work
    assert engine.scheduler.allocator.num_used == 0


# --- transformers is the law ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(folder):
    """(family, end tokens, prompt, parameters) -> the tokens of all beams, by transformers in float32."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # these models are too small for two, which would wait for each other
    from transformers import AutoModelForCausalLM

    models = {}

    def search(family: str, eos: str, prompt: dict, params: BeamSearchParams) -> list[list[int]]:
        if family not in models:
            models[family] = AutoModelForCausalLM.from_pretrained(
                folder / f"{family} no", dtype=torch.float32, attn_implementation="eager"
            ).eval()
        ids = None if params.ignore_eos else EOS[eos]
        models[family].generation_config.eos_token_id = ids
        models[family].generation_config.pad_token_id = 0
        with torch.no_grad():
            found = models[family].generate(
                torch.tensor([prompt["prompt_token_ids"]]),
                attention_mask=torch.ones(1, len(prompt["prompt_token_ids"]), dtype=torch.long),
                num_beams=params.beam_width,
                num_return_sequences=params.beam_width,
                do_sample=False,
                length_penalty=params.length_penalty,
                max_new_tokens=params.max_tokens,
            ).tolist()
        return [cut(tokens, len(prompt["prompt_token_ids"]), ids or []) for tokens in found]

    return search


def cut(tokens: list[int], prompt_len: int, eos_ids: list[int]) -> list[int]:
    """Without the padding after the end token."""
    ends = [i for i, token in enumerate(tokens) if i >= prompt_len and token in eos_ids]
    return tokens[: ends[0] + 1] if ends else tokens


SETTINGS = [("llama", eos, penalty) for eos in EOS for penalty in (1, 0.0, 2.0, -1.0, 0.6)]
SETTINGS += [("qwen3-layer-types", eos, 1.0) for eos in EOS]


@pytest.mark.parametrize(("family", "eos", "length_penalty"), SETTINGS)
def test_all_beams_are_those_of_transformers(make, reference, family, eos, length_penalty):
    """Prompts of different length together, around page borders; all widths."""
    llm = make(family, eos)
    for width in (1, 2, 3, 4, 5):
        prompts = prompts_of(LENGTHS, seed=width)[width % 3 :: 1 if width == 4 else 3]
        params = BeamSearchParams(beam_width=width, max_tokens=19, length_penalty=length_penalty)
        got = tokens_of(llm.beam_search(prompts, params))
        for prompt, beams in zip(prompts, got, strict=True):
            assert beams == reference(family, eos, prompt, params)
    assert_empty(llm)
