"""The side-by-side benchmark: both engines do the work that is counted, and a run ends with its
figures on record.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(
    not HAS_TORCH, reason="transformers' side needs torch (`.[parity]`)"
)


@pytest.fixture
def bench(script) -> SimpleNamespace:
    """The script and its two modules."""
    names = ("bench_generate", "bench_engines", "bench_models")
    return SimpleNamespace(**{name.removeprefix("bench_"): script(name) for name in names})


def options(**changes: object) -> SimpleNamespace:
    given = {
        "shape": "toy",
        "seed": 3,
        "requests": 7,
        "dtype": "float32",
        "malloc": "both",
        "vs": "transformers",
    }
    return SimpleNamespace(**(given | {"rounds": 3, "compile": True, "modes": ""} | changes))


@pytest.mark.slow
def test_a_run_leaves_its_figures(tmp_path, scripts):
    lines = "decode8,as_completed"
    command = [
        sys.executable,
        scripts / "bench_generate.py",
        "--shape",
        "toy",
        "--only",
        lines,
        "--requests",
        "3",
    ]
    command += [
        "--rounds",
        "2",
        "--json",
        tmp_path / "result.json",
        *(["--vs", "transformers"] if HAS_TORCH else []),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["prompts_that_agree"] == (4 if HAS_TORCH else None)
    assert {"python", "jax", "jaxlib", "torch", "transformers"} <= result["versions"].keys()
    assert result["options"]["rounds"] == 2
    assert {"cpu", "cores", "load_before"} <= result.keys()
    assert "programs  " in result["engines"]["jaxkv, default malloc"]
    sides = {name: list(line["sides"]) for name, line in result["lines"].items()}
    other = ["transformers"] if HAS_TORCH else []
    assert sides == {"decode8": ["jaxkv", *other], "as_completed": ["as_completed", "generate"]}
    for line in result["lines"].values():
        for side in line["sides"].values():
            values = side["rounds"][side["mode"]]
            assert (len(values), side["min"], side["max"]) == (2, min(values), max(values))
            assert side["median"] == pytest.approx(sum(values) / 2)
            assert f"{side['median']:.1f} " in shown
        medians = [side["median"] for side in line["sides"].values()]
        assert line["ratio"] == (medians[0] / medians[1] if len(medians) == 2 else None)


def test_without_torch_the_comparison_is_refused_by_name(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.generate, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench_generate.py", "--vs", "transformers"])
    with pytest.raises(SystemExit, match="2"):
        bench.generate.parse()
    assert "torch is not installed" in capsys.readouterr().err


@needs_torch
@pytest.mark.slow
def test_every_mode_gives_each_prompt_the_tokens_that_it_gets_alone(bench, tmp_path):
    directory = bench.models.make_checkpoint(tmp_path / "toy", "toy", seed=1)
    rng, output_lens = np.random.default_rng(0), [3, 9, 1, 12, 6, 5]
    prompts = [rng.integers(3, 256, n).tolist() for n in (40, 7, 23, 3, 18, 31)]
    work = bench.engines.Work(prompts=prompts, output_lens=output_lens)
    common = {"engine": "", "malloc": "default", "dtype": "float32"}
    reference, alone = bench.engines.Transformers(directory, "float32"), []
    for prompt, n in zip(prompts, output_lens, strict=True):
        one = bench.engines.Work(prompts=[prompt], output_lens=[n])
        alone += reference.run(bench.engines.Mode(**common, method="padded"), one)[1]
    assert [len(tokens) for tokens in alone] == output_lens
    for method, size, order in [
        ("padded", 4, "prompt"),
        ("padded", 4, "output"),
        ("continuous", 4, "prompt"),
    ]:
        mode = bench.engines.Mode(**common, method=method, batch_size=size, sort_by=order)
        assert reference.run(mode, work)[1] == alone, mode
    llm = bench.engines.Jaxkv(
        directory, "float32", lazy_compile=True, max_num_seqs=4, max_model_len=64
    )
    for method in ("generate", "as_completed"):
        assert llm.run(bench.engines.Mode(**common, method=method), work)[1] == alone, method


def test_decode_counts_neither_the_prompt_nor_the_first_token(bench):
    line = bench.generate.LINES["decode8"]
    work = bench.generate.make_work(line, options(), round_id=0)
    speed = bench.generate.tokens_per_s(line, work, lambda work: 5.0 + 0.25 * work.output_lens[0])
    assert speed == pytest.approx(8 / 0.25)
    with pytest.raises(RuntimeError, match="too busy"):
        bench.generate.tokens_per_s(line, work, lambda work: 1.0 / work.output_lens[0])


def test_rounds_have_the_same_lengths_and_new_prompts(bench):
    line = bench.generate.LINES["mixed"]
    first, again, second = (
        bench.generate.make_work(line, options(), round_id=i) for i in (1, 1, 2)
    )
    assert first == again
    assert [len(p) for p in first.prompts] == [len(p) for p in second.prompts]
    assert first.output_lens == second.output_lens
    assert not {tuple(p[:16]) for p in first.prompts} & {tuple(p[:16]) for p in second.prompts}


def test_the_faster_mode_stands_for_its_side_and_a_broken_one_is_on_record(bench, monkeypatch):
    speeds = {"bfloat16": 10.0, "float32": 20.0}

    def speed(bench, line, mode, *, round_id):
        if mode.method == "compiled":
            raise RuntimeError("no compiler here")
        order.append((mode.engine, round_id))
        return 40.0 if mode.engine == "jaxkv" else speeds[mode.dtype] + round_id

    order: list[tuple[str, int]] = []
    monkeypatch.setattr(bench.generate.Bench, "speed", speed)
    result = bench.generate.Bench(Path(), options(malloc="default", rounds=3)).compare("decode1")
    reference = result["sides"]["transformers"]
    assert (reference["mode"], reference["median"]) == ("float32 padded, default malloc", 22.0)
    assert (
        reference["probes"]["bfloat16 compiled, default malloc"] == "RuntimeError: no compiler here"
    )
    assert result["ratio"] == 40.0 / 22.0
    turns = [engine for engine, round_id in order if round_id == 2]
    assert turns == ["jaxkv", "transformers", "transformers"]


def test_modes_are_chosen_by_a_part_of_their_name(bench):
    every = bench.generate.sides("mixed", options(malloc="default"))
    some = bench.generate.sides("mixed", options(malloc="default", modes="bfloat16 padded of 16"))
    assert some["jaxkv"] == every["jaxkv"]
    chosen = [
        mode for mode in every["transformers"] if (mode.dtype, mode.batch_size) == ("bfloat16", 16)
    ]
    assert some["transformers"] == [mode for mode in chosen if mode.method == "padded"]
    assert len(some["transformers"]) == 2


def test_a_worker_has_the_malloc_settings_that_it_is_named_after(bench, monkeypatch):
    for name in bench.engines.MALLOC:
        monkeypatch.setenv(name, "7")
    for malloc, expected in (
        ("tuned", list(bench.engines.MALLOC.values())),
        ("default", [None] * 3),
    ):
        with bench.engines.start_worker(malloc) as worker:
            assert [
                worker.submit(os.getenv, name).result() for name in bench.engines.MALLOC
            ] == expected


def test_a_directory_with_another_model_is_refused(bench, tmp_path):
    made = bench.models.make_checkpoint(tmp_path / "toy", "toy", seed=1)
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    bench.models.make_checkpoint(made, "toy", seed=1)
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="got another"):
        bench.models.make_checkpoint(made, "110m", seed=1)
