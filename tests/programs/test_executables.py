"""What a start finds is what an earlier one compiled, or nothing: never something else."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv import version
from jaxkv.programs import executables
from jaxkv.programs.executables import SUFFIX, ProgramFiles
from jaxkv.programs.lowerings import Lowering
from jaxkv.programs.step import Newest

RACE = """
import sys
from pathlib import Path
import jax
from jaxkv.programs.executables import ProgramFiles
files = ProgramFiles(Path(sys.argv[1]), tuple(jax.devices()))
def compile():
    return jax.jit(lambda x: x * 3 + 1).lower(x).compile()
x = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
for _ in range(40):
    program, found = files.take(compile, (x,), name="race")
    assert program(jax.numpy.ones(8)).tolist() == [4.0] * 8
    files.save(files.key((x,), name="race"), compile(), (x,))
"""


class Program:
    """A jitted function of a tree with something donated, None, an argument that it does not use,
    and an output tree with a class that no input has; counts how often it was traced.
    """

    def __init__(self) -> None:
        self.num_traced = 0
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        make = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=device)  # noqa: E731
        self.arguments = (
            {"w": make((4, 8), jnp.bfloat16), "none": None},
            make((16, 8), jnp.float32),
            make((3,), jnp.int32),
        )
        self.lowering = Lowering(jax.jit(self._run, donate_argnums=1), self.arguments)

    def _run(self, tree: dict, pool: jax.Array, unused: jax.Array) -> tuple:
        self.num_traced += 1
        return pool + 1, Newest(token_R=tree["w"].sum(0), row_B=pool[0]), [None, (pool.sum(),)]

    def compile(self) -> jax.stages.Compiled:
        return self.lowering.compile(None)

    def take(self, files: ProgramFiles, **parts: object) -> tuple[jax.stages.Compiled, bool]:
        return files.take(self.compile, self.arguments, **{"name": "one"} | parts)


def inputs() -> tuple:
    return {"w": jnp.ones((4, 8), jnp.bfloat16), "none": None}, jnp.ones((16, 8)), np.zeros(3, int)


def as_lists(tree: object) -> list:
    return [x.tolist() for x in jax.tree.leaves(tree)]


@pytest.fixture
def program() -> Program:
    return Program()


@pytest.fixture
def files(tmp_path) -> ProgramFiles:
    return ProgramFiles(tmp_path, tuple(jax.devices()[:1]))


def file_of(files: ProgramFiles) -> Path:
    (path,) = files.folder.iterdir()
    assert path.suffix == SUFFIX
    return path


def test_what_was_kept_is_the_same_program_and_is_not_traced(files, program):
    first, was_there = program.take(files)
    second, is_there = program.take(files)
    assert (was_there, is_there, program.num_traced) == (False, True, 1)
    assert file_of(files).stat().st_mode & 0o777 == 0o600
    assert (second.in_tree, second.out_tree) == (first.in_tree, first.out_tree)
    assert str(second.args_info) == str(first.args_info)
    assert second.out_info == first.out_info
    assert second.input_shardings == first.input_shardings
    for name in ("temp_size_in_bytes", "alias_size_in_bytes", "generated_code_size_in_bytes"):
        sizes = [getattr(one.memory_analysis(), name) for one in (first, second)]
        assert sizes[0] == sizes[1]
    tree, pool, unused = inputs()
    expected, got = first(tree, jnp.copy(pool), unused), second(tree, pool, unused)
    assert as_lists(got) == as_lists(expected)
    assert type(got[1]) is Newest
    assert pool.is_deleted()  # it was donated
    with pytest.raises(TypeError):
        second(tree, jnp.ones((16, 9)), unused)


@pytest.mark.parametrize("at", [0, 12, 45, 200, -1])
def test_a_flipped_byte_is_compiled_anew_once(files, program, at):
    program.take(files)
    data = bytearray(file_of(files).read_bytes())
    data[at] ^= 1
    file_of(files).write_bytes(data)
    assert not program.take(files)[1]
    found, is_there = program.take(files)
    assert is_there
    assert as_lists(found(*inputs())) == as_lists(program.compile()(*inputs()))


@pytest.mark.parametrize("size", [0, 4, 30, 44, 1000, -1])
def test_a_truncated_file_is_compiled_anew_once(files, program, size):
    program.take(files)
    file_of(files).write_bytes(file_of(files).read_bytes()[:size])
    assert [program.take(files)[1] for _ in range(2)] == [False, True]


def test_a_file_under_another_name_is_not_taken(files, program):
    program.take(files)
    other = files.key(program.arguments, name="other")
    os.rename(file_of(files), files._path(other))
    assert files.load(other, program.arguments) is None


def test_a_runtime_that_refuses_it_has_it_compiled_anew(files, program):
    program.take(files)

    def refuse(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: another version")

    elsewhere = SimpleNamespace(client=SimpleNamespace(deserialize_executable=refuse))
    key = files.key(program.arguments, name="one")
    assert replace(files, devices=(elsewhere,)).load(key, program.arguments) is None


def test_whatever_it_depends_on_is_in_the_key(files, program, monkeypatch):
    def key(arguments: tuple = program.arguments, **parts: object) -> str:
        return files.key(arguments, **{"name": "one", "options": None} | parts)

    seen = {key()}
    weights, pool, unused = program.arguments
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
        seen.add(key())
    with jax.default_matmul_precision("highest"):
        seen.add(key())
    for name in ("_versions", "digest_of_sources"):
        with monkeypatch.context() as patch:
            patch.setattr(executables, name, lambda: "other")
            seen.add(key())
    two = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    parts = NamedSharding(two, PartitionSpec("tensor"))
    divided = jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=parts)
    seen |= {
        key(name="two"),
        key(options={"xla_x": "1"}),
        key((weights, jax.ShapeDtypeStruct((17, 8), pool.dtype), unused)),
        key((weights, jax.ShapeDtypeStruct((16, 8), jnp.bfloat16), unused)),
        key((weights, divided, unused)),
        key(({"v": weights["w"], "none": None}, pool, unused)),
    }
    assert len(seen) == 11
    assert key() in seen
    assert files.key(program.arguments, name=object()) is None


def test_of_several_processes_each_has_its_own_and_takes_it_when_all_have(
    files, program, monkeypatch
):
    own = files.key(program.arguments, name="one")
    monkeypatch.setattr(executables, "num_processes", lambda devices: 2)
    assert [program.take(files)[1] for _ in range(2)] == [False, False]
    assert files.find(program.arguments, name="other") is None
    found = files.find(program.arguments, name="one")
    assert as_lists(found(*inputs())) == as_lists(program.compile()(*inputs()))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert files.find(program.arguments, name="one") is None
    assert files.key(program.arguments, name="one") != own


def test_the_digest_follows_the_sources(tmp_path, monkeypatch):
    package = tmp_path / "jaxkv" / "programs"
    package.mkdir(parents=True)
    monkeypatch.setattr(version, "__file__", str(package.parent / "version.py"))
    digests = []
    for text in ("1", "2", "1"):
        (package / "step.py").write_text(text)
        digests.append(version.digest_of_sources.__wrapped__())
    assert digests[0] == digests[2] != digests[1]


def test_several_devices(tmp_path):
    script = """
