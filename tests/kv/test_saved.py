"""A file of saved pages whose header lies is refused by name, with right hashes or without."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxkv.errors import SavedFileError
from jaxkv.kv import saved
from jaxkv.kv.saved import KEY, Origin, SavedPages

ORIGIN = Origin(
    model="m",
    dtype="float32",
    codec="float32",
    form="tokens",
    page_size=4,
    weights="w",
    tokenizer="",
)
PAGES = SavedPages(
    origin=ORIGIN,
    tokens=tuple(range(8)),
    extra={},
    layers={0: (np.ones((8, 1, 2), np.float32),) * 2},
    firsts={0: 0},
)


@pytest.fixture
def whole(tmp_path) -> Path:
    PAGES.save(tmp_path / "whole")
    return tmp_path / "whole"


def meta_of(whole: Path, change: Callable[[dict[str, Any]], object] = dict) -> dict[str, str]:
    """Returns a file's metadata with a header that was changed, and its hash with it."""
    data = whole.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][KEY][64:])
    change(header)
    text = json.dumps(header)
    return {KEY: hashlib.sha256(text.encode()).hexdigest() + text}


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("pages"),
        lambda header: header.update(pages=5),
        lambda header: header.pop("beside"),
        lambda header: header.update(firsts=None),
        lambda header: header["origin"].update(page_size=0),
        lambda header: header["origin"].update(colour="red"),
    ],
    ids=["no hashes", "hashes", "none beside", "firsts", "page size", "origin"],
)
def test_a_header_that_lies(whole, change):
    save_file(load_file(whole), whole.with_name("other"), metadata=meta_of(whole, change))
    with pytest.raises(SavedFileError):
        SavedPages.load(whole.with_name("other"))


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_tokens_that_are_equal_but_no_int32(whole, dtype):
    arrays = load_file(whole)
    arrays["tokens"] = arrays["tokens"].astype(dtype)
    save_file(arrays, whole.with_name("other"), metadata=meta_of(whole))
    with pytest.raises(SavedFileError, match="tokens: expected int32"):
        SavedPages.load(whole.with_name("other"))


def test_a_dtype_that_numpy_does_not_have(whole):
    tokens = {"dtype": "F8_E5M2", "shape": [8], "data_offsets": [0, 8]}
    header = json.dumps({"__metadata__": meta_of(whole), "tokens": tokens}).encode()
    whole.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(SavedFileError):
        SavedPages.load(whole)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_filesystem_without_hard_links_takes_whole_files_and_none_twice(
    tmp_path, monkeypatch, number
):
    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    PAGES.save(tmp_path / "whole")
    assert SavedPages.load(tmp_path / "whole").tokens == PAGES.tokens
    (tmp_path / "other").write_bytes(b"mine")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)  # it comes while we write
    with pytest.raises(FileExistsError):
        PAGES.save(tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == b"mine"
    monkeypatch.setattr(os, "replace", link)
    with pytest.raises(OSError, match=os.strerror(number)):
        PAGES.save(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "whole"]


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(saved, "save_file", fail)
    with pytest.raises(OSError, match=r"full: expected a file that .* No space left"):
        PAGES.save(tmp_path / "full")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="link: expected a new file"):
        PAGES.save(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]
