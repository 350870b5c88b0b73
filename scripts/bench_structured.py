"""Measures what one row that follows a schema costs the rows beside it.

    python scripts/bench_structured.py                 # the demo model, 32 rows
    python scripts/bench_structured.py --constrained 8

Two batches take turns: all rows plain, and the last ones with a schema. A rate is tokens of all
rows by the time until the plain ones are done; by CPU time too, which other work on the machine
changes less. Then rows that all write a record, whose names are forced: with those tokens added at
once, and with every token drawn. Masks are timed alone, on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from unittest import mock

import jax
import numpy as np

from jaxkv import LLM, SamplingParams, StructuredOutputsParams
from jaxkv.requests.grammar import Grammar, Grammars
from jaxkv.testing import engine_of, intake_of, model_of

SCHEMA = {
    "type": "object",
    "properties": {
        "names": {
            "type": "array",
            "items": {"type": "string", "minLength": 20, "maxLength": 60},
            "minItems": 50,
            "maxItems": 60,
        },
    },
    "required": ["names"],
    "additionalProperties": False,
}
"""Which takes longer to say than any row here has tokens."""

RECORD = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "last_name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "date_of_birth": {"type": "string", "pattern": "^(19|20)[0-9]{2}-[0-9]{2}-[0-9]{2}$"},
        "country": {"enum": ["Germany", "France", "Portugal", "Japan"]},
        "is_active": {"type": "boolean"},
        "score": {"type": "integer", "minimum": 0, "maximum": 1000},
    },
    "required": [
        "first_name",
        "last_name",
        "date_of_birth",
        "country",
        "is_active",
        "score",
    ],
    "additionalProperties": False,
}

RECORDS = {"type": "array", "items": RECORD, "minItems": 50, "maxItems": 60}

Rates = tuple[float, float, float]
ASKED = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
ASKED_RECORD = StructuredOutputsParams(json=RECORD, disable_any_whitespace=True)
ASKED_RECORDS = StructuredOutputsParams(json=RECORDS, disable_any_whitespace=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a directory or hub id (the demo model)")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--constrained", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256, help="of each row")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    max_len = args.tokens + 64
    llm = LLM(args.model, max_num_seqs=args.rows, max_model_len=max_len, lazy_compile=True)
    kinds = {"plain": (0, ASKED), "strings": (args.constrained, ASKED)}
    kinds["records"] = (args.constrained, ASKED_RECORDS)
    rates: dict[str, list[Rates]] = {name: [] for name in kinds}
    for number in range(args.rounds + 1):
        for name, (count, asked) in kinds.items():
            found_now = run(llm, args.rows, count, asked, args.tokens, seed=number)
            if number:  # the first round compiles
                rates[name].append(found_now)
    found: dict[str, object] = {}
    for name, mine in rates.items():
        about: dict[str, float] = {}
        for place, by in enumerate(("second", "CPU second")):
            pairs = zip(mine, rates["plain"], strict=True)
            about[f"tokens per {by}"] = round(statistics.median(one[place] for one in mine), 1)
            about[f"to plain per {by}, median of pairs"] = round(
                statistics.median(a[place] / b[place] for a, b in pairs), 3
            )
        about["the last row's to the first one's"] = round(
            statistics.median(one[2] for one in mine), 3
        )
        found[name] = about
    for count in dict.fromkeys((1, min(8, args.rows), args.rows)):
        found[f"{count} rows that write records"] = compare_forced(llm, count, args.rounds)
    found["masks, by schema"] = {
        name: mask_times(llm, asked)
        for name, asked in (("long strings", ASKED), ("records", ASKED_RECORDS))
    }
    found["device"] = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    print(json.dumps(found, indent=1))


def run(
    llm: LLM,
    rows: int,
    constrained: int,
    asked: StructuredOutputsParams,
    num_tokens: int,
    seed: int,
) -> Rates:
    """Returns tokens of all rows per second and per CPU second, and those of the last row for each
    of the first.
    """
    rng = np.random.default_rng(seed)
    size = len(llm.get_tokenizer())
    prompts = [rng.integers(3, size, 32).tolist() for _ in range(rows)]
    plain = SamplingParams(seed=seed, max_tokens=num_tokens, ignore_eos=True)
    params = [plain] * (rows - constrained)
    params += [
        SamplingParams(seed=seed, max_tokens=num_tokens, structured_outputs=asked)
    ] * constrained
    engine = engine_of(llm)
    submissions = intake_of(llm).accept([{"prompt_token_ids": ids} for ids in prompts], params)
    for submission in submissions:
        engine.add(submission)
    requests = [submission.samples[0] for submission in submissions]
    while not all(request.num_new for request in requests):
        engine.step()  # prompts are no part of it
    before = [request.num_new for request in requests]
    start, start_cpu = time.monotonic(), time.process_time()
    while any(request.finish_reason is None for request in requests[: rows - constrained]):
        engine.step()
    spent, spent_cpu = time.monotonic() - start, time.process_time() - start_cpu
    new = [request.num_new - count for request, count in zip(requests, before, strict=True)]
    for submission in submissions:
        engine.abort(submission)
    return sum(new) / spent, sum(new) / spent_cpu, new[-1] / new[0]


def compare_forced(llm: LLM, rows: int, rounds: int) -> dict[str, float]:
    """Returns how much faster records are written where forced tokens are not drawn."""
    ratios: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        added, added_cpu, tokens = write_records(llm, rows, seed=number)
        with mock.patch.object(Grammar, "forced", return_value=None):
            drawn, drawn_cpu, same = write_records(llm, rows, seed=number)
        if tokens != same:
            raise RuntimeError("expected the same tokens, however the forced ones come")
        if number:
            ratios.append((drawn / added, drawn_cpu / added_cpu))
    wall, cpu = zip(*ratios, strict=True)
    return {
        "time drawn / added, median of pairs": round(statistics.median(wall), 2),
        "CPU time drawn / added, median of pairs": round(statistics.median(cpu), 2),
    }


def write_records(llm: LLM, rows: int, seed: int) -> tuple[float, float, list[list[int]]]:
    """Returns wall time, CPU time and tokens of so many records."""
    params = SamplingParams(seed=seed, max_tokens=120, structured_outputs=ASKED_RECORD)
    prompts = [f"# record {seed}.{row}\n" for row in range(rows)]
    start, start_cpu = time.monotonic(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    spent, spent_cpu = time.monotonic() - start, time.process_time() - start_cpu
    return spent, spent_cpu, [output.outputs[0].token_ids for output in outputs]


def mask_times(llm: LLM, asked: StructuredOutputsParams) -> dict[str, float]:
    """Returns the time of a mask and of taking in a token, means in the thread's CPU time over an
    output of random tokens, and how many of these are forced.
    """
    model = model_of(llm)
    grammars = Grammars(model.tokenizer, model.spec.vocab_size, model.eos_ids)
    grammar, rng = grammars.compile(asked).copy(), np.random.default_rng(0)
    masking = accepting = 0.0
    count = num_forced = 0
    while not grammar.is_done:
        start = time.thread_time()
        forced = grammar.forced()
        masking += time.thread_time() - start
        mask = grammar.mask()
        token = int(
            rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))
        )
        start = time.thread_time()
        grammar.accept(token)
        accepting, count = accepting + time.thread_time() - start, count + 1
        num_forced += forced is not None
    return {
        "mask, us per token and row": round(1e6 * masking / count, 1),
        "taking a token in, us": round(1e6 * accepting / count, 1),
        "tokens": count,
        "of them forced": num_forced,
    }


if __name__ == "__main__":
    main()
