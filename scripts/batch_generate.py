"""Completes the prompts of a JSONL file greedily, a script to copy and change.

    python scripts/batch_generate.py -i prompts.jsonl -o results.jsonl

Lines are {"id": ..., "prompt": "..."}. Started again it does the ids that have no row yet. `jaxkv
batch` does the same, also with chats, parameters per line, sampling that can be resumed, lines of
any kind of damage, and two starts at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxkv import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=128)


def finished_ids(path: Path) -> set[str | int]:
    """Ids that have a row. A last line without its end, from a run that was cut off, is cut off the
    file.
    """
    path.touch()
    with path.open("r+b") as file:
        rows = file.readlines()
        if rows and not rows[-1].endswith(b"\n"):
            file.truncate(sum(map(len, rows[:-1])))
            rows.pop()
    return {json.loads(row)["id"] for row in rows}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Complete the prompts of a JSONL file.")
    parser.add_argument("-i", "--input", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--model", help="local directory or hub id; without it, the built-in demo model"
    )
    args = parser.parse_args(argv)
    done, ids = finished_ids(args.output), []

    def requests() -> Iterator[tuple[str, SamplingParams]]:
        for line in lines:
            row = json.loads(line)
            if row["id"] not in done:
                ids.append(row["id"])
                yield row["prompt"], PARAMS

    with args.input.open("rb") as lines, args.output.open("a") as results:
        for index, result in LLM(args.model).as_completed(requests()):
            if isinstance(result, ValueError):
                row = {"id": ids[index], "error": str(result)}
            else:
                completion = result.outputs[0]
                row = {
                    "id": ids[index],
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "num_prompt_tokens": len(result.prompt_token_ids),
                    "num_output_tokens": len(completion.token_ids),
                }
            print(json.dumps(row), file=results, flush=True)


if __name__ == "__main__":
    main()
