"""The side-by-side benchmark: every engine does the work that is counted, and a run ends with its
figures on record.
"""

import importlib.util
import json
import subprocess
import sys
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
    given = {"shape": "toy", "seed": 3, "requests": 7, "only": ["decode8", "mixed"]}
    return SimpleNamespace(**(given | changes))


@pytest.mark.slow
def test_a_run_leaves_its_figures_and_names_what_is_missing(bench, tmp_path, scripts):
    record = tmp_path / "result.json"
    command = [sys.executable, scripts / "bench_generate.py", "--shape", "toy", "--json", record]
    command += ["--dtype", "float32", "--only", "prefill,decode8,mixed"]
    command += ["--requests", "3", "--rounds", "2"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = json.loads(record.read_text())
    present, missing = list(result["engines"]), result["missing"]
    ours = ["jaxkv", "jaxkv-xla", "jaxkv-int8_dynamic", "jaxkv-int4"]
    assert present[:5] == [*ours, *["transformers"] * HAS_TORCH]
    assert {*present, *missing} == {*bench.engines.ENGINES}
    for name, why in missing.items():
        assert why.startswith("No module named ")
        assert f"missing: {name}: {why}" in shown
    agreeing = result["prompts_of_8_that_agree"]
    for name in bench.engines.QUANTISED:  # they round more
        assert agreeing.pop(name, 0) <= 8
    assert agreeing == dict.fromkeys([name for name in present if name in agreeing], 8)
    assert {"python", "jax", "jaxlib"} <= result["engines"]["jaxkv"]["versions"].keys()
    assert {"cpu", "vectors", "cores", "load_before"} <= result.keys()
    assert list(result["lines"]) == ["prefill", "decode8", "mixed"]
    for of_engine in result["lines"].values():
        assert list(of_engine) == present
        for one in of_engine.values():
            assert len(one["rounds"]) == 2
            assert f"| {one['tokens_per_s']:,.1f} |" in shown
            ratio = of_engine["jaxkv"]["tokens_per_s"] / one["tokens_per_s"]
            assert one["jaxkv_tokens_per_s_ratio"] == ratio


@needs_torch
@pytest.mark.slow
def test_batches_of_transformers_give_each_prompt_the_tokens_that_it_gets_alone(
    bench, tmp_path, monkeypatch
):
    directory = bench.models.make_checkpoint(tmp_path / "toy", "toy", seed=1)
    rng, output_lens = np.random.default_rng(0), [3, 9, 1, 12, 6, 5]
    prompts = [rng.integers(3, 256, n).tolist() for n in (40, 7, 23, 3, 18, 31)]
    work = bench.engines.Work(prompts=prompts, output_lens=output_lens)
    reference, alone = bench.engines.Transformers(directory, "float32"), []
    for prompt, n in zip(prompts, output_lens, strict=True):
        alone += reference.run(bench.engines.Work(prompts=[prompt], output_lens=[n]))
    assert [len(tokens) for tokens in alone] == output_lens
    monkeypatch.setattr(bench.engines, "BATCH", 4)
    assert reference.run(work) == alone
    llm = bench.engines.Jaxkv(
        directory, "float32", lazy_compile=True, max_num_seqs=4, max_model_len=64
    )
    assert llm.run(work) == alone


def test_decode_counts_neither_the_prompt_nor_the_first_token(bench):
    line = bench.generate.LINES["decode8"]
    work = bench.generate.make_work(line, options(), round_id=0)

    def run(work):
        return {"wall_s": 5.0 + 0.25 * work.output_lens[0], "cpu_s": 7.0 + work.output_lens[0]}

    spent = bench.generate.seconds_of(line, work, run)
    assert spent == {"wall_s": pytest.approx(64 * 0.25), "cpu_s": pytest.approx(64)}
    assert bench.generate.num_tokens(line, work) == 8 * 64
    with pytest.raises(RuntimeError, match="too busy"):
        bench.generate.seconds_of(line, work, lambda work: {"wall_s": 1.0 / work.output_lens[0]})


def test_rounds_have_the_same_lengths_and_new_prompts(bench):
    line = bench.generate.LINES["mixed"]
    first, again, second = (
        bench.generate.make_work(line, options(), round_id=i) for i in (1, 1, 2)
    )
    assert first == again
    assert [len(p) for p in first.prompts] == [len(p) for p in second.prompts]
    assert first.output_lens == second.output_lens
    assert not {tuple(p[:16]) for p in first.prompts} & {tuple(p[:16]) for p in second.prompts}


class FakeWorker:
    """Answers with as many seconds as it is told, and notes that it was asked."""

    def __init__(self, name: str, seconds: list[float], turns: list[str], token: int = 5) -> None:
        self.name, self.seconds, self.turns, self.token = name, seconds, turns, token

    def measure(self, work) -> dict:
        self.turns.append(self.name)
        seconds = self.seconds.pop(0)
        tokens = [[self.token] * n for n in work.output_lens]
        return {"wall_s": seconds, "cpu_s": 2 * seconds, "tokens": tokens}


def test_engines_take_turns_and_medians_are_compared(bench):
    turns: list[str] = []
    workers = {
        "jaxkv": FakeWorker("jaxkv", [1.0, 9.0, 2.0], turns),
        "vllm": FakeWorker("vllm", [4.0, 3.0, 5.0], turns),
    }
    run = bench.generate.Bench(workers, options(only=["mixed"]))
    for round_id in (1, 2, 3):
        run.measure("mixed", round_id=round_id)
    assert turns == ["vllm", "jaxkv", "jaxkv", "vllm", "vllm", "jaxkv"]
    found = run.results()["mixed"]
    work = bench.generate.make_work(bench.generate.LINES["mixed"], options(), round_id=1)
    assert found["jaxkv"]["tokens_per_s"] == sum(work.output_lens) / 2.0
    assert found["vllm"]["jaxkv_tokens_per_s_ratio"] == 2.0
    assert found["vllm"]["jaxkv_tokens_per_cpu_s_ratio"] == 2.0


def test_a_page_gets_the_table_between_its_comments(bench, tmp_path):
    page, at = tmp_path / "page.md", bench.generate
    page.write_text(f"before\n{at.BEGIN}old\n{at.END}after\n")
    workers = {"jaxkv": FakeWorker("jaxkv", [2.0], [])}
    run = at.Bench(workers, options(only=["mixed"]))
    run.measure("mixed", round_id=1)
    result = at.environment() | {
        "options": vars(options(dtype="bfloat16")),
        "engines": {"jaxkv": {"versions": {"jax": "1.2"}}},
        "missing": {"vllm": "No module named 'vllm'"},
        "lines": run.results(),
    }
    at.write_page(page, result)
    text = page.read_text()
    assert text.startswith(f"before\n{at.BEGIN}")
    assert text.endswith(f"{at.END}after\n")
    assert "old" not in text
    assert at.table(result["lines"]) in text
    assert "jaxkv: jax 1.2" in text
    assert "Missing: vllm (No module named 'vllm')" in text
    figures = tmp_path / "figures.json"
    at.record(SimpleNamespace(json=figures, page=page), result)
    assert page.read_text() == text
    assert json.loads(figures.read_text()) == result


def test_an_engine_with_other_tokens_is_refused(bench):
    workers = {"jaxkv": FakeWorker("jaxkv", [1.0], []), "vllm": FakeWorker("vllm", [1.0], [], 6)}
    with pytest.raises(RuntimeError, match="expected the same first tokens"):
        bench.generate.check_agreement(workers, options())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "jaxkv,sglang"], "expected some of jaxkv, jaxkv-xla, "),
        (["--only", "decode9"], "--only: expected some of prefill"),
        (["--engines", "jaxkv", "--python", "vllm=python"], "expected ENGINE=PATH of one of"),
    ],
)
def test_unknown_names_are_refused(bench, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["bench_generate.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        bench.generate.parse()
    assert message in capsys.readouterr().err


def test_a_directory_with_another_model_is_refused(bench, tmp_path):
    made = bench.models.make_checkpoint(tmp_path / "toy", "toy", seed=1)
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    bench.models.make_checkpoint(made, "toy", seed=1)
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="got another"):
        bench.models.make_checkpoint(made, "110m", seed=1)
