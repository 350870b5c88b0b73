"""Measures what one row that follows a schema costs the rows beside it.

    python scripts/bench_structured.py                 # the demo model, 32 rows
    python scripts/bench_structured.py --constrained 8

Two batches take turns: all rows plain, and the last ones with a schema. A rate is tokens of all
rows by the time until the plain ones are done; by CPU time too, which other work on the machine
changes less. Masks are timed alone, on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import numpy as np

from jaxkv import LLM, SamplingParams, StructuredOutputsParams
from jaxkv.requests.grammar import Grammars
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

Rates = tuple[float, float, float]
ASKED = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a directory or hub id (the demo model)")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--constrained", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256, help="of each row")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model, max_num_seqs=args.rows, max_model_len=args.tokens + 64)
    llm.wait_until_compiled()
    rates: dict[str, list[Rates]] = {"plain": [], "mixed": []}
    for number in range(args.rounds + 1):
        for name, count in (("plain", 0), ("mixed", args.constrained)):
            found_now = run(llm, args.rows, count, args.tokens, seed=number)
            if number:  # the first round warms up
                rates[name].append(found_now)
    found: dict[str, object] = {}
    for place, by in enumerate(("second", "CPU second")):
        mine = {name: [one[place] for one in x] for name, x in rates.items()}
        pairs = zip(mine["mixed"], mine["plain"], strict=True)
        found |= {
            f"{name}, tokens per {by}": round(statistics.median(x), 1) for name, x in mine.items()
        }
        found[f"mixed / plain per {by}, median of pairs"] = round(
            statistics.median(a / b for a, b in pairs), 3
        )
    last = statistics.median(one[2] for one in rates["mixed"])
    found["row with the schema, tokens per second"] = round(last, 1)
    found["mask, us per token"] = round(1e6 * mask_s(llm), 1)
    found["device"] = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    print(json.dumps(found, indent=1))


def run(llm: LLM, rows: int, constrained: int, num_tokens: int, seed: int) -> Rates:
    """Returns the rates of all rows by the clock and by CPU time, and by the clock of the last."""
    rng = np.random.default_rng(seed)
    size = len(llm.get_tokenizer())
    prompts = [rng.integers(3, size, 32).tolist() for _ in range(rows)]
    plain = SamplingParams(seed=seed, max_tokens=num_tokens, ignore_eos=True)
    params = [plain] * (rows - constrained)
    params += [
        SamplingParams(seed=seed, max_tokens=num_tokens, structured_outputs=ASKED)
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
    return sum(new) / spent, sum(new) / spent_cpu, new[-1] / spent


def mask_s(llm: LLM) -> float:
    """Returns the time of a mask and of taking in a token, mean over an output."""
    model = model_of(llm)
    grammars = Grammars(model.tokenizer, model.spec.vocab_size, model.eos_ids)
    grammar, rng, spent, count = grammars.compile(ASKED), np.random.default_rng(0), 0.0, 0
    while not grammar.is_done:
        start = time.perf_counter()
        mask = grammar.mask()
        spent += time.perf_counter() - start
        token = int(
            rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))
        )
        start = time.perf_counter()
        grammar.accept(token)
        spent, count = spent + time.perf_counter() - start, count + 1
    return spent / count


if __name__ == "__main__":
    main()
