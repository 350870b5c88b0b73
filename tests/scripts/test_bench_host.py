"""The host-time benchmark: the engine really does the work that is timed."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def host(script):
    return script("bench_host")


@pytest.mark.slow
def test_a_run_leaves_its_figures(tmp_path, scripts):
    command = [
        sys.executable,
        scripts / "bench_host.py",
        "--rows",
        "4",
        "--loops",
        "8",
        "--turns",
        "2",
    ]
    command += [
        "--prompt-len",
        "20",
        "40",
        "--output-len",
        "24",
        "--json",
        tmp_path / "result.json",
    ]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"cpu", "cores", "versions", "command"} <= result.keys()
    names = {
        f"{what}, gc {state}" for what in ("together", "tokens", "text") for state in ("on", "off")
    }
    assert result["lines"].keys() == names
    for name, line in result["lines"].items():
        assert line["num_loops"] == 8
        assert 20 < line["mean_live_len"] < 64
        assert line["us_per_step"].keys() == {"total", "plan", "inputs", "outputs"}
        assert name in shown
    assert all(of["num"] == 0 for of in result["lines"]["text, gc off"]["collections"].values())


@pytest.mark.parametrize("detokenize", [False, True])
def test_loops_have_all_rows_but_those_that_leave_which_are_replaced(host, detokenize):
    options = SimpleNamespace(rows=4, prompt_len=(20, 40), output_len=64, block_size=8, seed=0)
    load, figures = host.Load(options, detokenize=detokenize), host.Figures()
    load.run(24, figures)
    load.engine.check()
    assert len(figures.num_rows) == len(figures.total_us) == 24
    assert sum(figures.num_rows) > 3 * 24
    assert figures.num_finished > 4
    assert len(load.engine._requests) == 4
    parts = [sum(of) for of in zip(*figures.part_us.values(), strict=True)]
    assert parts == pytest.approx(figures.total_us)


def test_of_the_slots_that_rows_of_758_tokens_take_97_percent_hold_one(host):
    """Last pages and what the next loop may write are counted as empty."""
    options = SimpleNamespace(rows=32, prompt_len=(256, 768), output_len=512, block_size=16, seed=0)
    load, figures = host.Load(options, detokenize=False), host.Figures()
    load.run(60, figures)
    assert min(figures.live_len) > 512
    assert 0.97 <= load.utilization < 0.995
