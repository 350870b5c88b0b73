"""What the prefix cache gives where prompts begin alike, and what it costs where they do not.

    python scripts/bench_prefix.py --json docs/benchmarks/prefix.json
    python scripts/bench_prefix.py --only shared --requests 48

A random Llama checkpoint of the 110M shape, given token ids; two engines in one process, with and
without enable_prefix_caching, take turns on the same prompts. Every round has new prompts, and an
empty cache to begin with.

shared: the first --shared of the --prompt-len tokens are the same in every prompt. distinct: none
are, so nothing is found. The engine without the cache hashes its pages too (the samples of one
prompt share them), so the difference of the two sides is not what hashing costs: "host" is the time
inside the hashing, lookup and listing of pages as a share of the run with the cache. lookup:
nanoseconds per token of a long prompt, for the key of each page and for finding it in the index,
where none is listed and where all are; each alone, median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_generate import environment
from bench_models import SHAPES, make_checkpoint

from jaxkv import LLM, SamplingParams
from jaxkv.holding.prefix import PageChain, PageKey, PrefixIndex
from jaxkv.testing import engine_of

LINES = ("lookup", "shared", "distinct")
SIDES = {"cache": True, "no cache": False}
PREFIX_WORK = ("_publish", "_take_cached", "_expect")
"""The methods of the scheduler in which pages are hashed, found and listed."""


class Sides:
    """The two engines, made when first needed."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.options = options
        longest = options.prompt_len + options.output_len
        common = {"skip_tokenizer_init": True, "max_model_len": longest, "lazy_compile": True}
        common |= {"max_num_seqs": options.rows, "deterministic": options.deterministic}
        self.engines = {
            name: LLM(directory, enable_prefix_caching=on, **common) for name, on in SIDES.items()
        }
        self.params = SamplingParams(
            temperature=0.0, max_tokens=options.output_len, ignore_eos=True
        )

    def prompts(self, *, num_shared: int, round_id: int) -> list[dict[str, list[int]]]:
        """The round's prompts, the same for both sides."""
        rng, options = (
            np.random.default_rng([self.options.seed, round_id, num_shared]),
            self.options,
        )
        tokens = rng.integers(
            3, SHAPES[options.shape]["vocab_size"], (options.requests, options.prompt_len)
        )
        tokens[:, :num_shared] = tokens[0, :num_shared]
        return [{"prompt_token_ids": row} for row in tokens.tolist()]

    def run(self, name: str, *, num_shared: int, round_id: int) -> dict[str, Any]:
        """One side's run of a round: seconds, share of them that went into prefixes, what was
        found, tokens.
        """
        llm, prompts = self.engines[name], self.prompts(num_shared=num_shared, round_id=round_id)
        llm.reset_prefix_cache()
        scheduler = engine_of(llm).scheduler
        found, waited_s = scheduler.num_found, llm.compile_wait_s
        with timed(scheduler, PREFIX_WORK) as work_s:
            started = time.perf_counter()
            outputs = llm.generate(prompts, self.params, use_tqdm=False)
            run_s = time.perf_counter() - started
        return {
            "run_s": run_s - (llm.compile_wait_s - waited_s),
            "host": sum(work_s) / run_s,
            "found": (scheduler.num_found - found) / (len(prompts) * self.options.prompt_len),
            "token_ids": [output.outputs[0].token_ids for output in outputs],
        }


@contextmanager
def timed(owner: Any, names: tuple[str, ...]) -> Iterator[list[float]]:
    """The seconds of each call of the owner's methods; none of them may call another."""
    seconds: list[float] = []

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = method(*args)
            seconds.append(time.perf_counter() - started)
            return result

        return call

    for name in names:
        setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield seconds
    finally:
        for name in names:
            delattr(owner, name)


def compare(sides: Sides, *, num_shared: int) -> dict[str, Any]:
    """Both sides in turns; the ratio of their median times."""
    for name in SIDES:
        sides.run(name, num_shared=num_shared, round_id=0)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    agreed = 0
    for round_id in range(1, sides.options.rounds + 1):
        for name, of_side in runs.items():
            of_side.append(sides.run(name, num_shared=num_shared, round_id=round_id))
        pairs = zip(*(of_side[-1].pop("token_ids") for of_side in runs.values()), strict=True)
        agreed += sum(one == other for one, other in pairs)
    medians = {name: median(run["run_s"] for run in of_side) for name, of_side in runs.items()}
    return {
        "median_s": medians,
        "ratio": medians["no cache"] / medians["cache"],
        "host": median(run["host"] for run in runs["cache"]),
        "found": median(run["found"] for run in runs["cache"]),
        "same_outputs": agreed / (sides.options.rounds * sides.options.requests),
        "rounds": runs,
    }


def lookup(options: argparse.Namespace) -> dict[str, float]:
    """Nanoseconds per token of a prompt for its keys and for finding its pages, if none is listed
    and if all are.
    """
    tokens = array(
        "i", np.random.default_rng(options.seed).integers(3, 32_000, options.long_prompt).tolist()
    )
    size = 16
    num_pages = len(tokens) // size
    index, empty = PrefixIndex(num_pages), PrefixIndex(num_pages)
    seen: dict[str, list[float]] = {"keys": [], "miss": [], "hit": []}
    for page, key in enumerate(keys_of(tokens, size)):
        index.add(key, page, page - 1 if page else None)
    for _ in range(max(5, options.rounds)):
        started = time.perf_counter()
        keys = keys_of(tokens, size)
        seen["keys"].append(time.perf_counter() - started)
        for name, one in (("miss", empty), ("hit", index)):
            started = time.perf_counter()
            for page, key in enumerate(keys):
                one.find(key, page - 1 if page else None)
            seen[name].append(time.perf_counter() - started)
    return {name: median(values) * 1e9 / (num_pages * size) for name, values in seen.items()}


def keys_of(tokens: array[int], size: int) -> list[PageKey]:
    chain = PageChain(b"root")
    return [chain.page(page, tokens, size) for page in range(len(tokens) // size)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="110m")
    parser.add_argument(
        "--only", default=",".join(LINES), help="lines, separated by commas (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--shared", type=int, default=460)
    parser.add_argument("--output-len", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument(
        "--long-prompt", type=int, default=32_768, help="tokens of the prompt that is looked up"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="where to write or find it (default: a temporary directory)"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="engines whose results do not depend on the cache",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(LINES):
        parser.error(
            f"--only: expected some of {', '.join(LINES)}, got {', '.join(sorted(unknown))}"
        )
    return options


def main() -> None:
    options = parse()
    wanted = options.only.split(",")
    result: dict[str, Any] = environment() | {"command": " ".join(sys.argv), "lines": {}}
    if "lookup" in wanted:
        result["lines"]["lookup"] = of = lookup(options)
        print(
            "lookup    "
            + ", ".join(f"{name} {value:.0f} ns per token" for name, value in of.items()),
            flush=True,
        )
    with tempfile.TemporaryDirectory() as temporary:
        compared = [line for line in ("shared", "distinct") if line in wanted]
        if compared:
            directory = make_checkpoint(
                options.checkpoint or Path(temporary), options.shape, seed=options.seed
            )
            sides = Sides(directory, options)
        for line in compared:
            of = compare(sides, num_shared=options.shared if line == "shared" else 0)
            result["lines"][line] = of
            times = ", ".join(f"{name} {value:.2f} s" for name, value in of["median_s"].items())
            print(
                f"{line:10s}{times}, ratio {of['ratio']:.3f}, {of['found']:.1%} of the tokens "
                f"found, host "
                f"{of['host']:.2%}, same outputs {of['same_outputs']:.0%}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
