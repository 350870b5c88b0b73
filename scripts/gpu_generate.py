r"""An engine on a GPU or TPU from end to end: what share of the memory's bandwidth a decode step
reaches, and a mixed load.

    python scripts/gpu_generate.py --json out.json
    # anywhere
    python scripts/gpu_generate.py --shape toy --batches 1,2 --contexts 32 --requests 8 \
        --backends xla --copy-mib 16

Llama-3.1-8B's shape with random bfloat16 weights. For each backend, in a process of its own: decode
at each batch and context, seconds per step and share of the roofline, which is the bytes that a
step has to read (weights without the embedding, keys and values of the mean context) at the
bandwidth of a copy measured in the same process. Host time is what a step takes without waiting for
the device. Then a load of prompts of 32 to 1,024 tokens and outputs of 16 to 512. A step's time is
the difference of two runs that are alike but for their outputs' length, so that prefill is not in
it. Results are written after every line; nothing begins after --deadline seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from bench_generate import environment
from bench_models import SHAPES
from gpu_bench import copy_bandwidth

BACKENDS = {"auto", "xla", "mosaic_gpu", "pallas_tpu"}
NUM_STEPS = 128
ROUNDS = 3


class Bench:
    """One engine and what it is measured with."""

    def __init__(self, directory: str, backend: str, options: argparse.Namespace) -> None:
        from jaxkv import LLM

        self.options = options
        self.rng = np.random.default_rng(options.seed)
        longest = max(*options.contexts, 1024) + 512
        self.llm = LLM(
            directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            backend=backend,
            max_num_seqs=max(options.batches),
            max_model_len=longest,
            enable_prefix_caching=False,
            lazy_compile=True,
        )
        self.config = json.loads((Path(directory) / "config.json").read_text())
        self.bandwidth = copy_bandwidth(options.copy_mib << 20)

    def prompts(self, lengths: list[int]) -> list[dict[str, list[int]]]:
        vocab = self.config["vocab_size"]
        return [{"prompt_token_ids": self.rng.integers(3, vocab, n).tolist()} for n in lengths]

    def run(self, prompt_lens: list[int], output_lens: list[int]) -> float:
        """Seconds. Raises: RuntimeError if a request did not get the tokens that it asked for."""
        from jaxkv import SamplingParams

        prompts = self.prompts(prompt_lens)
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in output_lens
        ]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        if [len(output.outputs[0].token_ids) for output in outputs] != output_lens:
            raise RuntimeError("a request did not get the tokens that it asked for")
        return seconds

    def step_bytes(self, batch: int, context: float) -> float:
        """What one decode step has to read."""
        config = self.config
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 2
        embedding = config["vocab_size"] * config["hidden_size"] * 2
        from jaxkv.testing import model_of

        return model_of(self.llm).weight_bytes - embedding + batch * context * token

    def decode(self, batch: int, context: int) -> dict[str, Any]:
        """Rows that begin with `context` tokens."""
        long, short = [[context] * batch, [NUM_STEPS + 1] * batch], [[context] * batch, [1] * batch]
        self.run(*long)  # compiles
        steps = [(self.run(*long) - self.run(*short)) / NUM_STEPS for _ in range(ROUNDS)]
        with HostTime(self.llm) as host:
            self.run(*long)
        step_s = min(steps)
        nbytes = self.step_bytes(batch, context + NUM_STEPS / 2)
        return {
            "batch": batch,
            "context": context,
            "step_ms": step_s * 1e3,
            "steps_ms": [s * 1e3 for s in steps],
            "tokens_per_s": batch / step_s,
            "share": nbytes / step_s / self.bandwidth,
            "host_ms": host.per_step * 1e3,
        }

    def mixed(self) -> dict[str, Any]:
        count, rng = self.options.requests, np.random.default_rng(self.options.seed)
        lens = rng.integers(32, 1025, count).tolist(), rng.integers(16, 513, count).tolist()
        self.run(*lens)
        seconds = min(self.run(*lens) for _ in range(ROUNDS))
        return {"requests": count, "seconds": seconds, "tokens_per_s": sum(lens[1]) / seconds}


class HostTime:
    """Time in the engine's steps less what they wait for the device, per token of a row.

    The prompts' steps are in it, and count as one each.
    """

    def __init__(self, llm: Any) -> None:
        from jaxkv.testing import engine_of

        self._engine = engine_of(llm)
        self._step, self._read = self._engine.step, self._engine.results.read
        self.host_s, self.num_steps = 0.0, 0

    @property
    def per_step(self) -> float:
        return self.host_s / self.num_steps

    def __enter__(self) -> HostTime:
        import jax

        def read(flight: Any) -> Any:
            if flight is not None:
                began = time.perf_counter()
                jax.block_until_ready(flight.sampled.token_B)
                self.host_s -= time.perf_counter() - began
                shape = flight.sampled.token_B.shape
                self.num_steps += 1 if len(shape) == 1 else shape[0]
            return self._read(flight)

        def step() -> Any:
            began = time.perf_counter()
            try:
                return self._step()
            finally:
                self.host_s += time.perf_counter() - began

        self._engine.step, self._engine.results.read = step, read
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.step, self._engine.results.read = self._step, self._read


BENCH: list[Bench] = []
"""The worker process's own."""


