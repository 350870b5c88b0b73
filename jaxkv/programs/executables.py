"""Keeps compiled programs as files, from which the next start takes them without tracing or
compiling anything.

A file has the executable as the device's runtime serialises it, and as JSON what `Compiled` needs
besides. Nothing in it is pickled. The runtime trusts its machine code all the same: only a folder
that nobody else can write to may hold one (`build.compile_cache` sees to that).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config, core
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.stages import ArgInfo, Compiled
from jax.tree_util import PyTreeDef, default_registry

from jaxkv.files import write_whole
from jaxkv.ops import native
from jaxkv.processes import num_processes
from jaxkv.version import digest_of_sources

SUFFIX = ".program"
MAGIC = b"jaxkv-1\n"
NODES = {kind.__name__: kind for kind in (tuple, list, type(None))}
MAX_AGE_S = 30 * 86400
"""A file that no start has used for so long is deleted when the next one is written."""

MAX_BYTES = 2 * 2**30
"""All files together; those that were used last stay."""


@dataclass(frozen=True, slots=True)
class ProgramFiles:
    """Holds executables in a folder for a runtime with these devices, for any number of processes
    at a time.
    """

    folder: Path
    devices: tuple[jax.Device, ...]

    @property
    def is_shared(self) -> bool:
        """Says whether the programs are for devices of several processes, which either all compile
        one or all load it: compilers may share their work (autotuning on GPUs).
        """
        return num_processes(self.devices) > 1

    def take(
        self, compile: Callable[[], Compiled], arguments: Sequence[Any], **parts: object
    ) -> tuple[Compiled, bool]:
        """Returns the executable of a function with these abstract arguments, and whether it was
        here; one that was not is compiled and kept, as is any of several processes (`find`).

        parts: what the program depends on beside its arguments and our sources.
        """
        key = self.key(arguments, **parts)
        if key is None:
            return compile(), False
        if not self.is_shared and (found := self.load(key, arguments)) is not None:
            return found, True
        # JAX's own cache need not have it too.
        with config.persistent_cache_min_compile_time_secs(math.inf):
            compiled = compile()
        self.save(key, compiled, arguments)
        return compiled, False

    def find(self, arguments: Sequence[Any], **parts: object) -> Compiled | None:
        """Returns the executable as `take` does, None if it is not here."""
        key = self.key(arguments, **parts)
        return None if key is None else self.load(key, arguments)

    def key(self, arguments: Sequence[Any], **parts: object) -> str | None:
        """Returns, as text, everything that an executable depends on: `parts` by their `repr`, the
        arguments, and what is around them. None if some of it has no text that means the same in
        another process.
        """
        leaves, tree = jax.tree.flatten(arguments)
        seen = {
            **{name: repr(value) for name, value in parts.items()},
            "tree": str(tree),
            "leaves": [
                f"{x.dtype}{list(x.shape)} {getattr(x, 'sharding', None)} "
                f"{getattr(x, 'weak_type', False)}"
                for x in leaves
            ],
            **_around(self.devices),
        }
        text = json.dumps(seen, sort_keys=True)
        return None if " at 0x" in text else text

    def load(self, key: str, arguments: Sequence[Any]) -> Compiled | None:
        """Returns the executable with this key; None if there is none, or its file is damaged or
        not for this runtime.
        """
        path = self._path(key)
        try:
            data = memoryview(path.read_bytes())
        except OSError:
            return None
        start = len(MAGIC) + 32
        body = data[start:]
        if data[:start] != MAGIC + hashlib.sha256(body).digest():
            return None
        size = int.from_bytes(body[:8], "little")
        about = json.loads(bytes(body[8 : 8 + size]))
        if about["key"] != key:
            return None
        with suppress(FileNotFoundError):
            os.utime(path)  # it was used
        native.make_all()  # it may call any of it
        try:
            executable = self.devices[0].client.deserialize_executable(
                bytes(body[8 + size :]), executable_devices=xla_client.DeviceList(self.devices)
            )
        except jax.errors.JaxRuntimeError:
            return None
        return _restored(about, executable, arguments, self.devices)

    def save(self, key: str, compiled: Compiled, arguments: Sequence[Any]) -> bool:
        """Keeps it, in the place of what the file held. Returns whether that was possible: not for
        a program with effects, or with arrays that are divided in unknown ways.
        """
        about = _described(compiled, arguments, self.devices)
        if about is None:
            return False
        executable: Any = compiled.runtime_executable()
        header = json.dumps(about | {"key": key}).encode()
        body = b"".join(
            (
                len(header).to_bytes(8, "little"),
                header,
                executable.client.serialize_executable(executable),
            )
        )
        try:
            self._make_room(len(body))
            write_whole(self._path(key), [MAGIC, hashlib.sha256(body).digest(), body])
        except OSError as error:
            warnings.warn(
                f"compiled programs are not kept for the next start: {error}", stacklevel=2
            )
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.folder / (hashlib.sha256(key.encode()).hexdigest() + SUFFIX)

    def _make_room(self, num_bytes: int) -> None:
        """Deletes what was not used for long, and what is too much, with parts of files that a
        process left behind.
        """
        found = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process does the same
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        now, total = time.time(), num_bytes
        for used, size, path in sorted(found, reverse=True):
            total += size
            if now - used > MAX_AGE_S or total > MAX_BYTES:
                path.unlink(missing_ok=True)


# --- the key


def _around(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns what machine code depends on besides its program: versions, devices, settings."""
    client: Any = devices[0].client
    flags = [flag for flag in sys.argv if flag.startswith("--xla")]
    # An object of its own in each process; within a program there are no axes yet.
    context = dict(zip(config.trace_context_names(), config.trace_context(), strict=True))
    context.pop("axis_env_state", None)
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    return {
        "versions": _versions(),
        "sources": digest_of_sources(),
        "platform": [client.platform, client.platform_version],
        "devices": [f"{device} {device.device_kind}" for device in devices],
        "process": jax.process_index(),  # each has its own, maybe in one folder
        "flags": [os.environ.get("XLA_FLAGS"), os.environ.get("LIBTPU_INIT_ARGS"), *flags],
        "matmul": native.described(),
        "kernel checks": os.environ.get("JAXKV_KERNEL_CHECKS"),
        "context": sorted(f"{name}={value!r}" for name, value in context.items()),
        "settings": sorted(f"{name}={value!r}" for name, value in settings.items()),
    }


