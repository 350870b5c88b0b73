"""Measures what holds for every family of models, and writes docs/models.md from it.

    python scripts/model_table.py                    # all, about 25 minutes on 2 cores
    python scripts/model_table.py gemma3_text phi3   # some; the other rows stay as they were

Needs transformers with PyTorch (`pip install ".[parity]"`) and tests/ beside it. Each model is a
tiny one that transformers makes, with every weight drawn anew (tests/families.py), in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
# ruff: noqa: E402 (what follows is found there)

from families import ALONE, UNSCALED, WRAPPED, hf_config, make_hf_model
from jaxkv import LLM, SamplingParams
from jaxkv.build.limits import make_limits
from jaxkv.build.options import EngineOptions
from jaxkv.errors import CheckpointError
from jaxkv.kv.codecs import get_codec
from jaxkv.models.families import DEFAULTS, RENAMED, ConfigReader, read_family
from jaxkv.models.paged import heads_of
from jaxkv.ops.attention import BACKENDS, Needs
from jaxkv.programs import compiler_options
from jaxkv.testing import model_of
from parity import (
    NUM_NEW,
    RECURRENT,
    TOLERANCE,
    expected_tokens,
    logits_of,
    prompts,
    reference_logits,
    tiny_llm,
)

TABLE = ROOT / "docs" / "models.md"
JAX = f"jax {metadata.version('jax')}"
COLUMNS = ("logits", "tokens", "cached", "int8 pages", "2 devices", "TPU kernels", "GPU kernels")
VERSION = "transformers"
"""The column with the version of the other side."""
GREEDY = {"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True, "logprobs": 1}


NOT_READ = {
    "keys of an encoder": "bart and others",
}
"""What transformers 5.24 has decoders of that are not read, by what they need that is not built."""


class Case:
    """One model on both sides."""

    def __init__(self, variant: str, directory: Path) -> None:
        import torch

        torch.set_grad_enabled(False)
        self.torch = torch
        self.directory = directory
        self.model = make_hf_model(torch, hf_config(variant), directory)
        self.llm = tiny_llm(directory)
        self.llm_spec = model_of(self.llm).spec
        self.want = expected_tokens(torch, self.model, NUM_NEW)

    def check(self, column: str) -> str:
        """Returns what stands in a column: "yes", a figure, or the reason."""
        checks: dict[str, Callable[[], str]] = {
            "logits": self._logits,
            "tokens": self._tokens,
            "cached": self._cached,
            "int8 pages": self._int8,
            "2 devices": self._devices,
            "TPU kernels": lambda: self._kernels("pallas_tpu", "tpu"),
            "GPU kernels": lambda: self._kernels("mosaic_gpu", "gpu"),
        }
        try:
            return checks[column]()
        except (NotImplementedError, ValueError) as error:
            return str(error).splitlines()[0]

    def _logits(self) -> str:
        sequences = prompts() + [a + b for a, b in zip(prompts(), self.want, strict=True)]
        worst = 0.0
        for ids, got in zip(sequences, logits_of(self.llm, sequences), strict=True):
            want = reference_logits(self.torch, self.model, ids)
            worst = max(worst, float(np.abs(got - want).max() / want.std()))
        tolerance = RECURRENT if self.llm_spec.states else TOLERANCE
        return f"{worst:.0e}" if worst < tolerance else f"NO: {worst:.1e}"

    def _tokens(self) -> str:
        if generate(self.llm) != self.want and self.llm_spec.depends_on_context:
            return (
                "transformers rotates what follows anew when a sequence outgrows the original "
                "length; here how long it may get decides once"
            )
        return _yes(generate(self.llm) == self.want)

    def _cached(self) -> str:
        """Asks the same again: prompts are found in the cache, and the tokens are the same."""
        before = generate(self.llm)
        outputs = _outputs(self.llm)
        found = sum(output.num_cached_tokens for output in outputs)
        same = [output.outputs[0].token_ids for output in outputs] == before
        return _yes(found > 0 and same)

    def _int8(self) -> str:
        """Compares logprobs of the prompts' greedy tokens, whatever is chosen after them."""
        llm = tiny_llm(self.directory, kv_cache_dtype="int8")
        pairs = zip(_outputs(llm), _outputs(self.llm), strict=True)
        apart = [
            abs(a.outputs[0].cumulative_logprob - b.outputs[0].cumulative_logprob)
            / len(b.outputs[0].token_ids)
            for a, b in pairs
        ]
        return f"{np.mean(apart):.0e} nats"

    def _devices(self) -> str:
        two = tiny_llm(self.directory, tensor_parallel_size=2)
        return _yes(generate(two) == generate(self.llm))

    def _kernels(self, backend: str, platform: str) -> str:
        """Asks the kernels about the family's default sizes in bfloat16."""
        config = json.loads((self.directory / "config.json").read_text())
        config = config.get("thinker_config", config)
        family = config.get("text_config", config)["model_type"]
        family = RENAMED.get(family, family)
        sizes = json.loads(DEFAULTS.read_text()).get(family)
        if sizes is None:
            return "no default sizes"
        unset = {"head_dim", *(key for key, size in sizes.items() if size is None)}
        sizes = {key: size for key, size in sizes.items() if size is not None}
        own = read_family(ConfigReader(config, "config.json"))[0]
        tiny = config.get("text_config", config)
        made = {key for key in unset if "num_" in key or key.startswith("attention_h")}
        full = {key: one for key, one in tiny.items() if key not in made}
        full |= {"head_dim": None, **sizes}
        count = sizes.get("num_hidden_layers", sizes.get("n_layer", 0))
        num_layers = tiny.get("num_hidden_layers", own.num_layers)  # which may run more than once
        listed = {
            key: one
            for key, one in full.items()
            if count and isinstance(one, list) and len(one) == num_layers
        }
        full |= {key: (one * count)[:count] for key, one in listed.items()}
        full |= {"per_layer_config": {}, "kv_source_layers": None}
        full |= {"n_recurrent_layers": None, "embedding_dim": None}
        if "indexer_head_dim" in tiny:  # Qwen4-Exp's defaults leave out what must fit other sizes
            full |= {"indexer_head_dim": 128, "ple_embed_dim": None}
        if own.depends_on_context:  # its factors are as many as a tiny head has dimensions
            full["rope_parameters"] = {}
        try:
            spec = read_family(ConfigReader({**full, "model_type": family}, "config.json"))[0]
        except CheckpointError:
            return "the default sizes make no model"
        limits = make_limits(EngineOptions(None), spec, platform, page_size=64)
        codec = get_codec("bfloat16", platform=platform, dtype="bfloat16")
        needs = Needs(
            page_size=64,
            num_rows=64,
            pages_per_row=min(limits.max_model_len, 8192) // 64,
            codec=codec,
            platform=platform,
            compute_capability="9.0",
        )
        assert own.family == spec.family
        refused = [BACKENDS[backend].refuses(heads, needs) for heads in heads_of(spec)]
        return next(filter(None, refused), "yes")


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