import sys, jax, numpy as np
from pathlib import Path
from jax.sharding import *
from jaxkv.programs.executables import ProgramFiles
devices = jax.devices()
files, mesh = ProgramFiles(Path(sys.argv[1]), tuple(devices)), Mesh(np.array(devices).reshape(2, 3), ("heads", "copies"))
parts = [NamedSharding(mesh, PartitionSpec(*one)) for one in [(None, ("heads", "copies")), ("heads",), ()]]
x, y = (jax.ShapeDtypeStruct((4, 6), "float32", sharding=one) for one in parts[:2])
f = jax.jit(lambda x, y: (x * 2, y + 1, x.sum()), donate_argnums=0, out_shardings=tuple(parts))
take = lambda: files.take(lambda: f.lower(x, y).compile(), (x, y))
first, second = take(), take()
assert (first[1], second[1]) == (False, True), "not kept"
numbers = np.arange(24.0, dtype="float32").reshape(4, 6)
make = lambda: [jax.device_put(numbers, one) for one in parts[:2]]
a, b = first[0](*make()), second[0](*make())
assert all((p == q).all() and p.sharding == q.sharding for p, q in zip(a, b)), (a, b)
"""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=6"}
    arguments = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(
        arguments, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    running = [
        subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path)], stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    ends = [one.communicate(timeout=300)[1].decode() for one in running]
    assert ends == ["", ""]
    assert [one.returncode for one in running] == [0, 0]
    assert [path.suffix for path in tmp_path.iterdir()] == [SUFFIX]


def test_what_is_old_or_too_much_is_deleted_when_something_is_written(files, program, monkeypatch):
    old, newer, newest = (files.folder / name for name in ("a.part", "b.program", "c.program"))
    for path in (old, newer, newest):
        path.write_bytes(b"x" * 1000)
    now = newest.stat().st_mtime
    os.utime(old, (now, now - executables.MAX_AGE_S - 60))
    os.utime(newer, (now, now - 60))
    program.take(files)
    assert not old.exists()
    monkeypatch.setattr(executables, "MAX_BYTES", file_of_size(files) + 1500)
    (path,) = {*files.folder.iterdir()} - {newer, newest}
    path.unlink()
    program.take(files)
    assert (newest.exists(), newer.exists()) == (True, False)
    # What a start takes counts as new.
    path = files._path(files.key(program.arguments, name="one"))
    os.utime(path, (now, now - 1000))
    assert program.take(files)[1]
    assert path.stat().st_mtime > now - 500


def file_of_size(files: ProgramFiles) -> int:
    return max(path.stat().st_size for path in files.folder.iterdir())


def test_a_folder_that_cannot_be_written_costs_a_warning(files, program):
    gone = replace(files, folder=files.folder / "gone")
    with pytest.warns(UserWarning, match="not kept for the next start: .*No such file"):
        found, was_there = program.take(gone)
    assert not was_there
    assert as_lists(found(*inputs()))


def test_what_cannot_be_told_in_full_is_not_kept(files):
    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    functions = (
        lambda x: {"a": x},  # a dict's keys
        lambda x: jax.debug.callback(print, x) or x,
    )
    for function in functions:
        program, was_there = files.take(lambda f=function: jax.jit(f).lower(x).compile(), (x,))
        assert not was_there
        assert as_lists(program(jnp.ones(2))) == [[1.0, 1.0]]
    assert list(files.folder.iterdir()) == []
