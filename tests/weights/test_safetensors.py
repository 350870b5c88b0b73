"""The reader equals the official package on good files and turns every bad one into one clear
CheckpointError.
"""

import json
import os
import re
import sys
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from jaxkv.errors import CheckpointError
from jaxkv.weights.safetensors import Checkpoint

INDEX = "model.safetensors.index.json"
SCALARS = [
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    np.int64,
    np.int32,
    np.int16,
    np.int8,
    np.uint64,
    np.uint32,
    np.uint16,
    np.uint8,
    np.bool_,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def random_tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    tensors = {}
    for dtype in map(np.dtype, SCALARS):
        for shape in [
            (),
            (0,),
            (3, 0, 2),
            (1,),
            (5, 3),
            tuple(rng.integers(1, 4, size=rng.integers(1, 9))),
        ]:
            raw = rng.integers(
                0, 2 if dtype.kind == "b" else 256, size=(*shape, dtype.itemsize), dtype=np.uint8
            )
            tensors[f"{dtype.name}.{shape}"] = np.ascontiguousarray(raw).view(dtype).reshape(shape)
    return tensors


def layout(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape=(2,), offsets=(0, 8), dtype="F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_single(directory: Path, content: bytes) -> Path:
    file = directory / "model.safetensors"
    file.unlink(missing_ok=True)  # ext4 flushes a file that is truncated and rewritten: 3 ms each
    file.write_bytes(content)
    return file


def write_sharded(directory: Path, weight_map: object = None) -> dict[str, np.ndarray]:
    halves = [{"a": np.arange(4.0), "b": np.ones((2, 3), ml_dtypes.bfloat16)}, {"c": np.arange(5)}]
    for shard, half in zip(SHARDS, halves, strict=True):
        save_file(half, directory / shard)
    weight_map = weight_map or {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
    (directory / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    return halves[0] | halves[1]


def assert_holds(checkpoint: Checkpoint, tensors: dict[str, np.ndarray]) -> None:
    assert set(checkpoint.names) == set(checkpoint.entries) == set(tensors)
    for name, tensor in tensors.items():
        view = checkpoint.read(name)
        assert (view.dtype, view.shape, view.tobytes()) == (
            tensor.dtype,
            tensor.shape,
            tensor.tobytes(),
        )
        assert not view.flags.writeable
        assert not view.flags.owndata


def assert_refused(directory: Path, *fragments: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    missing = [fragment for fragment in map(str, fragments) if fragment not in str(caught.value)]
    assert missing == [], str(caught.value)
    assert len(str(caught.value)) < 1500


# Good files
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_file_of_the_official_package_reads_back_bit_for_bit(tmp_path, seed):
    tensors = random_tensors(np.random.default_rng(seed))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert_holds(checkpoint, tensors)


def test_shards_read_back_through_links_into_a_blob_store(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    tensors = write_sharded(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (snapshot / "consolidated.safetensors").write_bytes(
        b"a second copy that the index does not list"
    )
    with Checkpoint.open(snapshot) as checkpoint:
        assert_holds(checkpoint, tensors)
        assert checkpoint.entries["c"].file == snapshot / SHARDS[1]


def test_any_single_file_name_will_do(tmp_path):
    save_file({"x": np.arange(3)}, tmp_path / "weights.safetensors")
    with Checkpoint.open(str(tmp_path)) as checkpoint:
        assert_holds(checkpoint, {"x": np.arange(3)})


def test_a_file_without_tensors_is_valid(tmp_path):
    write_single(tmp_path, layout({"__metadata__": {}}))
    assert Checkpoint.open(tmp_path).names == ()


def test_an_unaligned_tensor_reads_the_same(tmp_path):
    values = np.array([1.5, -2.0, 3e300])
    header = {"byte": entry([1], [0, 1], "U8"), "x": entry([3], [1, 25], "F64")}
    text = json.dumps(header).encode()
    write_single(tmp_path, layout(text + b" " * (-len(text) % 8), b"\7" + values.tobytes()))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert_holds(checkpoint, {"byte": np.array([7], np.uint8), "x": values})
        assert not checkpoint.read("x").flags.aligned
        np.testing.assert_array_equal(checkpoint.read("x") * 2, values * 2)


def test_a_view_outlives_close_and_reading_after_close_is_refused(tmp_path):
    save_file({"x": np.arange(1000), "y": np.arange(3)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        view = checkpoint.read("x")
    checkpoint.close()
    np.testing.assert_array_equal(view, np.arange(1000))
    for use in (checkpoint.read, checkpoint.release):
        with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: the checkpoint is closed")):
            use("x")


def test_an_unknown_tensor_is_named(tmp_path):
    save_file({"x": np.arange(3)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        for use in (checkpoint.read, checkpoint.release):
            with pytest.raises(CheckpointError, match=r"among its 1 tensors, got 'lm_head'"):
                use("lm_head")


# Memory
# -------------------------------------------------------------------------------------------------------------


def rss_bytes() -> int:
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; release does nothing elsewhere")
def test_reading_with_release_keeps_resident_memory_flat(tmp_path):
    mib, count = 2**20, 32
    header = {
        f"t{i}": entry([8 * mib], [8 * mib * i, 8 * mib * (i + 1)], "U8") for i in range(count)
    }
    file = write_single(tmp_path, layout(header))
    os.truncate(
        file, file.stat().st_size + 8 * mib * count
    )  # 256 MiB of zeros without writing them
    with Checkpoint.open(tmp_path) as checkpoint:
        before, peak = rss_bytes(), 0
        for name in checkpoint.names:
            assert checkpoint.read(name).max() == 0
            peak = max(peak, rss_bytes() - before)
            checkpoint.release(name)
        after = rss_bytes() - before
    assert 6 * mib < peak < 64 * mib
    assert after < 4 * mib


def test_release_leaves_a_live_view_and_its_neighbours_intact(tmp_path):
    tensors = {
        name: np.random.default_rng(7).integers(0, 99, size=n)
        for name, n in [("a", 3), ("b", 5000), ("c", 0)]
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        views = {name: checkpoint.read(name) for name in tensors}
        for name in tensors:
            checkpoint.release(name)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(views[name], tensor)
        assert_holds(checkpoint, tensors)


def test_an_empty_tensor_at_a_page_aligned_end_of_file_reads_and_releases(tmp_path):
    header = {"rest": entry([3840], [0, 3840], "U8"), "empty": entry([2, 0], [3840, 3840])}
    text = json.dumps(header).encode()
    write_single(tmp_path, layout(text.ljust(256 - 8), bytes(3840)))
    with Checkpoint.open(tmp_path) as checkpoint:
        for name in ("empty", "rest"):
            checkpoint.release(name)
        assert_holds(
            checkpoint, {"rest": np.zeros(3840, np.uint8), "empty": np.zeros((2, 0), np.float32)}
        )


def test_opening_and_reading_allocate_next_to_nothing(tmp_path):
    save_file({"x": np.ones(2**20), "y": np.ones(2**20)}, tmp_path / "model.safetensors")
    tracemalloc.start()
    with Checkpoint.open(tmp_path) as checkpoint:
        views = [checkpoint.read(name) for name in checkpoint.names]
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(views) == 2
    assert peak < 2**20


# Bad files: each message names the file, and the tensor where there is one
# --------------------------------------------

BAD_FILES = {
    "empty": (b"", ["truncated", "at least 8 bytes", "of 0"]),
    "7 bytes": (b"\2\0\0\0\0\0\0", ["truncated", "at least 8 bytes", "of 7"]),
    "header past the end": (layout({})[:-1], ["header of 2 bytes", "truncated", "of 9"]),
    "header of 100 MB": ((100_000_001).to_bytes(8, "little"), ["at most 100000000", "100000001"]),
    "huge header": (b"\xff" * 16, ["at most 100000000", str(2**64 - 1)]),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS", "git lfs pull"]),
    "no header": (layout(b""), ["the header", "JSON"]),
    "not UTF-8": (layout(b'{"\xff": 1}'), ["UTF-8", "0xff"]),
    "UTF-16": (layout('{"a": 1}'.encode("utf-16")), ["UTF-8"]),
    "not JSON": (layout(b'{"x": '), ["the header", "JSON"]),
    "too deep": (layout(b'{"x":' + b"[" * 200_000), ["the header", "recursion"]),
    "long number": (layout(b'{"x":' + b"9" * 9000 + b"}"), ["the header", "digits"]),
    "a list": (layout([entry()]), ["JSON object", "data_offsets"]),
    "duplicate tensor": (
        layout(b'{"tw\\u0069n": 1, "twin": 2}'),
        ["duplicate", "'twin' occurs 2 times"],
    ),
    "duplicate field": (
        layout(b'{"x": {"shape": [], "dtype": 1, "shape": [1]}}'),
        ["'shape' occurs 2 times"],
    ),
    "metadata": (layout({"__metadata__": {"a": 1}}), ["__metadata__", "{'a': 1}"]),
    "metadata list": (layout({"__metadata__": ["a"]}), ["__metadata__", "['a']"]),
    "trailing": (layout({"x": entry()}, bytes(11)), ["3 trailing bytes"]),
    "data without tensors": (layout({}, bytes(4)), ["4 trailing bytes"]),
}
HUGE = 2**63
BAD_TENSORS = {
    "not an object": ([1], ["an object with dtype, shape and data_offsets", "[1]"]),
    "no dtype": ({"shape": [2], "data_offsets": [0, 8]}, ["an object with dtype"]),
    "no shape": ({"dtype": "F32", "data_offsets": [0, 8]}, ["an object with dtype"]),
    "no offsets": ({"dtype": "F32", "shape": [2]}, ["an object with dtype"]),
    "unknown dtype": (entry(dtype="F4"), ["a dtype of F64, F32", "'F4'"]),
    "dtype list": (entry(dtype=["F32"]), ["a dtype of", "['F32']"]),
    "negative shape": (entry([-2]), ["a shape of at most 8 non-negative", "[-2]"]),
    "negative pair": (entry([-2, -1]), ["non-negative", "[-2, -1]"]),
    "float shape": (entry([2.0]), ["non-negative integers", "[2.0]"]),
    "bool shape": (entry([2, True]), ["non-negative integers", "[2, True]"]),
    "string shape": (entry("2"), ["non-negative integers", "'2'"]),
    "null shape": (entry(None), ["non-negative integers", "None"]),
    "rank 9": (entry([1] * 8 + [2]), ["at most 8"]),
    "dim of 2**63": (entry([HUGE]), ["non-negative integers"]),
    "dim of 4000 digits": (entry([10**4000, 10**4000]), ["non-negative integers"]),
    "product overflow to 0": (entry([2**32, 2**32], [0, 0], "U8"), ["a shape of at most"]),
    "product overflow to 8": (
        entry([2**61 + 1, 2], [0, 8]),
        ["a shape of at most", str(2**61 + 1)],
    ),
    "empty but too large": (entry([0, 2**62, 2**62], [0, 0]), ["a shape of at most"]),
    "negative begin": (entry([4], [-8, 8]), ["data_offsets", "[-8, 8]"]),
    "bool offset": (entry([1], [False, 4]), ["data_offsets", "[False, 4]"]),
    "float offset": (entry([2], [0, 8.0]), ["data_offsets", "[0, 8.0]"]),
    "one offset": (entry([2], [8]), ["data_offsets", "[8]"]),
    "three offsets": (entry([2], [0, 8, 8]), ["data_offsets", "[0, 8, 8]"]),
    "begin after end": (entry([2], [8, 0]), ["begin <= end", "[8, 0]"]),
    "too few bytes": (entry([3], [0, 8]), ["data_offsets 12 bytes apart for F32 [3]", "[0, 8]"]),
    "too many bytes": (entry([1], [0, 8]), ["data_offsets 4 bytes apart", "[0, 8]"]),
    "past the end": (entry([3], [0, 12]), ["truncated"]),
    "far past the end": (entry([2**40], [0, 2**42]), ["truncated"]),
    "starts late": (entry([1], [4, 8]), ["first byte at", "(hole)"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused(tmp_path, case):
    content, fragments = BAD_FILES[case]
    file = write_single(tmp_path, content)
    assert_refused(tmp_path, file, "expected", "got", "; ", *fragments)


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_bad_tensor_is_refused(tmp_path, case):
    value, fragments = BAD_TENSORS[case]
    file = write_single(tmp_path, layout({"bad": value}, bytes(8)))
    assert_refused(tmp_path, file, "tensor 'bad'", "expected", "got", "; ", *fragments)


@pytest.mark.parametrize(
    ("second", "size", "fragments"),
    [
        (entry([2], [4, 12]), 12, ["overlap"]),
        (entry([2], [0, 8]), 8, ["overlap"]),
        (entry([0], [4, 4]), 8, ["tensor 'second'", "overlap"]),
        (entry([2], [12, 20]), 20, ["hole"]),
        (entry([0], [12, 12]), 12, ["hole"]),
    ],
)
def test_tensors_that_overlap_or_leave_a_hole_are_refused(tmp_path, second, size, fragments):
    file = write_single(tmp_path, layout({"second": second, "first": entry()}, bytes(size)))
    assert_refused(tmp_path, file, "its first byte at", *fragments)


def test_too_many_tensors_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxkv.weights.safetensors.MAX_TENSORS", 2)
    file = write_single(tmp_path, layout({name: entry([0], [0, 0]) for name in "abc"}))
    assert_refused(tmp_path, file, "at most 2 tensors", "got 3")
    write_sharded(tmp_path)
    assert_refused(tmp_path, tmp_path / INDEX, "weight_map with 1 to 2 tensors")


def test_every_truncation_of_a_good_file_is_refused(tmp_path):
    save_file({"x": np.arange(5), "y": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    for size in range(len(content)):
        file = write_single(tmp_path, content[:size])
        assert_refused(tmp_path, file, "truncated")


def test_names_of_any_length_and_kind_keep_the_message_short(tmp_path):
    write_single(tmp_path, layout({"x" * 100_000 + "\ud800\n": entry(dtype="y" * 100_000)}))
    assert_refused(tmp_path, "'xxx", "'yyy")


# Bad directories
# ------------------------------------------------------------------------------------------------------


def test_a_directory_without_weights_says_which_names_were_looked_for(tmp_path):
    assert_refused(
        tmp_path, tmp_path, INDEX, "model.safetensors or exactly one *.safetensors", "got []"
    )
    assert_refused(tmp_path / "nothing", tmp_path / "nothing", "expected a directory")
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "b.safetensors").touch()
    assert_refused(tmp_path, tmp_path, "exactly one", "['a.safetensors', 'b.safetensors']")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_way_out(tmp_path, name):
    (tmp_path / name).touch()
    assert_refused(
        tmp_path, tmp_path, name, "pickle is never loaded", "safe_serialization=True", "save_file"
    )


def test_gguf_weights_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "model-Q4_K_M.gguf").touch()
    assert_refused(tmp_path, tmp_path, "model-Q4_K_M.gguf", "GGUF is not read", "*.safetensors")


def test_a_broken_link_and_a_directory_in_place_of_a_file_are_refused(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    assert_refused(tmp_path, tmp_path / "model.safetensors", "a regular file", "broken link")
    (tmp_path / INDEX).mkdir()
    assert_refused(tmp_path, tmp_path / INDEX, "a regular file")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX")
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    assert_refused(tmp_path, tmp_path / "model.safetensors", "a regular file")


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "sub/x.safetensors",
        "/etc/x.safetensors",
        "..",
        ".",
        "",
        "x\0.safetensors",
        "C:x.safetensors",
        "..\\x.safetensors",
        "pytorch_model.bin",
        "x\n.safetensors",
        "\ud800.safetensors",
        "x" * 300 + ".safetensors",
        "x.safetensors\n",
        "x.safetensors:stream",
        "x.safetensors/..",
        3,
        None,
        ["x.safetensors"],
    ],
)
def test_a_shard_name_that_is_not_a_plain_file_name_is_refused(tmp_path, shard):
    write_sharded(tmp_path, {"a": SHARDS[0], "evil": shard})
    assert_refused(tmp_path, tmp_path / INDEX, "tensor 'evil'", "plain name of a .safetensors file")


@pytest.mark.parametrize("weight_map", [[], {}, "x", None, 1])
def test_a_weight_map_that_is_not_a_map_is_refused(tmp_path, weight_map):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert_refused(tmp_path, tmp_path / INDEX, "weight_map", repr(weight_map))


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"[]", "the index to be a JSON object"),
        (b"{}", "weight_map"),
        (b"{", "JSON"),
        (b"\xff", "UTF-8"),
        (b"[" * 200_000, "recursion"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "'a' occurs 2 times"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, content, fragment):
    (tmp_path / INDEX).write_bytes(content)
    assert_refused(tmp_path, tmp_path / INDEX, fragment)


def test_an_index_of_more_than_100_mb_is_refused_unread(tmp_path):
    (tmp_path / INDEX).touch()
    os.truncate(tmp_path / INDEX, 100_000_001)
    assert_refused(tmp_path, tmp_path / INDEX, "at most 100000000 bytes", "100000001")


def test_a_missing_shard_is_named(tmp_path):
    write_sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    assert_refused(tmp_path, tmp_path / SHARDS[1], "a regular file")


@pytest.mark.parametrize(
    "listed",
    [
        {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1], "d": SHARDS[1]},  # one that is not there
        {"a": SHARDS[0], "c": SHARDS[1]},  # one left out
        {"a": SHARDS[1], "b": SHARDS[0], "c": SHARDS[1]},  # one in another shard
    ],
)
def test_an_index_says_which_files_there_are_and_files_what_is_in_them(tmp_path, listed):
    """Programs that write it are known to be wrong about a tied head; the loader names what is
    missing.
    """
    write_sharded(tmp_path, listed)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.entries.keys() == {"a", "b", "c"}


def test_a_tensor_in_two_shards_is_named(tmp_path):
    write_sharded(tmp_path)
    save_file({"c": np.arange(5), "a": np.arange(4.0)}, tmp_path / SHARDS[1])
    assert_refused(tmp_path, tmp_path / SHARDS[1], "tensor 'a'", "no other shard", SHARDS[0])


# Fuzz
# -----------------------------------------------------------------------------------------------------------------


def damage(rng: np.random.Generator, content: bytes, header_end: int) -> bytes:
    damaged = bytearray(content)
    kind = rng.integers(5)
    if kind == 0:
        return bytes(damaged[: rng.integers(len(damaged))])
    if kind == 1:  # a number of the header becomes another one
        numbers = list(re.finditer(rb"\d+", content[8:header_end]))
        number = numbers[rng.integers(len(numbers))]
        other = str(rng.choice([-1, 0, 1, 2, 3, 4, 8, 12, 16, 2**31, 2**40, 2**63 - 1])).encode()
        text = content[8 : 8 + number.start()] + other + content[8 + number.end() : header_end]
        return layout(text, content[header_end:])
    end = [8, header_end, len(content)][kind - 2]
    for at in rng.integers(end, size=rng.integers(1, 4)):
        damaged[at] ^= 1 << rng.integers(8)
    return bytes(damaged)


def test_a_damaged_file_either_reads_within_bounds_or_is_a_checkpoint_error(tmp_path):
    rng = np.random.default_rng(20240607)
    tensors = {
        "a": np.int16([[1, 2, 3]]),
        "b": np.asarray(np.float32(2.5)),
        "e": np.ones((0, 4)),
        "z": np.ones(60),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    good = (tmp_path / "model.safetensors").read_bytes()
    header_end = 8 + int.from_bytes(good[:8], "little")
    num_read, refusals = 0, []
    tracemalloc.start()
    for _ in range(2500):
        content = damage(rng, good, header_end)
        file = write_single(tmp_path, content)
        try:
            checkpoint = Checkpoint.open(tmp_path)
        except CheckpointError as error:
            refusals.append(str(error))
            continue
        with checkpoint:
            views = {name: checkpoint.read(name) for name in checkpoint.names}
        official = dict(safetensors.deserialize(content))
        assert {name: (list(v.shape), v.tobytes()) for name, v in views.items()} == {
            name: (v["shape"], bytes(v["data"])) for name, v in official.items()
        }
        num_read += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(num_read, len(refusals)) > 100
    assert all(message.startswith(f"{file}: ") for message in refusals)
    assert peak < 2**22