def _outputs(llm: LLM) -> list[Any]:
    asked = [{"prompt_token_ids": ids} for ids in prompts()]
    return llm.generate(asked, SamplingParams(**GREEDY), use_tqdm=False)


def generate(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in _outputs(llm)]


ELSEWHERE = {
    "bailing_moe": "Ling and Ring, 1 and 2.0",
    "chatglm": "ChatGLM2, ChatGLM3 and GLM-4 of 2024 as first published",
    "deepseek": "DeepSeekMoE 16B",
    "internlm2": "InternLM2 and 2.5",
    "kimi_k2": "Kimi K2",
    "mimo": "MiMo 7B",
    "minicpm": "MiniCPM 1 and 2",
    "nemotron-nas": "Llama-Nemotron 49B, 51B and 253B",
    "orion": "Orion 14B",
    "PanguEmbedded": "openPangu-Embedded",
}
"""Models that transformers 5.24 has no class of."""


def _without_row(rows: dict[str, list[str]]) -> list[str]:
    """Says which variants were not measured, if any."""
    left = [variant for variant in (*ALONE, *WRAPPED) if variant not in rows]
    names = (
        f"Not measured here, logits only (tests/models/test_every_family.py): {', '.join(left)}."
    )
    return [names, ""] if left else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="*", help="of tests/families.py; default: all")
    asked = parser.parse_args().variants
    jax.config.update("jax_num_cpu_devices", 2)
    quick = compiler_options.COMPILER_OPTIONS.get("cpu", {}) | {
        "xla_backend_optimization_level": "0"
    }
    compiler_options.COMPILER_OPTIONS["cpu"] = quick
    rows = read() if asked else {}
    for variant in asked or [*ALONE, *WRAPPED]:
        with tempfile.TemporaryDirectory() as directory:
            case = Case(variant, Path(directory))
            rows[variant] = [*map(case.check, COLUMNS), metadata.version(VERSION)]
        print(" | ".join([variant, *rows[variant]]), flush=True)
    write({variant: rows[variant] for variant in (*ALONE, *WRAPPED) if variant in rows})


