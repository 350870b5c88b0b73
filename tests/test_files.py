import os

import pytest

from jaxkv import files


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt("now")]
)
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch, error):
    path = tmp_path / "one.page"
    files.write_whole(path, [b"12", memoryview(b"34")], sync=True)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"1234", 0o600)

    def end(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", end)
    with pytest.raises(type(error), match=r"No space left|now"):
        files.write_whole(path, [b"56"], sync=True)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"1234")]