@cache
def _versions() -> list[str]:
    return [f"{name} {version(name)}" for name in ("jax", "jaxlib", "numpy")]


# --- what `Compiled` holds beside the executable, as JSON and back


def _described(
    compiled: Compiled, arguments: Sequence[Any], devices: Sequence[jax.Device]
) -> dict[str, Any] | None:
    """Returns what `_restored` needs; None if it would make something else of it."""
    executable: Any = compiled._executable
    kept = executable._unloaded_executable
    known = list(_nodes(jax.tree.structure((tuple(arguments), {}))))
    new = [node for node in _nodes(compiled.out_tree) if node is not None and node not in known]
    if not all(map(_is_nameable, new)):
        return None
    if kept.unordered_effects or kept.ordered_effects or kept.host_callbacks or kept.mut:
        return None
    facts = {
        "name": kept.name,
        "committed": kept.committed,
        "kept": sorted(kept.kept_var_idx),
        "donated": [info.donated for info in jax.tree.leaves(compiled.args_info)],
        "inputs": [_array_as_json(x) for x in kept.input_avals],
        "outputs": [_array_as_json(x) for x in kept.output_avals],
        "input_parts": [_parts_as_json(x) for x in kept.input_shardings],
        "output_parts": [_parts_as_json(x) for x in kept.output_shardings],
        "out_tree": _tree_as_json(compiled.out_tree, known),
    }
    about = json.loads(json.dumps(facts))  # as it will be read
    is_equal = (
        [_array(x, devices) for x in about["inputs"]] == list(kept.input_avals)
        and [_array(x, devices) for x in about["outputs"]] == list(kept.output_avals)
        and [_sharding(x, devices) for x in about["input_parts"]] == list(kept.input_shardings)
        and [_sharding(x, devices) for x in about["output_parts"]] == list(kept.output_shardings)
        and _tree(about["out_tree"], known) == compiled.out_tree
    )
    return about if is_equal else None


