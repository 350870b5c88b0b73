"""Measures what adapters cost, by turns in one process and by CPU time: rows without one in an
engine that could have them against an engine that cannot, and rows of which some or all have one.

    python scripts/bench_lora.py --rounds 9

Adapters are random, of all matrices of the layers. Ratios are the median over rounds, each against
the plain engine's run of the same round.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

from jaxkv import LLM, LoRARequest, SamplingParams
from jaxkv.testing import blueprint_of, model_of
from jaxkv.weights.adapters import CONFIG, TENSORS, adapted_leaves


def main() -> None:
    options = parsed()
    limits = {
        "max_num_seqs": options.rows,
        "max_model_len": options.prompt_len + options.output_len + 1,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    plain = LLM(options.model, **limits)
    adapted = LLM(
        options.model,
        **limits,
        enable_lora=True,
        max_loras=options.adapters,
        max_lora_rank=options.rank,
    )
    for llm in (plain, adapted):
        llm.wait_until_compiled()
    with tempfile.TemporaryDirectory() as directory:
        loras = [
            LoRARequest(
                f"a{i}", i + 1, write_adapter(adapted, Path(directory) / str(i), i, options)
            )
            for i in range(options.adapters)
        ]
        some = [loras[i % len(loras)] for i in range(options.rows)]
        nobody: list[LoRARequest | None] = [None] * options.rows
        cases = {
            "plain engine": (plain, nobody),
            "no row has one": (adapted, nobody),
            "one row has one": (adapted, [loras[0], *nobody[1:]]),
            "all rows have the same": (adapted, [loras[0]] * options.rows),
            f"all rows, {len(loras)} adapters": (adapted, some),
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(options.rounds + 1):
            order = list(cases.items())[:: 1 if number % 2 else -1]
            for name, (llm, given) in order:
                taken = run(llm, given, number, options)
                if number:  # the first round warms up
                    seconds[name].append(taken)
    base = seconds["plain engine"]
    for name, of_case in seconds.items():
        ratios = [one / other for one, other in zip(of_case, base, strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{name:26} {median(of_case):7.3f} s  x {median(ratios):.3f} ({spread})")


def run(
    llm: LLM, loras: list[LoRARequest | None], number: int, options: argparse.Namespace
) -> float:
    """Returns the CPU seconds of a batch."""
    rng = np.random.default_rng(number)
    size = blueprint_of(llm).spec.vocab_size
    prompts = rng.integers(3, size, (options.rows, options.prompt_len)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    started = time.process_time()
    llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
    return time.process_time() - started


def write_adapter(llm: LLM, directory: Path, seed: int, options: argparse.Namespace) -> Path:
    """Writes a random adapter of all matrices that may have one."""
    directory.mkdir()
    rng, rank = np.random.default_rng(seed), options.rank
    tensors, targets = {}, []
    for leaf in adapted_leaves(model_of(llm).spec, model_of(llm).layout):
        rows, columns = leaf.shape[-2:]
        if leaf.one.part is not None:
            raise SystemExit("expected a model with a tensor for each matrix")
        for source in leaf.sources:
            module = source.removesuffix(".weight")
            targets.append(module)
            for end, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = rng.normal(0, 0.02, shape).astype(np.float32)
                tensors[f"base_model.model.{module}.lora_{end}.weight"] = values
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (directory / CONFIG).write_text(json.dumps(config))
    save_file(tensors, directory / TENSORS)
    return directory


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
