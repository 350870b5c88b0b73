"""Measures what proposing tokens ahead gains where a text repeats itself, and costs where it does
not.

    python scripts/bench_speculation.py                # the demo model
    python scripts/bench_speculation.py --ahead 4 --rounds 5
    python scripts/bench_speculation.py --draft-layers 1
    python scripts/bench_speculation.py --model DIR --cost --options '{"load_format": "dummy"}'

Two engines take turns, one without and one with speculation: one row that goes on with a function
which stands twice in its prompt, greedily; one row of random text; and many rows of random text,
which are more than speculate. By CPU time too, which other work on the machine changes less. Last
the tokens of both are compared. With --draft-layers a draft model proposes: the model itself
without its later layers. Then each function stands once in its prompt, greedily and drawn.

With --cost 1, 2, 4 and 8 equal rows run greedily from a prompt that repeats itself; by the time of
both engines, what a step that verifies proposals costs is told in steps without.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import re
import shutil
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jaxkv.engine.speculation
from jaxkv import LLM, SamplingParams
from jaxkv.build.model import DEMO

SOURCES: list[Callable[..., Any]] = [textwrap.dedent, shutil.copyfileobj, random.Random.sample]
"""Functions of the standard library, by which the demo model has learnt Python."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a directory or hub id (the demo model)")
    parser.add_argument("--ahead", type=int, default=4, help="tokens proposed at most")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draft-layers", type=int, default=0, help="of a draft model (0: none)")
    parser.add_argument("--always", action="store_true", help="propose whether it gains or not")
    parser.add_argument("--cost", action="store_true", help="what steps with proposals cost")
    parser.add_argument("--options", type=json.loads, default={}, help="of both engines, as JSON")
    args = parser.parse_args()
    if args.always or args.cost:
        jaxkv.engine.speculation.LEAST_GAIN = 0.0
    asked: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": args.ahead}
    if args.draft_layers:
        folder = tempfile.TemporaryDirectory()
        first_layers(Path(args.model or DEMO), args.draft_layers, Path(folder.name))
        asked |= {"method": "draft_model", "model": folder.name}
    else:
        asked |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if args.cost:
        asked |= {"prompt_lookup_min": 1, "disable_by_batch_size": min(args.rows, 8)}
    limits = {"max_num_seqs": args.rows, "max_model_len": 1024, "lazy_compile": True}
    limits |= args.options
    engines = [
        LLM(args.model, **limits),
        LLM(args.model, **limits, speculative_config=asked),
    ]
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    for line in engines[1].describe().splitlines()[:4]:
        print(line)
    if args.cost:
        for num_rows in (1, 2, 4, 8):
            print(json.dumps(cost(engines, num_rows, args.tokens, args.rounds)), flush=True)
        return
    greedy = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, seed=0, max_tokens=args.tokens, ignore_eos=True)
    rng = random.Random(0)
    words = [" ".join(rng.choices(LETTERS, k=24)) for _ in range(args.rows)]
    for source in SOURCES:
        text = inspect.getsource(source)[:800]
        if args.draft_layers:
            compare(f"1 row, {source.__name__}", engines, [text], greedy, args.rounds)
            compare(f"1 row, {source.__name__}, drawn", engines, [text], drawn, args.rounds)
        else:
            compare(f"1 row, {source.__name__} again", engines, [text * 2], greedy, args.rounds)
    compare("1 row of random text", engines, words[:1], drawn, args.rounds)
    compare(f"{args.rows} rows of random text", engines, words, drawn, args.rounds)


def first_layers(model: Path, num_layers: int, to: Path) -> None:
    """Writes a copy of a checkpoint in one safetensors file that ends behind some of its layers."""
    config = json.loads((model / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    data = (model / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    kept, parts, end = {}, [], 0
    for name, of in json.loads(data[8:start]).items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if name == "__metadata__" or (layer and int(layer[1]) >= num_layers):
            continue
        first, last = of["data_offsets"]
        kept[name] = of | {"data_offsets": [end, end + last - first]}
        parts.append(data[start + first : start + last])
        end += last - first
    header = json.dumps(kept).encode()
    header += b" " * (-len(header) % 8)
    whole = [len(header).to_bytes(8, "little"), header, *parts]
    (to / "model.safetensors").write_bytes(b"".join(whole))


LETTERS = [chr(code) for code in range(97, 123)]


def compare(
    name: str, engines: list[LLM], prompts: list[str], params: SamplingParams, rounds: int
) -> None:
    """Prints how many times as fast the second engine is as the first, the median over rounds."""
    taken: list[list[tuple[float, float]]] = [[], []]
    tokens: list[list[list[int]]] = [[], []]
    before = counters(engines[1])
    for number in range(rounds + 1):
        for which, llm in enumerate(engines):
            started, cpu = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if number:  # the first round compiles
                taken[which].append((time.perf_counter() - started, time.process_time() - cpu))
            tokens[which] = [list(output.outputs[0].token_ids) for output in outputs]
    gained = [
        [plain / ahead for plain, ahead in zip(*pair, strict=True)]
        for pair in zip(*taken, strict=True)
    ]
    num_tokens, after = sum(map(len, tokens[0])), counters(engines[1])
    found = {
        "case": name,
        "speed": round(statistics.median(wall for wall, _ in gained), 2),
        "speed_by_cpu_time": round(statistics.median(cpu for _, cpu in gained), 2),
        "tokens_per_s": [
            round(num_tokens / statistics.median(wall for wall, _ in each)) for each in taken
        ],
        "same_tokens": tokens[0] == tokens[1],
        "drafted": after[1] - before[1],
        "accepted": after[2] - before[2],
        "of_tokens": num_tokens * (rounds + 1),
    }
    print(json.dumps(found), flush=True)


def cost(engines: list[LLM], num_rows: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Returns what a step costs in which proposals of all rows are verified, in plain steps, the
    median over rounds. Rows are alike, and so take the same steps.
    """
    prompts = [{"prompt_token_ids": [5, 6] * 8}] * num_rows

    def run(llm: LLM, count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    found = []
    for number in range(rounds + 1):
        before = counters(engines[1])
        plain_s, ahead_s = (run(llm, num_tokens) - run(llm, 1) for llm in engines)
        after = counters(engines[1])
        drafts, _, accepted = (
            (now - then) / num_rows for now, then in zip(after, before, strict=True)
        )
        num_plain = num_tokens - 1 - accepted - drafts
        if number:  # the first round compiles
            found.append(((num_tokens - 1) * ahead_s / plain_s - num_plain) / max(1, drafts))
    return {
        "rows": num_rows,
        "steps_ahead": drafts,
        "accepted": accepted,
        "of_tokens": num_tokens,
        "cost": round(statistics.median(found), 2),
    }


def counters(llm: LLM) -> tuple[int, int, int]:
    """Returns how often tokens were proposed, how many, and how many of them held."""
    values = {one.name: getattr(one, "value", 0) for one in llm.get_metrics()}
    names = ("drafts", "draft_tokens", "accepted_tokens")
    drafts, drafted, accepted = (int(values[f"jaxkv:spec_decode_num_{name}"]) for name in names)
    return drafts, drafted, accepted


if __name__ == "__main__":
    main()
