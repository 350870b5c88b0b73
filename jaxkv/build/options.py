"""Holds every keyword of `LLM` once: its default, its sentence of documentation and its check.

`LLM`'s signature and documentation and the engine flags of the `jaxkv` command are made from
`EngineOptions`, so that a new keyword is one field here and the code that reads it. Nothing here
imports JAX: the command answers `--help` at once.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from decimal import Decimal
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from jaxkv.build.vllm_arguments import as_options
from jaxkv.config import IS_BOOL, Check, is_int, take_over
from jaxkv.structured import are_marks

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

ENGINES = ("generate", "batch", "serve")
TARGETS = ("plan", "check")
"""Commands of `jaxkv`: those that run an engine, and those that ask about chips elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """Holds what is known of an option beside its default: its sentence, its check, the commands
    that have a flag of its name, and other names of that flag.
    """

    doc: str
    check: Check | None
    commands: tuple[str, ...]
    aliases: tuple[str, ...]


def option(
    default: T,
    doc: str,
    *,
    check: Check | None = None,
    commands: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> T:
    """Returns a dataclass field of `EngineOptions`."""
    about = About(doc=doc, check=check, commands=commands, aliases=aliases)
    return field(default=default, metadata={"about": about})


def one_of(*values: str) -> Check:
    """Returns the check of an option that has a few possible values."""
    return Check(
        expected=f"one of {', '.join(values)}",
        holds=lambda value: isinstance(value, str) and value in values,
    )


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)


