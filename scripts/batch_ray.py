"""Completes the lines of a batch file on a Ray cluster, a script to copy and change.

    python scripts/batch_ray.py -i prompts.jsonl -o results.jsonl --model org/name --actors 2

Lines and rows are those of `jaxkv batch` (docs/batch.md). This process reads the lines that have no
row yet and writes the rows: only its machine has the files. Started again it does what is missing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow
import ray.data

from jaxkv.api.batch_files import Line, Rows, Unanswered, open_lines, open_output
from jaxkv.ray import Generate


def blocks(lines: Iterable[Line], size: int) -> Iterator[Any]:
    """Yields the lines in tables, which Ray keeps. A table is what a lost actor has to do again."""
    lines = iter(lines)
    while chunk := list(islice(lines, size)):
        texts = [(line.raw or b"").decode() for line in chunk]
        numbers = [line.number for line in chunk]
        yield ray.put(pyarrow.table({"line": texts, "number": numbers}))


def complete(rows: Rows, lines: Iterable[Line], args: argparse.Namespace) -> None:
    """Adds a row for each line, once, whatever Ray does twice.

    Raises: ValueError if rows, or two actors, have other models or parameters; RuntimeError.
    """
    refused: list[Line] = []
    waiting: set[int] = set()

    def possible() -> Iterator[Line]:
        for line in lines:
            if line.refusal is None:
                waiting.add(line.number)
                yield line
            else:
                refused.append(line)

    if tables := list(blocks(possible(), args.batch_size)):
        answers = ray.data.from_arrow_refs(tables).map_batches(
            Generate,
            fn_constructor_kwargs={"model": args.model, "params": args.params, **args.options},
            batch_size=args.batch_size,
            compute=ray.data.ActorPoolStrategy(
                size=args.actors, max_concurrent_calls_per_actor=2, enable_true_multi_threading=True
            ),
            num_gpus=args.gpus,
            resources={"TPU": args.tpus} if args.tpus else None,
        )
        for batch in answers.iter_batches(batch_size=None):
            rows.require(json.loads(batch["engine"][0]))
            for number, row in zip(batch["number"].tolist(), batch["row"], strict=True):
                if number in waiting:
                    waiting.remove(number)
                    rows.append(json.loads(row))
    if waiting:
        raise RuntimeError(f"{len(waiting)} lines have no row: start again")
    if refused and not rows.num_rows:
        raise ValueError(
            f"no line can be asked for; line {refused[0].number}: {refused[0].refusal}"
        )
    for line in refused:
        message = f"line {line.number}: {line.refusal}"
        rows.append(line.form.refusal(line.line_id, line.number, message))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Complete a batch file on a Ray cluster.")
    parser.add_argument("-i", "--input", required=True)
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--model", help="directory (on each machine) or hub id; else the demo")
    parser.add_argument("--actors", type=int, default=1, help="engines, one per host or slice")
    parser.add_argument("--gpus", type=float, help="GPUs of each actor")
    parser.add_argument("--tpus", type=float, help="TPU chips of each actor")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="lines that an actor gets at once"
    )
    parser.add_argument(
        "--params", type=json.loads, default={}, help="SamplingParams' fields, JSON"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="LLM's arguments, JSON")
    args = parser.parse_args(argv)
    with open_lines(args.input) as source, open_output(args.output, source) as rows:
        complete(rows, Unanswered(source, rows), args)


if __name__ == "__main__":
    main()
