"""A script that is asked for help says what it does, and does nothing."""

import sys

import pytest


@pytest.mark.parametrize("name", ["bench_host_memory", "bench_sessions"])
def test_help_measures_nothing(script, name, monkeypatch, capsys):
    benchmark = script(name)
    monkeypatch.setattr(benchmark, "LLM", None)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        benchmark.main()
    shown = capsys.readouterr().out
    assert "Measures" in shown
    assert f"docs/benchmarks/{name.removeprefix('bench_')}.json" in shown
