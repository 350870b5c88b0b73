"""Files of pages: what comes back is what was written, or nothing."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import shake_256
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from jaxkv.errors import DirectoryInUseError
from jaxkv.holding import disk
from jaxkv.holding.costs import TRIED_AGAIN, Costs
from jaxkv.holding.directory import Directory
from jaxkv.holding.disk import DiskPages
from jaxkv.holding.host import HostPages
from jaxkv.holding.tiers import Tiers

SHAPES = ((((2, 8, 3), np.dtype(np.float32)), ((2, 5), np.dtype(np.uint8))),)
PAGE_BYTES = 8 + 32 + 4 * 48 + 10
ROOM = 100 * PAGE_BYTES


def key_of(number: int) -> bytes:
    return number.to_bytes(32)


def page_of(key: bytes) -> tuple:
    """A page of bytes that follow from its key."""
    data = shake_256(key).digest(4 * 48 + 10)
    floats = np.frombuffer(data, np.float32, 48).reshape(2, 8, 3)
    return ((floats, np.frombuffer(data, np.uint8, 10, 4 * 48).reshape(2, 5)),)


def read(pages: DiskPages, *numbers: int) -> list[int]:
    """Which of these pages are there. They have what was written, to the bit."""
    keys = [key_of(number) for number in numbers]
    found = pages.read([key for key in keys if key in pages]).result()
    pages.has_read(found)
    for key, page in found.pages.items():
        for got, want in zip(page[0], page_of(key)[0], strict=True):
            assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())
    return [number for number, key in zip(numbers, keys, strict=True) if key in found.pages]


def put(pages: DiskPages, *numbers: int) -> None:
    for number in numbers:
        if pages.wants(key := key_of(number)):
            pages.put(key, page_of(key))


def reopened(pages: DiskPages, most_bytes: int = ROOM) -> DiskPages:
    path = pages.path
    pages.close()
    return DiskPages(Directory(path), most_bytes, SHAPES)


@pytest.fixture
def pages(tmp_path):
    made = DiskPages(Directory(tmp_path / "new" / "pages"), ROOM, SHAPES)
    yield made
    made.close()


def test_pages_come_back_as_they_were_at_once_and_after_a_restart(pages):
    put(pages, *range(20))
    assert read(pages, 0, 7, 99) == [0, 7]
    again = reopened(pages)
    assert len(again) == 20
    assert again.num_bytes == 20 * PAGE_BYTES == sum(x.stat().st_size for x in files(again))
    assert read(again, *range(20)) == [*range(20)]
    again.close()


def files(pages: DiskPages) -> list[Path]:
    return sorted(pages.path.glob("*.page"))


@pytest.mark.parametrize("how", ["flipped", "truncated", "longer", "empty", "other key", "gone"])
def test_a_damaged_file_is_a_miss_and_goes(pages, how):
    put(pages, 1, 2, 3)
    pages = reopened(pages)
    path = pages.path / f"{key_of(2).hex()}.page"
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[-20] ^= 1
    path.write_bytes(
        {
            "truncated": data[:-1],
            "longer": data + b"\0",
            "empty": b"",
            "other key": (pages.path / f"{key_of(1).hex()}.page").read_bytes(),
        }.get(how, data)
    )
    if how == "gone":
        path.unlink()
    assert read(pages, 1, 2, 3) == [1, 3]
    assert pages.num_damaged == (how != "gone")
    assert key_of(2) not in pages
    put(pages, 2)
    pages = reopened(pages)
    assert read(pages, 1, 2, 3) == [1, 2, 3]
    pages.close()


def test_the_files_used_least_lately_make_room(pages):
    pages = reopened(pages, 2 * PAGE_BYTES)
    put(pages, 1, 2)
    pages.used([key_of(1), key_of(2)])
    put(pages, 3)
    assert read(pages, 1, 2) == [1]  # of one sequence the first pages stay longest
    pages.clear()
    pages = reopened(pages, 4 * PAGE_BYTES)
    put(pages, 1, 2, 3, 4)
    pages.used([key_of(1), key_of(2)])
    put(pages, 5)
    assert key_of(3) not in pages
    assert read(pages, 2) == [2]
    pages = reopened(pages, 4 * PAGE_BYTES)
    for number, age in ((1, 3), (2, 0), (4, 2), (5, 1)):
        then = time.time() - 100 * age
        os.utime(pages.path / f"{key_of(number).hex()}.page", (then, then))
    pages = reopened(pages, 3 * PAGE_BYTES)
    assert read(pages, 1, 4) == [4]
    pages.used([key_of(4), key_of(5)])
    pages.used([key_of(2), key_of(4)])  # some of which may be on the device
    pages = reopened(pages, 2 * PAGE_BYTES)
    assert read(pages, 2, 4, 5) == [2, 4]
    assert pages.num_bytes == 2 * PAGE_BYTES
    pages = reopened(pages)
    assert len(files(pages)) == len(pages) == 2
    pages.clear()
    assert files(pages) == []
    pages.close()


def test_an_interrupt_while_it_is_closed_lets_others_have_the_directory(pages, monkeypatch):
    put(pages, 1)
    whole = ThreadPoolExecutor.shutdown

    def interrupted(thread: ThreadPoolExecutor, wait: bool = True, **options: bool) -> None:
        if wait:
            raise KeyboardInterrupt
        whole(thread, wait, **options)

    tiers = Tiers(HostPages(0), pages)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "shutdown", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiers.close()
    Directory(pages.path).close()
    assert tiers.disk is None


def test_a_full_disk_ends_writing_with_one_warning(pages, monkeypatch):
    put(pages, 1)
    pages = reopened(pages)
    calls, is_noted = [], Event()

    def full(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            is_noted.wait(10)  # what is behind it has not begun
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        put(pages, 2, 3, 4)
        while len(calls) < 2:
            time.sleep(0.001)
        with pytest.warns(UserWarning, match="no more pages are written.*No space") as told:
            pages.settle()
        assert (len(pages), pages.num_bytes) == (2, 2 * PAGE_BYTES)
        is_noted.set()
        pages._writer.submit(int).result()
        pages.settle()  # without a second warning, which would be an error
    assert len(told) == 1
    assert not pages.wants(key_of(5))
    put(pages, 5)
    assert read(pages, 1, 2, 3, 4, 5) == [1]
    assert pages.num_bytes == PAGE_BYTES
    assert [*pages.path.glob("*.part")] == []
    pages.close()


def test_what_a_slow_disk_has_no_time_for_is_left_out(pages, monkeypatch):
    monkeypatch.setattr(disk, "WAITING_BYTES", 2 * PAGE_BYTES)
    put(pages, 1, 2)
    tiers = Tiers(HostPages(1), pages)
    page = pages.read([key_of(1)]).result().pages[key_of(1)]
    assert not tiers.wants(key_of(3), is_leaving=False)  # when it is listed: it may come later
    assert tiers.wants(key_of(3), is_leaving=True)
    tiers.put(key_of(3), page, is_leaving=True)  # as host memory wants it
    assert key_of(3) in tiers.host
    assert key_of(3) not in pages
    assert pages.num_left_out == 1
    assert not tiers.wants(key_of(3), is_leaving=True)  # and only tells
    tiers.left(key_of(3))
    tiers.left(key_of(1))  # it is there
    assert pages.num_left_out == 2  # once each time that it has left
    pages._writer.submit(int).result()
    pages.settle()
    assert pages.wants(key_of(3))


def test_only_files_of_its_own_are_removed(pages):
    put(pages, 1)
    pages.close()
    for name in ("film.part", f"{key_of(2).hex()}.a_b1.part", "secret.x.part", "notes.page"):
        (pages.path / name).write_bytes(b"1234")
    (pages.path / f"{key_of(3).hex()}.page").symlink_to(pages.path / "notes.page")
    pages = DiskPages(Directory(pages.path), ROOM, SHAPES)
    assert len(pages) == 1
    pages.clear()
    pages.close()
    names = ["film.part", f"{key_of(3).hex()}.page", "lock", "notes.page", "secret"]
    assert sorted(file.name for file in pages.path.iterdir()) == sorted(names)


def test_a_page_that_leaves_the_device_goes_to_host_memory_and_to_the_disk(pages):
    both, (one, two) = Tiers(HostPages(2), pages), (key_of(1), key_of(2))
    assert both.wants(one, is_leaving=False)
    both.put(one, page_of(one), is_leaving=False)
    assert (one in both.host, one in pages) == (False, True)
    assert both.wants(one, is_leaving=True)
    assert not both.wants(one, is_leaving=False)
    both.put(two, page_of(two), is_leaving=True)
    assert (two in both.host, two in pages) == (True, True)
    both.clear()
    assert len(both.host) == len(pages) == 0


def test_what_comes_while_the_process_ends_is_neither_kept_nor_found(pages):
    put(pages, 1)
    pages = reopened(pages)
    pages._writer.shutdown()
    pages._reader.shutdown()
    put(pages, 2)
    assert key_of(2) not in pages
    assert read(pages, 1) == []
    pages.close()


def test_a_directory_is_one_engines_and_its_secret_this_users(tmp_path):
    one = Directory(tmp_path / "a")
    with pytest.raises(DirectoryInUseError, match="no other engine uses"):
        Directory(tmp_path / "a")
    secret = tmp_path / "a" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    one.close()
    again, other = Directory(tmp_path / "a"), Directory(tmp_path / "b")
    assert one.secret == again.secret != other.secret
    again.close()
    other.close()
    secret.write_bytes(one.secret[:-1])
    with pytest.raises(ValueError, match="kv_disk: expected 32 bytes"):
        Directory(tmp_path / "a")
    secret.write_bytes(one.secret)
    secret.chmod(0o644)
    with pytest.raises(ValueError, match="kv_disk: expected 32 bytes"):
        Directory(tmp_path / "a")
    secret.unlink()
    secret.mkdir()
    with pytest.raises(ValueError, match="kv_disk: expected a directory that can be made") as first:
        Directory(tmp_path / "a")
    with pytest.raises(ValueError, match="kv_disk: expected a directory that can be made"):
        Directory(tmp_path / "a")
    assert first  # which has the frames alive: the lock is let go nevertheless
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="kv_disk: expected a directory that can be made"):
            Directory(path)
    (tmp_path / "b").chmod(0o777)
    with pytest.raises(ValueError, match="kv_disk: expected a directory that this user alone"):
        Directory(tmp_path / "b")


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_neither_keeps_nor_ends_the_lock_of_its_parent(tmp_path):
    one = Directory(tmp_path)
    child = os.fork()
    if not child:
        one.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(DirectoryInUseError):
        Directory(tmp_path)
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(writes)
        os.read(reads, 1)  # returns when the parent has closed its end
        os._exit(0)
    one.close()
    Directory(tmp_path).close()
    os.close(writes)
    os.waitpid(child, 0)
    os.close(reads)


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from test_disk import *
pages = DiskPages(Directory(Path({path!r})), 30 * PAGE_BYTES, SHAPES)
for number in range({first}, {first} + 100_000):
    if number == {first} + 40:
        pages._writer.submit(int).result()
        print("ready", flush=True)
    if pages.wants(key_of(number)):
        put(pages, number)
    else:
        time.sleep(0.001)
    pages.settle()
"""