def read() -> dict[str, list[str]]:
    """Returns the rows of the table that is there, with reasons in place of their numbers.

    Raises: ValueError if it was measured with another JAX.
    """
    text = TABLE.read_text()
    if JAX not in text:
        raise ValueError(f"{TABLE}: expected figures of {JAX}; measure all models anew")
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    rows = {}
    for line in re.findall(r"^\| (\w.*) \|$", text, re.MULTILINE):
        variant, *cells = line.split(" | ")
        numbers = [re.fullmatch(r"no \((\d+)\)", cell) for cell in cells]
        pairs = zip(cells, numbers, strict=True)
        rows[variant] = [cell if number is None else reasons[number[1]] for cell, number in pairs]
    return rows


def write(rows: dict[str, list[str]]) -> None:
    reasons: dict[str, int] = {}

    def short(cell: str) -> str:
        is_short = len(cell) <= 12
        return cell if is_short else f"no ({reasons.setdefault(cell, len(reasons) + 1)})"

    table = [[variant, *map(short, cells)] for variant, cells in rows.items()]
    lines = [
        "# Models",
        "",
        f"Written by `python scripts/model_table.py` ({JAX}, CPU): for tiny models that "
        "transformers, in the version of the last column, made, every weight drawn anew, float32. "
        "A name behind a hyphen is a variant of a family; the last rows are the text parts of "
        "larger models.",
        "",
        "logits: largest difference from transformers' at any position, over their standard "
        "deviation. tokens: 16 greedy ones of four prompts in one batch are transformers'. cached: "
        "the same when prompts are found in the prefix cache. int8 pages: how far apart the mean "
        "logprobs of the greedy tokens are, which may be other ones. 2 devices: the same tokens "
        "with `tensor_parallel_size=2`. Kernels: "
        "whether they take the family's default sizes in bfloat16, in place of XLA.",
        "",
        "| | " + " | ".join([*COLUMNS, VERSION]) + " |",
        "|" + "---|" * (len(COLUMNS) + 2),
        *("| " + " | ".join(row) + " |" for row in table),
        "",
        *(f"{number}. {reason}" for reason, number in reasons.items()),
        "",
        *_without_row(rows),
        "Read too, though transformers 5.24 has no class of them; tests hold them equal to "
        "families that it has, or to Llama of its parts: "
        + ", ".join(f"{name} ({models})" for name, models in ELSEWHERE.items())
        + ".",
        "",
        f"{', '.join(UNSCALED)}: compared with transformers' logits times the factor of the text "
        "part, which transformers 5.24 leaves out in these. The text part's own class multiplies "
        "by it, as vLLM does, and so does jaxkv.",
        "",
        "rwkv-halved: transformers halves the stream every `rescale_every` layers unless it "
        "trains, behind which the epsilon of a norm counts 4 times as much; jaxkv computes what it "
        "computes in training. phimoe past its original length: transformers 5.24 goes on with the "
        "short factors, as it does not tell its rotation how long a sequence is; jaxkv takes the "
        "long ones.",
        "",
        "## Not read",
        "",
        "Decoders of transformers 5.24 that no family reads, by what is not built:",
        "",
        *(f"- {reason}: {models}." for reason, models in NOT_READ.items()),
        "",
    ]
    TABLE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