IS_LIST = Check(
    expected="None or a list", holds=lambda value: value is None or isinstance(value, list | tuple)
)
IS_DICT = Check(
    expected="None or a dict with texts as keys",
    holds=lambda value: (
        value is None or (isinstance(value, dict) and all(isinstance(key, str) for key in value))
    ),
)
REASONING_KEYS = ("reasoning_start_str", "reasoning_end_str")
IS_REASONING = Check(
    expected='None or {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}',
    holds=lambda value: (
        value is None
        or (
            isinstance(value, Mapping)
            and value.keys() == {*REASONING_KEYS}
            and are_marks([value[key] for key in REASONING_KEYS])
        )
    ),
)
IS_TEXT = Check(expected="a name", holds=lambda value: isinstance(value, str))
IS_PATH = Check(
    expected="a directory or a hub id", holds=lambda value: value is None or _is_path(value)
)
IS_DIRECTORY = Check(
    expected="None or the path of a directory",
    holds=lambda value: value is None or (_is_path(value) and os.fspath(value) != ""),
)
IS_TEXT_OR_NONE = Check(
    expected="None or a text", holds=lambda value: value is None or isinstance(value, str)
)
IS_COUNT = Check(expected="a number >= 0", holds=lambda value: is_int(value) and value >= 0)
IS_SIZE = Check(expected="a number >= 1", holds=lambda value: is_int(value) and value >= 1)
IS_COUNT_OR_NONE = Check(
    expected="None or a number >= 0",
    holds=lambda value: value is None or (is_int(value) and value >= 0),
)
IS_PAIR_OR_NONE = Check(
    expected="None or two numbers of devices >= 1",
    holds=lambda value: (
        value is None
        or (
            isinstance(value, tuple | list)
            and len(value) == 2
            and all(is_int(one) and one >= 1 for one in value)
        )
    ),
)
IS_SECRET = Check(
    expected="bytes or None", holds=lambda value: isinstance(value, bytes | None), is_secret=True
)
IS_TOKEN = Check(
    expected="a text, True (the user's own), False (none) or None",
    holds=lambda value: isinstance(value, str | bool | None),
    is_secret=True,
)
IS_PART = Check(
    expected="a number in (0, 1]",
    holds=lambda value: type(value) in (int, float) and 0 < value <= 1,
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Holds what a caller of `LLM` asked for, each value checked as far as it can be without the
    model: what depends on model or device is checked where a `Blueprint` is made.

    Raises: ValueError naming the option for a value that is never possible.
    """

    model: str | os.PathLike[str] | None = option(
        None,
        "a local Hugging Face directory or a hub id (default: the small demo model that ships "
        "with jaxkv)",
        check=IS_PATH,
        commands=ENGINES,
    )
    _: KW_ONLY
    tokenizer: str | os.PathLike[str] | None = option(
        None,
        "directory or hub id of the tokenizer, if not the model's",
        check=IS_PATH,
        commands=ENGINES,
    )
    skip_tokenizer_init: bool = option(
        False, "work without a tokenizer: prompts and outputs are token ids", check=IS_BOOL
    )
    revision: str | None = option(
        None, "branch, tag or commit of a hub id", check=IS_TEXT_OR_NONE, commands=ENGINES
    )
    tokenizer_revision: str | None = option(
        None,
        "the same of the tokenizer, which then comes from the hub",
        check=IS_TEXT_OR_NONE,
        commands=ENGINES,
    )
    trust_remote_code: bool = option(
        False,
        "whether the tokenizer may be Python code of the checkpoint's own, which can do all that "
        "you can; a model's code never runs",
        check=IS_BOOL,
        commands=ENGINES,
    )
    hf_token: str | bool | None = option(
        None,
        "what the hub is asked with for private models (default: HF_TOKEN, or the user's login)",
        check=IS_TOKEN,
    )
    download_dir: str | os.PathLike[str] | None = option(
        None,
        "where files of the hub are kept (default: the hub's cache)",
        check=IS_PATH,
        commands=ENGINES,
    )
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        "what replaces values of config.json, objects key by key, before anything is read from it",
        check=IS_DICT,
        commands=ENGINES,
    )
    chat_template: str | os.PathLike[str] | None = option(
        None,
        "a file with the chat template, or its text, instead of the tokenizer's",
        check=IS_PATH,
        commands=ENGINES,
    )
    generation_config: str = option(
        "auto",
        "whether parameters that nobody gives are those of generation_config.json (auto) or "
        "vLLM's (vllm)",
        check=one_of("auto", "vllm"),
        commands=ENGINES,
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        "what replaces values of generation_config.json for parameters that nobody gives, such as "
        '{"temperature": 0, "max_new_tokens": 64}',
        check=IS_DICT,
        commands=ENGINES,
    )
    dtype: str = option(
        "auto",
        "auto, bfloat16 or float32; auto is bfloat16 unless XLA multiplies on a CPU that has no "
        "instructions for it, and in a directory made by `jaxkv convert` what that stores",
        check=one_of("auto", "bfloat16", "float32"),
        commands=ENGINES + TARGETS,
    )
    runner: str = option(
        "auto",
        "generate; pooling for `embed`, `classify`, `score` and `reward` in its place; auto: "
        "pooling for checkpoints of sentence-transformers and sequence classifiers",
        check=one_of("auto", "generate", "pooling"),
        commands=("batch", "serve"),
    )
    load_format: str = option(
        "auto",
        "auto; unchecked to load weights that hold NaN or infinity, or have changed since "
        "`jaxkv convert`, instead of refusing them; or dummy for random weights of a model whose "
        "config.json is all there is, to measure its speed and memory",
        check=one_of("auto", "unchecked", "dummy"),
        commands=ENGINES,
    )
    quantization: str | None = option(
        None,
        "what the matrices of the layers are quantised to as they are loaded: int8, int4 (by "
        "groups of 128) or fp8, or int8_dynamic, which multiplies int8 with int8, quantises each "
        "token for that, and has the head in int8 too; None: as they are stored. Of weights that "
        "are stored quantised, the method that their config.json names",
        check=IS_TEXT_OR_NONE,
        commands=ENGINES + TARGETS,
        aliases=("-q",),
    )
    tensor_parallel_size: int = option(
        1,
        "devices that divide the model and its KV cache between them by heads",
        commands=ENGINES + TARGETS,
        aliases=("-tp",),
    )
    decode_context_parallel_size: int = option(
        1,
        "how many of the devices that have the same KV heads, which with latent attention are all "
        "of tensor_parallel_size, divide the tokens of the KV cache between them",
        commands=ENGINES + TARGETS,
        aliases=("-dcp",),
    )
    enable_expert_parallel: bool = option(
        False,
        "whether a device of several has some routed experts and all of each, not a part of each",
        check=IS_BOOL,
        commands=ENGINES + TARGETS,
        aliases=("-ep",),
    )
    data_parallel_size: int = option(
        1,
        "engines, each with all weights and a KV cache on `tensor_parallel_size` devices of its "
        "own, between which requests are divided",
        check=IS_SIZE,
        commands=("batch", "serve"),
        aliases=("-dp",),
    )
    disaggregate: Sequence[int] | None = option(
        None,
        "(p, d): prompts are computed on the first p devices and outputs on the next d, each part "
        "with all weights and a KV cache of its own, so that long prompts do not hold up outputs",
        check=IS_PAIR_OR_NONE,
    )
    nnodes: int = option(
        1,
        "processes, one for each host, that have one engine together: tensor_parallel_size is then "
        "the devices of all (docs/usage.md#several-hosts)",
        check=IS_SIZE,
        commands=ENGINES,
        aliases=("-n",),
    )
    node_rank: int | None = option(
        None,
        "which of nnodes this one is (default: what JAX finds out on a TPU or in a cluster's job)",
        check=IS_COUNT_OR_NONE,
        commands=ENGINES,
        aliases=("-r",),
    )
    master_addr: str | None = option(
        None,
        "the address of the first process's host (default: as JAX finds it)",
        check=IS_TEXT_OR_NONE,
        commands=ENGINES,
    )
    master_port: int = option(29501, "a free port of that host", check=IS_SIZE, commands=ENGINES)
    max_model_len: int | None = option(
        None,
        "longest prompt and output together, in tokens (default: what the checkpoint declares)",
        commands=ENGINES + TARGETS,
    )
    max_num_seqs: int | None = option(
        None,
        "rows that run at once (default: 64 on a CPU, 256 elsewhere)",
        commands=("batch", "serve", *TARGETS),
    )
    max_num_batched_tokens: int = option(
        2048, "tokens per step", commands=("batch", "serve", *TARGETS)
    )
    block_size: int | None = option(
        None,
        "tokens per page, 8 to 128 (default: 16 on a CPU, 64 elsewhere, 128 on TPUs where 64 have "
        "less than 256 KiB in a layer of a device)",
        commands=ENGINES + TARGETS,
    )
    backend: str = option(
        "auto",
        "what runs attention: auto, xla, pallas_tpu or mosaic_gpu",
        commands=ENGINES + TARGETS,
    )
    kv_cache_dtype: str = option(
        "auto",
        "auto (as dtype), bfloat16 or float32, or smaller (docs/kv-codecs.md): int8, fp8_e4m3, "
        "fp8_e5m2, int4, turboquant4, turboquant3, turboquant2.5",
        check=IS_TEXT,
        commands=ENGINES + TARGETS,
        aliases=("--kv-dtype",),
    )
    kv_cache_dtype_skip_layers: Sequence[int | str] | None = option(
        None,
        "layers whose cache stays in dtype all the same, by number (-1 is the last), or "
        '"sliding_window" for all that have one',
        commands=ENGINES + TARGETS,
    )
    kv_policy: str = option(
        "full",
        "what stays of a request's cache when it takes more than kv_budget "
        "(docs/kv-policies.md): full (everything), streaming, page_norm, h2o_page, snapkv_page, "
        'entropy; "streaming:int8" first demotes to int8; with quest everything stays, and the '
        "budget is what a new token reads",
        commands=ENGINES + TARGETS,
    )
    kv_budget: int | None = option(
        None,
        "tokens whose bytes kv_policy leaves a request",
        commands=ENGINES + TARGETS,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the cache in bytes (default: what max_num_seqs rows of max_model_len take, "
        "within gpu_memory_utilization)",
        commands=("batch", "serve"),
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "size of the cache in pages, instead of as many as fit",
        commands=("batch", "serve", "check"),
        aliases=("--pages",),
    )
    gpu_memory_utilization: float = option(
        0.9,
        "part of the device's memory that is used (on a CPU of the available memory, and at most "
        "a quarter of it for the cache)",
        check=IS_PART,
        commands=ENGINES + TARGETS,
    )
    enable_prefix_caching: bool = option(
        True,
        "full pages of prompts and outputs stay in the cache until their room is needed, and "
        "requests that begin with the same tokens take them over",
        check=IS_BOOL,
        commands=("batch", "serve"),
    )
    kv_host_bytes: int = option(
        0,
        "host memory for pages that the prefix cache has no room for on the device, in bytes; not "
        "for models with recurrent states, nor with a kv_policy",
        check=IS_COUNT,
        commands=ENGINES,
    )
    kv_disk: str | os.PathLike[str] | None = option(
        None,
        "a directory for pages, which this engine has to itself: a later start with the same model "
        "finds them (docs/tiers.md); needs kv_disk_bytes, and is not for what kv_host_bytes is not "
        "for",
        check=IS_DIRECTORY,
        commands=ENGINES,
    )
    kv_disk_bytes: int = option(
        0,
        "the most that files in kv_disk take, in bytes: those used least lately go",
        check=IS_COUNT,
        commands=ENGINES,
    )
    num_state_snapshots: int | None = option(
        None,
        "of a model with recurrent states: how many the prefix cache keeps, each of which takes "
        "what a row's state does (default: a quarter of max_num_seqs, at least 8; 0 without "
        "enable_prefix_caching)",
        check=IS_COUNT_OR_NONE,
        commands=TARGETS,
    )
    speculative_config: Mapping[str, Any] | None = option(
        None,
        "proposes tokens ahead and verifies several in one step, with the tokens as without "
        '(docs/speculation.md): {"method": "ngram", "num_speculative_tokens": 4}, or with '
        '"method": "draft_model" or "eagle3" the "model" that proposes them, or "method": "mtp"',
        check=IS_DICT,
        commands=ENGINES + TARGETS,
        aliases=("-sc",),
    )
    reasoning_config: Mapping[str, Any] | None = option(
        None,
        "the texts around what the model reasons, for thinking_token_budget of a request: "
        '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}, of which the second '
        "may begin with a sentence that leads to the answer",
        check=IS_REASONING,
        commands=ENGINES,
    )
    prefix_cache_secret: bytes | None = option(
        None,
        "what the keys of cached pages are derived from, by default random for each engine",
        check=IS_SECRET,
    )
    enable_lora: bool = option(
        False,
        "requests may have LoRA adapters (lora_request, docs/lora.md); not with disaggregate",
        check=IS_BOOL,
        commands=("batch", "serve"),
    )
    max_loras: int = option(
        1,
        "with enable_lora: adapters that are on the device at once",
        check=IS_SIZE,
        commands=("batch", "serve"),
    )
    max_lora_rank: int = option(
        16,
        "with enable_lora: the largest rank, for which memory is taken",
        check=IS_SIZE,
        commands=ENGINES,
    )
    max_cpu_loras: int | None = option(
        None,
        "with enable_lora: adapters that host memory keeps, at least max_loras (the default)",
        check=IS_COUNT_OR_NONE,
        commands=("batch", "serve"),
    )
    seed: int = option(0, "seed of requests that bring none", commands=("serve",))
    max_logprobs: int = option(
        20,
        "the most that a request may ask for; steps have room for as many per token (-1: the "
        "vocabulary)",
        commands=("serve",),
    )
    deterministic: bool = option(
        False,
        "on a CPU, the same tokens and logprobs to the last bit, however a prompt was cut, cached "
        "or preempted (default: whatever runs beside it; what it costs is in "
        "docs/architecture.md)",
        check=IS_BOOL,
    )
    lazy_compile: bool = option(
        False,
        "compile each step on first use instead of all from the start",
        check=IS_BOOL,
        commands=ENGINES,
    )

    def __post_init__(self) -> None:
        take_over(self)
        for name, about in ABOUT.items():
            if about.check is not None:
                about.check(name, getattr(self, name))
        for name in ("tokenizer", "tokenizer_revision", "chat_template"):
            if self.skip_tokenizer_init and (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name}: expected None with skip_tokenizer_init=True, got {value!r:.80}"
                )
        for name in ("node_rank", "master_addr"):
            if self.nnodes == 1 and (got := getattr(self, name)) not in MEANS_NOTHING[name]:
                raise ValueError(f"{name}: expected none with nnodes=1, got {got!r}")
        if self.node_rank is not None and self.node_rank >= max(1, self.nnodes):
            raise ValueError(
                f"node_rank: expected a number below nnodes={self.nnodes}, got {self.node_rank}"
            )
        if self.node_rank is not None and self.nnodes > 1 and self.master_addr is None:
            raise ValueError("master_addr: expected an address with node_rank, got None")
        port = DEFAULTS["master_port"]
        if self.nnodes > 1 and self.master_addr is None and self.master_port != port:
            raise ValueError(
                f"master_port: expected {port} without master_addr, since JAX chooses then, got "
                f"{self.master_port}"
            )
        if (self.kv_disk is None) != (self.kv_disk_bytes == 0):
            raise ValueError(
                f"kv_disk_bytes: expected a number > 0 with kv_disk, and 0 without, got "
                f"{self.kv_disk_bytes} with kv_disk={self.kv_disk!r}"
            )
        if self.data_parallel_size > 1 and self.kv_disk is not None:
            raise ValueError(
                f"kv_disk: expected None with data_parallel_size {self.data_parallel_size}, since "
                f"a directory is one engine's, got {self.kv_disk!r}"
            )
        for name in OF_LORA:
            if not self.enable_lora and (got := getattr(self, name)) != DEFAULTS[name]:
                raise ValueError(f"{name}: expected none without enable_lora, got {got!r}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras: expected None or at least max_loras={self.max_loras}, got "
                f"{self.max_cpu_loras}"
            )
        if self.disaggregate is not None:
            for name, value in ALONE.items():
                if (got := getattr(self, name)) != value:
                    raise ValueError(f"{name}: expected {value!r} with disaggregate, got {got!r}")

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """Returns the texts of `reasoning_config`."""
        given = self.reasoning_config
        return None if given is None else (given[REASONING_KEYS[0]], given[REASONING_KEYS[1]])


MEANS_NOTHING = {"node_rank": (None, 0), "master_addr": (None, "127.0.0.1")}
"""Values of one process; those that are not None are vLLM's defaults."""

OF_LORA = ("max_loras", "max_lora_rank", "max_cpu_loras")
ALONE = {
    "tensor_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_prefix_caching": True,
    "kv_policy": "full",
    "kv_host_bytes": 0,
    "kv_disk": None,
    "speculative_config": None,
    "enable_lora": False,
}
"""Values that `disaggregate` needs: each part has devices of its own, and pages go from one to the
other as those of the prefix cache.
"""

ABOUT: dict[str, About] = {one.name: one.metadata["about"] for one in fields(EngineOptions)}
DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(EngineOptions)}


