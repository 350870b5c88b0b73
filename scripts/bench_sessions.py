"""Measures what sessions cost on this machine, each side in the same run, and writes
docs/benchmarks/sessions.json.

    python scripts/bench_sessions.py

A model of SmolLM2-135M's shape with random weights; a session of 1,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv import LLM, SamplingParams
from jaxkv.version import VERSION

FIGURES = Path(__file__).parents[1] / "docs/benchmarks/sessions.json"
SHAPE = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


def seconds(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def first_tokens(
    directory: str, prompt: list[int], num_rounds: int
) -> tuple[list[float], list[float]]:
    """Returns seconds to the first token of a prompt, computed and restored from a file, each in an
    engine that has never seen it, after another prompt has compiled the programs.
    """
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 1024,
        "lazy_compile": True,
    }
    path = Path(directory, "session")
    other = [token + 1 for token in prompt]
    writer = LLM(directory, **options)
    writer.session({"prompt_token_ids": prompt}).save(path)
    writer.session({"prompt_token_ids": other}).save(Path(directory, "other"))
    computed, restored = [], []
    for _ in range(num_rounds):
        llm = LLM(directory, **options)
        llm.session({"prompt_token_ids": other})
        computed.append(seconds(lambda: llm.session({"prompt_token_ids": prompt})))  # noqa: B023
        llm = LLM(directory, **options)
        llm.restore(Path(directory, "other")).generate(ONE_TOKEN)
        restored.append(seconds(lambda: llm.restore(path).generate(ONE_TOKEN)))  # noqa: B023
    return [round(s, 3) for s in computed], [round(s, 3) for s in restored]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="of each side (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=FIGURES, help="another file for the figures")
    args = parser.parse_args()
    rng = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return rng.integers(3, 49000, length).tolist()

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPE))
        llm = LLM(
            directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=1280,
            max_num_seqs=32,
            num_gpu_blocks_override=4096,
            lazy_compile=True,
        )
        prefix, pieces = ids(1000), [ids(8) for _ in range(32)]
        session = llm.session({"prompt_token_ids": prefix})
        fork_s = statistics.median(seconds(lambda: session.fork(64)) for _ in range(args.rounds))
        rewind_s = statistics.median(
            seconds(lambda: session.rewind(tokens=40)) for _ in range(args.rounds)
        )
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
        whole = [{"prompt_token_ids": prefix + piece} for piece in pieces]
        session.logprobs(pieces)  # compiles
        llm.generate(whole[:1], scored, use_tqdm=False)
        shared, apart = [], []
        for _ in range(args.rounds):
            shared.append(seconds(lambda: session.logprobs(pieces)))
            apart.append(seconds(lambda: llm.generate(whole, scored, use_tqdm=False)))
        computed, restored = first_tokens(directory, ids(1500), args.rounds)
        found = {
            "fork(64) of 1,000 tokens, ms": round(fork_s * 1e3, 3),
            "rewind(tokens=40), ms": round(rewind_s * 1e3, 3),
            "logprobs of 32 continuations of 8 tokens, s": sorted(round(s, 3) for s in shared),
            "the same, each prompt scored whole, s": sorted(round(s, 3) for s in apart),
            "ratio of the medians": round(statistics.median(apart) / statistics.median(shared), 1),
            "first token of 1,500 tokens, computed, s": computed,
            "the same after restoring them from a file, reading included, s": restored,
            "hardware": f"{os.cpu_count()} CPU cores",
            "versions": {"jaxkv": VERSION, "jax": jax.__version__},
        }
    print(json.dumps(found, indent=1))
    args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
