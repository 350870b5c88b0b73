"""The server takes a minute of four times what it can do."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.mark.slow
def test_a_minute_of_overload_leaves_nothing_behind(script):
    assert script("bench_serve").main(["--seconds", "60", "--max-p99-s", "60"]) == 0
