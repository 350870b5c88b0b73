"""Lines answered in Ray Data's actors get the rows that one process gives them: none is lost, none
is there twice, whichever actor is killed.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxkv.api.batch_files import open_output, run_batch
from jaxkv.api.llm import LLM
from jaxkv.ray import Generate

SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "dtype": "float32",
    "lazy_compile": True,
}
PARAMS = {"temperature": 0.0, "max_tokens": 8}
USER = {"role": "user", "content": "The end"}
LINES = [
    {"id": 1, "prompt": "Once upon a time"},
    {"id": "1", "prompt": "One by one", "params": {"temperature": 1.5}},
    {"id": "chat", "messages": [USER]},
    {
        "custom_id": "openai",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "model", "messages": [USER], "logprobs": True},
    },
    {"id": "refused", "prompt": "The end", "params": {"temperature": -1}},
    {"id": "too long", "prompt": "The end" * 200},
    {"id": None, "prompt": "The end"},
]
pytestmark = pytest.mark.usefixtures("quick_compile", "one_loop")


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(checkpoint, **SMALL)


def in_order(rows: list[dict]) -> list[dict]:
    """The rows without the time at which each was made."""
    for row in rows:
        ((row.get("response") or {}).get("body") or {}).pop("created", None)
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def of_one_process(llm: LLM, lines: list[dict], folder: Path) -> list[dict]:
    """What `run_batch` writes."""
    source, output = folder / "in.jsonl", folder / "one.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with source.open("rb") as file, open_output(output, file) as rows:
        run_batch(llm, file, rows, PARAMS, use_tqdm=False)
    return read(output)


def read(path: Path) -> list[dict]:
    return in_order([json.loads(row) for row in path.read_bytes().splitlines()])


def batch_of(lines: list[object]) -> dict[str, np.ndarray]:
    return {"line": np.array(lines, object), "number": np.arange(1, 1 + len(lines))}


def test_rows_are_those_of_batch_files_in_the_order_of_the_lines(llm, tmp_path):
    want = of_one_process(llm, LINES, tmp_path)
    generate = Generate(llm, params=PARAMS)
    batch = batch_of([json.dumps(line) for line in LINES])
    answers = generate(batch)
    rows = [json.loads(row) for row in answers["row"]]
    assert list(answers) == ["line", "number", "row", "engine"]
    assert [row["id"] for row in rows][:3] == [1, "1", "chat"]
    assert "error" in rows[4]
    assert "error" in rows[5]
    assert rows[6].keys() == {"id", "line", "error"}
    assert in_order(rows) == want
    facts = json.loads((tmp_path / "one.jsonl.manifest.json").read_text())
    assert [json.loads(engine) for engine in answers["engine"]] == [facts] * len(LINES)
    with ThreadPoolExecutor(3) as pool:
        for several in pool.map(generate, [batch] * 3):
            assert in_order([json.loads(row) for row in several["row"]]) == want


def test_what_is_no_line_has_an_error_row_and_a_wrong_column_fails(llm):
    generate = Generate(llm, params=PARAMS)
    odd = [None, float("nan"), 3, b"x", "", "[]", "{", '{"id": NaN}', "[" * 9999, '"\ud800"']
    rows = [json.loads(row) for row in generate(batch_of(odd))["row"]]
    assert [row["line"] for row in rows] == list(range(1, 1 + len(odd)))
    assert all(row["id"] is None and row["error"] for row in rows)
    assert generate({"line": np.array([], object)})["row"].tolist() == []
    for columns in ({"text"}, {"line", "row"}, {"line", "engine"}, set()):
        with pytest.raises(ValueError, match="batch: expected a column 'line'"):
            generate({name: np.array(["x"], object) for name in columns})
    with pytest.raises(ValueError, match="number: expected whole numbers, got float64"):
        generate({"line": np.array(["x"], object), "number": np.array([float("nan")])})
    with pytest.raises(ValueError, match=r"batch: expected columns as arrays .*, got list"):
        generate(["x"])
    with pytest.raises(ValueError, match="n: expected 1"):
        Generate(llm, params={"n": 2})
    with pytest.raises(ValueError, match="dtype: expected nothing beside an LLM"):
        Generate(llm, dtype="float32")


# --- two actors


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs jaxkv[ray]")
NUM_LINES = 200


@pytest.fixture
def start(tmp_path, checkpoint, scripts):
    """Starts the script on a cluster of its own."""
    started: list[subprocess.Popen] = []

    def run(**changes: object) -> subprocess.Popen:
        options = {"model": str(checkpoint), "actors": 2, "batch-size": 8, "options": SMALL}
        options |= {"params": PARAMS, "input": tmp_path / "in.jsonl", "output": tmp_path / "out"}
        command = [sys.executable, str(scripts / "batch_ray.py")]
        for name, value in (options | changes).items():
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            command += [f"--{name}", text]
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
        with (tmp_path / "log").open("wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def actors(process: subprocess.Popen) -> list[int]:
    """The processes of a script's own actors."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        parents[int(folder.name)] = int(status[1])
        if name.startswith(b"ray::") and b"Generate" in name:
            found.append(int(folder.name))

    def is_below(pid: int) -> bool:
        while pid and pid != process.pid:
            pid = parents.get(pid, 0)
        return pid == process.pid

    return [pid for pid in found if is_below(pid)]


def lines_of(count: int) -> list[dict]:
    words = ["Once upon a time", "The end of", "One by one"]
    return [{"id": i, "prompt": f"{words[i % 3]} {i}"} for i in range(count)]


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_actor_costs_no_row_and_a_second_start_goes_on(llm, tmp_path, start):
    lines = [*lines_of(NUM_LINES), {"id": 0, "prompt": "again"}, {"id": "bad"}]
    want = of_one_process(llm, lines, tmp_path)
    process, output = start(), tmp_path / "out"
    while not output.exists() or output.read_bytes().count(b"\n") < NUM_LINES // 4:
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    before = actors(process)
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    assert process.wait() == 0, (tmp_path / "log").read_text()
    assert read(output) == want
    # Half of it is gone, and a row is torn.
    kept = output.read_bytes()
    output.write_bytes(kept[: len(kept) // 2])
    assert start(actors=1).wait() == 0, (tmp_path / "log").read_text()
    assert read(output) == want
    other = start(params=PARAMS | {"max_tokens": 3}, actors=1)
    assert other.wait() == 0  # nothing is missing, so nothing is asked
    output.write_bytes(kept[: len(kept) // 2])
    assert start(params=PARAMS | {"max_tokens": 3}, actors=1).wait()
    assert "params: expected" in (tmp_path / "log").read_text()