@pytest.mark.parametrize("times", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_while_it_writes_it_leaves_no_wrong_page(tmp_path, times):
    """More is written than there is room for, so files are deleted meanwhile too."""
    path, rng = tmp_path / "pages", random.Random(0)
    most = num_unfinished = 0
    for n in range(times):
        code = CHILD.format(tests=str(Path(__file__).parent), path=str(path), first=n * 10**6)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.0, 0.1))
            child.send_signal(signal.SIGKILL)
        num_unfinished += len([*path.glob("*.part")])
        pages = DiskPages(Directory(path), 30 * PAGE_BYTES, SHAPES)
        there = [int(file.stem, 16) for file in files(pages)]
        assert read(pages, *there) == there
        assert (pages.num_damaged, [*path.glob("*.part")]) == (0, [])
        most = max(most, len(there))
        pages.close()
    assert most >= 29
    assert num_unfinished > 0 or times < 100


def test_pages_are_loaded_where_that_is_sooner():
    costs = Costs()
    assert costs.pays(10, 160, is_busy=True)  # nothing is known yet
    costs.stepped(1600, 1.0)  # a page in 10 ms
    assert costs.pays(10, 160, is_busy=True)
    costs.read.add(100, 0.5)  # in 5 ms
    assert costs.pays(1, 16, is_busy=False)
    costs.stepped(0, 0.02)
    assert not costs.pays(3, 48, is_busy=True)  # 35 ms with a loop before it against 30
    assert costs.pays(5, 80, is_busy=True)
    costs.copied.add(100, 0.6)
    assert not costs.pays(1, 16, is_busy=False)
    tried = [costs.pays(1, 16, is_busy=False) for _ in range(3 * TRIED_AGAIN)]
    assert sum(tried) == 3
    for _ in range(20):  # the disk is faster now
        costs.read.add(1000, 1.0)
    assert costs.read.each_s < 0.0011
    assert costs.pays(1, 16, is_busy=False)
