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


def test_help_writes_no_defaults(script, monkeypatch, capsys):
    pytest.importorskip("transformers")
    defaults = script("family_defaults")
    monkeypatch.setattr(defaults, "DEFAULTS", None)
    monkeypatch.setattr(sys, "argv", ["family_defaults", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        defaults.main()
    assert "for every family" in capsys.readouterr().out
