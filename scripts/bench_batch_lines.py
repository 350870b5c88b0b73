"""Measures the memory that `run_batch` takes for many lines, with an engine that answers at once.

python scripts/bench_batch_lines.py 1000 100000 300000
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxkv.api.batch_files import open_lines, open_output, run_batch
from jaxkv.config import SamplingParams
from jaxkv.requests.outputs import CompletionOutput, RequestOutput


class Instant:
    """Is what `run_batch` uses of an `LLM`."""

    compile_s = compile_wait_s = 0.0
    pools = False
    model_names = ("instant",)

    def identity(self) -> dict[str, Any]:
        return {}

    def get_tokenizer(self) -> Instant:
        return self

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "x"

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def as_completed(self, requests: Iterable[Any]) -> Iterator[tuple[int, RequestOutput]]:
        for index, _ in enumerate(requests):
            done = CompletionOutput(0, "x", [3], finish_reason="stop")
            yield index, RequestOutput(str(index), None, [1, 2], [done], True)


def write_lines(path: Path, count: int) -> None:
    with path.open("w") as file:
        for i in range(count):
            body = {"model": "instant", "prompt": f"What is {i}?"}
            line = {"custom_id": f"request-{i:07d}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Memory of a batch of many lines.")
    parser.add_argument("counts", type=int, nargs="+", metavar="N", help="lines of a batch")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        for count in args.counts:
            write_lines(source, count)
            output.unlink(missing_ok=True)
            for what in ("first run", "resumed"):
                started = time.perf_counter()
                with open_lines(str(source)) as lines, open_output(output, lines) as rows:
                    run_batch(Instant(), lines, rows, use_tqdm=False)
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                print(
                    f"{count} lines, {what}: {peak:.1f} MiB at most so far, "
                    f"{time.perf_counter() - started:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