def takes(
    options: Callable[P, EngineOptions],
) -> Callable[[Callable[[S, EngineOptions], None]], Callable[Concatenate[S, P], None]]:
    """Makes an `__init__` that is written for `EngineOptions` take their keywords, for type
    checkers and `inspect.signature` too; it takes vLLM's other arguments as well
    (`build.vllm_arguments`).
    """
    ours = inspect.signature(options).parameters.values()
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD, annotation="Any")

    def decorate(init: Callable[[S, EngineOptions], None]) -> Callable[Concatenate[S, P], None]:
        @wraps(init)
        def from_keywords(self: S, *args: P.args, **keywords: P.kwargs) -> None:
            init(self, options(*args, **as_options(keywords, ABOUT)))

        signature = inspect.Signature([this, *ours, others], return_annotation="None")
        setattr(from_keywords, "__signature__", signature)  # noqa: B010
        return from_keywords

    return decorate


def describe_options() -> str:
    """Returns a line for each option, as the documentation of `LLM` has them."""
    lines = (
        textwrap.fill(
            f"{name}: {about.doc}.",
            width=100,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
        )
        for name, about in ABOUT.items()
    )
    return "\n".join(lines).lstrip()


def flags(
    command: str | None, options: type = EngineOptions
) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Returns, by option, the names and the settings that `argparse` takes for each flag of a
    command (None: for all options). A flag that is not given is left out of what is parsed:
    defaults are those of `options`, a dataclass of `option`s.
    """
    hints = get_type_hints(options)
    found = {}
    for one in fields(options):
        about: About = one.metadata["about"]
        if command is None or command in about.commands:
            names = [flag_name(one.name), *about.aliases]
            found[one.name] = (names, flag_settings(hints[one.name], about.doc, one.default))
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text!r:.80}: {error}") from error


NUMBER = re.compile(r"(-?\d+)([kmgtKMGT]?)|(\d+\.\d+)([kmgt])")


def whole_number(text: str) -> int:
    """Reads a whole number as vLLM's flags do: 4k is 4,000, 4K is 4,096 and 1.5k is 1,500."""
    found = NUMBER.fullmatch(text.strip().replace("_", ""))
    if found is None:
        raise argparse.ArgumentTypeError(
            f"expected a whole number such as 4096, 4k (4,000) or 4K (4,096), got {text!r:.80}"
        )
    written, unit = found[1] or found[3], found[2] or found[4] or ""
    power = "kmgt".find(unit.lower()) + 1 if unit else 0
    return int(Decimal(written) * (1024 if unit.isupper() else 1000) ** power)


def flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flag_settings(hint: Any, doc: str, default: Any) -> dict[str, Any]:
    """Returns what `argparse` takes for an option of this type."""
    kinds = set(get_args(hint)) or {hint}
    settings: dict[str, Any] = {"help": doc if default is None else f"{doc} (default: {default})"}
    if any(get_origin(kind) is Mapping for kind in kinds):
        return settings | {"type": _json, "metavar": "JSON"}
    if any(get_origin(kind) is Sequence for kind in kinds):
        return settings | {"nargs": "+", "metavar": "L"}
    if bool in kinds:
        return settings | {"action": argparse.BooleanOptionalAction}
    number = next((kind for kind in (int, float) if kind in kinds), None)
    if number is None:
        return settings
    return settings | {"type": whole_number if number is int else number, "metavar": "N"}
