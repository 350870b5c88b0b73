"""The prefix cache benchmark: one side finds the shared tokens, the other none, and both give the
same output.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def prefix(script):
    return script("bench_prefix")


@pytest.mark.slow
def test_a_run_leaves_its_figures(tmp_path, scripts):
    command = [
        sys.executable,
        scripts / "bench_prefix.py",
        "--shape",
        "toy",
        "--requests",
        "3",
        "--rounds",
        "1",
    ]
    command += [
        "--prompt-len",
        "64",
        "--shared",
        "50",
        "--output-len",
        "2",
        "--rows",
        "4",
        "--long-prompt",
        "256",
    ]
    command += ["--deterministic", "--json", tmp_path / "result.json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"cpu", "cores", "versions", "command"} <= result.keys()
    lines = result["lines"]
    assert lines["lookup"].keys() == {"keys", "miss", "hit"}
    # Two of the three prompts take over the 3 whole pages among the 50 tokens.
    assert lines["shared"]["found"] == pytest.approx(2 * 48 / (3 * 64))
    assert lines["distinct"]["found"] == 0
    for name in ("shared", "distinct"):
        sides = lines[name]["rounds"]
        assert [run["found"] for run in sides["no cache"]] == [0]
        assert lines[name]["same_outputs"] == 1
        assert lines[name]["ratio"] == sides["no cache"][0]["run_s"] / sides["cache"][0]["run_s"]
        assert f"ratio {lines[name]['ratio']:.3f}" in shown


def test_rounds_share_what_they_say(prefix):
    options = SimpleNamespace(seed=3, shape="toy", requests=5, prompt_len=40)
    sides = SimpleNamespace(options=options)
    prompts = [
        prompt["prompt_token_ids"]
        for prompt in prefix.Sides.prompts(sides, num_shared=30, round_id=1)
    ]
    assert len({tuple(tokens[:30]) for tokens in prompts}) == 1
    assert len({tuple(tokens[30:]) for tokens in prompts}) == 5
    distinct = prefix.Sides.prompts(sides, num_shared=0, round_id=1)
    assert len({tuple(prompt["prompt_token_ids"][:16]) for prompt in distinct}) == 5


def test_timing_ends_with_its_block(prefix):
    class Owner:
        def twice(self, x):
            return 2 * x

    owner = Owner()
    with prefix.timed(owner, ("twice",)) as seconds:
        assert owner.twice(4) == 8
    assert (owner.twice(5), len(seconds)) == (10, 1)
