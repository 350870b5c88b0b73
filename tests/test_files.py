import os

import pytest

from jaxkv import files


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "one.page"
    files.write_whole(path, [b"12", memoryview(b"34")], sync=True)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"1234", 0o600)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(path, [b"56"], sync=True)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"1234")]