def _restored(
    about: Mapping[str, Any],
    executable: Any,
    arguments: Sequence[Any],
    devices: Sequence[jax.Device],
) -> Compiled:
    in_tree: Any = jax.tree.structure((tuple(arguments), {}))
    inputs, outputs = ([_array(x, devices) for x in about[name]] for name in ("inputs", "outputs"))
    given = [_array(_array_as_json(x), devices) for x in jax.tree.leaves(arguments)]
    in_parts = [_sharding(x, devices) for x in about["input_parts"]]
    in_layouts, out_layouts = pxla._get_layouts_from_executable(
        executable, [None] * len(inputs), [None] * len(outputs), 0, inputs, outputs
    )
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=xla_client.DeviceList(tuple(devices)),
        backend=devices[0].client,
        input_avals=inputs,
        input_shardings=in_parts,
        output_avals=outputs,
        output_shardings=[_sharding(x, devices) for x in about["output_parts"]],
        committed=about["committed"],
        name=about["name"],
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(about["kept"]),
        mut=None,
        xla_in_layouts=in_layouts,
        dispatch_in_layouts=pxla.get_dispatch_layouts(in_layouts, in_parts, inputs),
        xla_out_layouts=out_layouts,
        all_args_info=None,
        pgle_profiler=None,
    )
    return Compiled(
        unloaded.load(),
        [],
        in_tree.unflatten(map(ArgInfo, given, about["donated"])),
        _tree(about["out_tree"], list(_nodes(in_tree))),
        no_kwargs=True,
    )


def _array_as_json(x: Any) -> list[Any]:
    """Returns shape, dtype, and the axes of the mesh that an array or its type is on, if any."""
    mesh = getattr(getattr(x, "sharding", None), "mesh", None)
    axes = [] if mesh is None else _axes(mesh)
    return [list(x.shape), jnp.dtype(x.dtype).name, bool(getattr(x, "weak_type", False)), axes]


def _array(saved: Sequence[Any], devices: Sequence[jax.Device]) -> Any:
    shape, dtype, weak_type, axes = saved
    if not axes:
        return core.ShapedArray(tuple(shape), jnp.dtype(dtype), weak_type)
    # How it is divided says `_sharding`; its type only says over what.
    parts = NamedSharding(_mesh(axes, devices).abstract_mesh, PartitionSpec(*[None] * len(shape)))
    return core.ShapedArray(tuple(shape), jnp.dtype(dtype), weak_type, sharding=parts)


def _parts_as_json(sharding: Any) -> list[Any] | None:
    """Returns the mesh's axes, and which of them divide each dimension; None for one device."""
    if not isinstance(sharding, NamedSharding):
        return None
    return [_axes(sharding.mesh), list(sharding.spec)]


def _sharding(parts: Sequence[Any] | None, devices: Sequence[jax.Device]) -> Any:
    if parts is None:
        return SingleDeviceSharding(devices[0])
    axes, divided = parts
    entries = (tuple(one) if isinstance(one, list) else one for one in divided)
    return NamedSharding(_mesh(axes, devices), PartitionSpec(*entries))


def _axes(mesh: Mesh | AbstractMesh) -> list[list[Any]]:
    """Returns the names of a mesh's axes with their lengths."""
    return [list(one) for one in mesh.shape.items()]


def _mesh(axes: Sequence[Sequence[Any]], devices: Sequence[jax.Device]) -> Mesh:
    names, lengths = zip(*axes, strict=True)
    return Mesh(np.array(devices).reshape(lengths), names)


def _nodes(tree: PyTreeDef) -> Iterator[Any]:
    yield tree.node_data()
    for child in tree.children():
        yield from _nodes(child)


def _tree_as_json(tree: PyTreeDef, known: list[Any]) -> Any:
    """Returns the tree as lists: [what the node is, children ..]. A node that the arguments have
    too is its number there, another one its class and whether that takes () beside its children.
    """
    node = tree.node_data()
    if node is None:
        return None
    what: Any = known.index(node) if node in known else _class_as_json(*node)
    return [what, *(_tree_as_json(child, known) for child in tree.children())]


def _is_nameable(node: Any) -> bool:
    """Says whether `_class_as_json` tells all about a node, and `_tree` finds its class."""
    kind, fixed = node
    if kind.__module__ == "builtins":
        return NODES.get(kind.__name__) is kind
    module = sys.modules[kind.__module__]
    return fixed in ((), None) and getattr(module, kind.__qualname__, None) is kind


def _class_as_json(kind: type, fixed: Any) -> list[Any]:
    return [kind.__module__, kind.__qualname__, fixed == ()]


def _tree(saved: Any, known: list[Any]) -> PyTreeDef:
    if saved is None:
        return jax.tree.structure(0)
    what, *children = saved
    if not isinstance(what, int):
        module, name, has_fixed = what
        # A class of what programs return has been imported with them.
        kind = NODES.get(name) if module == "builtins" else getattr(sys.modules[module], name)
        node: Any = (kind, () if has_fixed else None)
    else:
        node = known[what]
    return PyTreeDef.from_node_data_and_children(
        default_registry, node, [_tree(child, known) for child in children]
    )