def begin(directory: str, backend: str, options: argparse.Namespace) -> dict[str, Any]:
    import jax

    bench = Bench(directory, backend, options)
    BENCH.append(bench)
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "copy_bytes_per_s": bench.bandwidth,
        "describe": bench.llm.describe(),
    }


def decode(batch: int, context: int) -> dict[str, Any]:
    return BENCH[0].decode(batch, context)


def mixed() -> dict[str, Any]:
    return BENCH[0].mixed()


def measure(options: argparse.Namespace, directory: str, result: dict[str, Any]) -> None:
    """Adds to `result`, and writes it after each line."""
    ends = time.monotonic() + options.deadline
    for backend in options.backends:
        # Of its own process: what one engine keeps would be missing to the other.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
            result[backend] = of = worker.submit(begin, directory, backend, options).result()
            print(of["describe"], flush=True)
            of["decode"] = []
            work: list[tuple[Any, ...]] = [
                (decode, b, c) for c in options.contexts for b in options.batches
            ]
            for call, *args in [*work, (mixed,)]:
                if time.monotonic() > ends:
                    print(f"no time left for {call.__name__} {args}")
                    continue
                line = worker.submit(call, *args).result()
                print(f"{backend} {line}", flush=True)
                if call is mixed:
                    of["mixed"] = line
                else:
                    of["decode"].append(line)
                if options.json:
                    options.json.write_text(json.dumps(result, indent=1) + "\n")


def table(result: dict[str, Any]) -> str:
    columns = f"{'ms/step':>9s}{'share':>8s}{'tokens/s':>10s}{'host ms':>9s}"
    rows = [f"{'backend':12s}{'batch':>6s}{'context':>9s}{columns}"]
    for backend in sorted(BACKENDS & result.keys()):
        for one in result[backend]["decode"]:
            numbers = f"{one['step_ms']:9.3f}{one['share']:8.1%}"
            numbers += f"{one['tokens_per_s']:10.0f}{one['host_ms']:9.3f}"
            rows.append(f"{backend:12s}{one['batch']:6d}{one['context']:9d}{numbers}")
        if "mixed" in result[backend]:
            of = result[backend]["mixed"]
            rows.append(
                f"{backend:12s}mixed load of {of['requests']}: {of['tokens_per_s']:.0f} tokens/s"
            )
    return "\n".join(rows)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batches", type=numbers, default=[1, 32, 64, 128])
    parser.add_argument("--contexts", type=numbers, default=[2048])
    parser.add_argument("--requests", type=int, default=512, help="of the mixed load")
    parser.add_argument(
        "--backends", type=lambda text: text.split(","), default=["mosaic_gpu", "xla"]
    )
    parser.add_argument(
        "--copy-mib",
        type=int,
        default=4096,
        help="size of the copy that the bandwidth is taken from",
    )
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.backends) - BACKENDS:
        parser.error(
            f"--backends: expected some of {', '.join(sorted(BACKENDS))}, got "
            f"{', '.join(sorted(unknown))}"
        )
    result = environment() | {"command": " ".join(sys.argv), "num_steps": NUM_STEPS}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[options.shape]))
        measure(options, directory, result)
    print(table(result))


if __name__ == "__main__":
    main()
