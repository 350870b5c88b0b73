"""The engines that `bench_generate.py` compares. Each runs in a worker process that does nothing
else.
"""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_ARENA_MAX": "1",
}
"""glibc keeps and reuses freed memory; else every large temporary is mapped and cleared by the
kernel anew.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Prompts of token ids and, for each, how many tokens to generate."""

    prompts: list[list[int]]
    output_lens: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way to run an engine.

    method: of jaxkv generate or as_completed; of transformers padded (static batches), compiled
    (padded, with a static cache and torch.compile) or continuous. batch_size: rows at once (None:
    all), sort_by: how padded batches are made.
    """

    engine: str
    malloc: str
    dtype: str
    method: str
    batch_size: int | None = None
    sort_by: str = "prompt"

    def __str__(self) -> str:
        batch = "" if self.batch_size is None else f" of {self.batch_size}"
        order = f" by {self.sort_by}" if batch and self.method == "padded" else ""
        return f"{self.dtype} {self.method}{batch}{order}, {self.malloc} malloc"


class Jaxkv:
    """jaxkv with its default options, all programs compiled before anything is measured."""

    def __init__(self, directory: Path, dtype: str, **options: Any) -> None:
        from jaxkv import LLM, SamplingParams

        self.llm = LLM(directory, skip_tokenizer_init=True, dtype=dtype, **options)
        self.llm.wait_until_compiled()
        self.llm.generate(
            {"prompt_token_ids": [1] * 8}, SamplingParams(max_tokens=2), use_tqdm=False
        )

    def describe(self) -> str:
        return self.llm.describe()

    def run(self, mode: Mode, work: Work) -> tuple[float, list[list[int]]]:
        """Seconds, and the generated tokens in the order of the prompts."""
        from jaxkv import SamplingParams

        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in work.output_lens
        ]
        start = time.perf_counter()
        if mode.method == "as_completed":
            outputs = [
                output
                for _, output in sorted(self.llm.as_completed(zip(prompts, params, strict=True)))
            ]
        else:
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, [
            list(output.outputs[0].token_ids) for output in outputs
        ]


class Transformers:
    """transformers on the CPU with scaled_dot_product_attention and a thread per core."""

    def __init__(self, directory: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(num_cores())
        kind = getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=kind, attn_implementation="sdpa"
        ).eval()
        self.model.requires_grad_(False)
        self.compiled: set[tuple[int, int, int]] = set()
        self._padded([[1] * 8], 2, "padded")

    def describe(self) -> str:
        import torch

        return (
            f"torch: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        )

    def run(self, mode: Mode, work: Work) -> tuple[float, list[list[int]]]:
        """Seconds, and the generated tokens in the order of the prompts."""
        if mode.method == "continuous":
            return self._continuous(mode, work)
        shape = (len(work.prompts), max(map(len, work.prompts)), max(work.output_lens))
        if mode.method == "compiled" and shape not in self.compiled:
            self.compiled.add(shape)
            self.run(
                mode, work
            )  # torch.compile works on the first call of a shape; like jaxkv's it is not counted
        lens = {"prompt": [len(prompt) for prompt in work.prompts], "output": work.output_lens}[
            mode.sort_by
        ]
        order = sorted(range(len(lens)), key=lens.__getitem__)
        size = mode.batch_size or len(order)
        tokens: list[list[int]] = [[] for _ in order]
        start = time.perf_counter()
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            made = self._padded(
                [work.prompts[i] for i in batch],
                max(work.output_lens[i] for i in batch),
                mode.method,
            )
            for i, row in zip(batch, made, strict=True):
                tokens[i] = row[: work.output_lens[i]]
        return time.perf_counter() - start, tokens

    def _padded(self, prompts: list[list[int]], num_new: int, method: str) -> list[list[int]]:
        import torch
        from transformers import CompileConfig, GenerationConfig

        config = GenerationConfig(max_new_tokens=num_new, do_sample=False, pad_token_id=0)
        if method == "compiled":
            config.cache_implementation = "static"
            config.compile_config = CompileConfig(mode="default", dynamic=False)
            config.compile_config._compile_all_devices = (
                True  # transformers compiles on its own for accelerators only
            )
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        ids = torch.tensor(
            [[0] * gap + prompt for gap, prompt in zip(padding, prompts, strict=True)]
        )
        mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in padding])
        with torch.inference_mode():
            return self.model.generate(ids, attention_mask=mask, generation_config=config)[
                :, width:
            ].tolist()

    def _continuous(self, mode: Mode, work: Work) -> tuple[float, list[list[int]]]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        page, rows = 32, mode.batch_size or len(work.prompts)
        longest = max(len(p) + n for p, n in zip(work.prompts, work.output_lens, strict=True))
        # By default it takes (and touches) 60% of the memory; this holds all rows at their longest,
        # and one page each.
        config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=rows * (longest // page + 2),
            max_batch_tokens=512,
            max_requests_per_batch=rows,
        )
        options = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1)
        with self.model.continuous_batching_context_manager(
            options, continuous_batching_config=config
        ) as running:
            start = time.perf_counter()
            ids = [
                running.add_request(prompt, max_new_tokens=n, eos_token_id=-1)
                for prompt, n in zip(work.prompts, work.output_lens, strict=True)
            ]
            tokens: dict[str, list[int]] = {}
            while len(tokens) < len(ids):
                result = running.get_result(timeout=1)
                if result is None and not running.is_running():
                    raise RuntimeError(
                        f"continuous batching ended: {running.background_thread_status.fatal_error}"
                    )
                if result is not None and result.error is not None:
                    raise RuntimeError(f"continuous batching: {result.error}")
                if result is not None and result.is_finished():
                    tokens[result.request_id] = result.generated_tokens
            seconds = time.perf_counter() - start
        return seconds, [tokens[i] for i in ids]


LOADED: dict[tuple[str, str], Jaxkv | Transformers] = {}
"""At most one: in a worker process, its engine."""


def load(directory: Path, engine: str, dtype: str) -> Jaxkv | Transformers:
    """The worker's engine; another dtype's is dropped first, so that one model is in memory."""
    if (engine, dtype) not in LOADED:
        LOADED.clear()
        gc.collect()
        LOADED[engine, dtype] = (
            Jaxkv(directory, dtype) if engine == "jaxkv" else Transformers(directory, dtype)
        )
    return LOADED[engine, dtype]


def describe(directory: Path, engine: str, dtype: str) -> str:
    return load(directory, engine, dtype).describe()


def measure(directory: Path, mode: Mode, work: Work) -> float:
    """Seconds for the work. Raises: RuntimeError if a request did not get exactly the tokens that
    it asked for.
    """
    seconds, tokens = load(directory, mode.engine, mode.dtype).run(mode, work)
    if (lens := [len(row) for row in tokens]) != work.output_lens:
        raise RuntimeError(f"{mode}: expected {work.output_lens} output tokens, got {lens}")
    return seconds


def greedy_float32(directory: Path, engine: str, work: Work) -> list[list[int]]:
    """Greedy tokens in float32, of an engine made for these few prompts and dropped afterwards."""
    mode = Mode(
        engine=engine,
        malloc="",
        dtype="float32",
        method="generate" if engine == "jaxkv" else "padded",
    )
    if engine == "transformers":
        return Transformers(directory, mode.dtype).run(mode, work)[1]
    longest = max(len(p) + n for p, n in zip(work.prompts, work.output_lens, strict=True))
    options = {"lazy_compile": True, "max_num_seqs": len(work.prompts), "max_model_len": longest}
    return Jaxkv(directory, mode.dtype, **options).run(mode, work)[1]


def start_worker(malloc: str) -> ProcessPoolExecutor:
    """A fresh process for one engine: glibc reads these variables once, when a process starts."""
    for name in MALLOC:
        os.environ.pop(name, None)
    if malloc == "tuned":
        os.environ.update(MALLOC)
    os.environ["JAX_PLATFORMS"] = (
        "cpu"  # as torch; an accelerator on one side would compare nothing
    )
    worker = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    worker.submit(os.getpid).result()
    return worker


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
