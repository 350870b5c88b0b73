"""Every keyword of `LLM` stands once: signature, documentation, flags and checks come from there."""

import argparse
import dataclasses
import inspect
import os
import re
from collections.abc import Sequence

import pytest

from jaxkv import LLM, EngineArgs
from jaxkv.api import cli
from jaxkv.build.options import (
    ABOUT,
    DEFAULTS,
    ENGINES,
    TARGETS,
    EngineOptions,
    flag_settings,
    flags,
)


def parse(command: str, *arguments: str) -> dict:
    return cli._engine_options(cli._parser().parse_args([command, *arguments]), command)


def test_the_signature_of_llm_is_the_options():
    this, *ours, others = inspect.signature(LLM.__init__).parameters.values()
    assert (this.name, others.kind) == ("self", inspect.Parameter.VAR_KEYWORD)
    assert {one.name: one.default for one in ours} == DEFAULTS
    assert [one.name for one in ours if one.kind is not inspect.Parameter.KEYWORD_ONLY] == ["model"]
    assert list(inspect.signature(LLM).parameters.values()) == [*ours, others]


def test_the_documentation_of_llm_has_each_option_once_in_lines_of_100():
    lines = LLM.__doc__.splitlines()
    assert max(map(len, lines)) <= 100
    flat = " ".join(LLM.__doc__.split())
    for name, about in ABOUT.items():
        assert flat.count(f" {name}: {about.doc}.") == 1


def test_a_flag_sets_its_option_and_what_is_not_given_stays_out():
    given = ["--kv-dtype", "int8", "--kv-cache-dtype-skip-layers", "0", "-1", "--kv-budget", "64"]
    expected = {
        "kv_cache_dtype": "int8",
        "kv_cache_dtype_skip_layers": ("0", "-1"),
        "kv_budget": 64,
    }
    for command, others in (
        ("generate", []),
        ("batch", ["-i", "in", "-o", "out"]),
        ("plan", ["m"]),
        ("check", []),
    ):
        assert parse(command, *others) == {}
        assert parse(command, *others, *given) == expected
    assert parse("check", "--pages", "7") == {"num_gpu_blocks_override": 7}
    assert parse("plan", "m", "--gpu-memory-utilization", "0.5") == {"gpu_memory_utilization": 0.5}
    assert EngineOptions(**expected).kv_budget == 64


def test_every_command_has_the_flags_of_its_options(capsys):
    for command in (*ENGINES, *TARGETS):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        shown = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
        assert {names[0] for names, _ in flags(command).values()} <= shown
    assert flags("batch").keys() <= flags("serve").keys()


def test_a_flag_reads_what_its_option_takes():
    parser = argparse.ArgumentParser()
    for name, (hint, default) in {
        "count": (int | None, None),
        "part": (float, 0.5),
        "loud": (bool, True),
        "layers": (Sequence[int | str] | None, None),
        "path": (str | os.PathLike[str] | None, None),
    }.items():
        parser.add_argument(f"--{name}", **flag_settings(hint, f"the {name}", default))
    found = parser.parse_args(
        [
            "--count",
            "3",
            "--part",
            "0.25",
            "--no-loud",
            "--layers",
            "0",
            "-1",
            "--path",
            "somewhere",
        ]
    )
    assert (found.count, found.part, found.loud) == (3, 0.25, False)
    assert (found.layers, found.path) == (["0", "-1"], "somewhere")
    assert "the part (default: 0.5)" in parser.format_help()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dtype", "float16", "dtype: expected one of auto, bfloat16, float32, got 'float16'"),
        ("load_format", "pt", "load_format: expected one of auto, unchecked, dummy, got 'pt'"),
        ("enable_prefix_caching", 1, "enable_prefix_caching: expected True or False, got 1"),
        ("max_loras", 2, "max_loras: expected none without enable_lora, got 2"),
        ("prefix_cache_secret", "s3cret", "prefix_cache_secret: expected bytes or None, got str"),
        *(
            ("gpu_memory_utilization", value, r"expected a number in \(0, 1\], got ")
            for value in (0, 1.01, float("nan"), "0.9")
        ),
    ],
)
def test_a_value_that_is_never_possible_is_refused_by_name(name, value, message):
    with pytest.raises(ValueError, match=message):
        EngineOptions(**{name: value})


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("4k", 4000), ("32K", 32768), ("1m", 10**6), ("1.5k", 1500), ("-1", -1)],
)
def test_whole_numbers_of_flags_are_read_as_vllm_reads_them(text, number):
    own = argparse.ArgumentParser()
    for names, settings in flags("serve").values():
        own.add_argument(*names, **settings)
    for parser in (own, EngineArgs.add_cli_args(argparse.ArgumentParser())):
        args = parser.parse_args(["--max-model-len", text, "-tp", "2", "-q", "int8"])
        read = args.max_model_len, args.tensor_parallel_size, args.quantization
        assert read == (number, 2, "int8")


def test_options_are_frozen_and_all_but_the_model_are_keywords():
    made = EngineOptions("somewhere")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seed = 1
    with pytest.raises(TypeError):
        EngineOptions("somewhere", "else")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ("skip_tokenizer_init", "deterministic", "lazy_compile")),
        *((name, 1) for name in ("enable_prefix_caching", "deterministic")),
        *((name, value) for name in ("model", "tokenizer") for value in (123, b"demo", ["demo"])),
        ("revision", 5),
        ("kv_cache_dtype", ["int8"]),
        ("dtype", ["float32"]),
        ("gpu_memory_utilization", True),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got {re.escape(repr(value))}$"):
        EngineOptions(**{name: value})
