"""What several processes of JAX have between them: devices, arrays, and what they agree on.

In each of them the same calls come in the same order (JAX's multi-controller model). An array of
all devices has its parts where the devices are, and no process sees all of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def own_device(devices: Sequence[jax.Device]) -> jax.Device:
    """Returns the first of the devices that is this process's, which alone can be asked."""
    if jax.process_count() == 1:
        return devices[0]
    return next(one for one in devices if one.process_index == jax.process_index())


def num_processes(devices: Sequence[jax.Device]) -> int:
    """Counts the processes that have any of the devices."""
    return 1 if jax.process_count() == 1 else len({one.process_index for one in devices})


def to_devices(x: Any, where: jax.sharding.Sharding | None) -> jax.Array:
    """Puts an array that is the same in all processes on devices (None: the default one).

    `jax.device_put` asks all other processes whether they have the same, which waits for all that
    the devices have in their queue, and takes each array of weights through all of them.
    """
    if where is None or where.is_fully_addressable:
        return jax.device_put(x, where)
    return jax.make_array_from_callback(x.shape, where, lambda place: x[place])


def to_host(x: Any) -> np.ndarray:
    """Returns the whole of an array, wherever its parts are."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


@dataclass(frozen=True, slots=True)
class HostParts:
    """Holds in host memory the parts of an array that are on this process's devices."""

    parts: tuple[tuple[jax.Device, np.ndarray], ...]


def kept_in_host(x: jax.Array) -> np.ndarray | HostParts:
    """Copies what this process has of an array to host memory."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.array(x)
    return HostParts(tuple((one.device, np.array(one.data)) for one in x.addressable_shards))


def put_back(kept: np.ndarray | HostParts, like: Any) -> jax.Array:
    """Puts what `kept_in_host` has kept where it was. like: has its shape and sharding."""
    if not isinstance(kept, HostParts):
        return to_devices(kept, like.sharding)
    placed = [jax.device_put(part, device) for device, part in kept.parts]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, placed)


def of_all(number: int) -> np.ndarray:
    """Returns what each process says, [processes] int64."""
    return _of_all([number])[:, 0]


def true_in_all(flags: Sequence[bool]) -> list[bool]:
    """Returns of each flag whether it is true in every process."""
    found = _of_all([int(flag) for flag in flags])
    return [bool(said.all()) for said in found.T]


def from_first(data: bytes, num_bytes: int) -> bytes:
    """Returns what the first process says, at most so many bytes."""
    padded = np.frombuffer(data.ljust(num_bytes, b"\0"), np.uint8)
    return multihost_utils.broadcast_one_to_all(padded).tobytes()


def check_same(parts: Mapping[str, object]) -> None:
    """Raises: ValueError naming the parts that are not the same in all processes."""
    texts = {name: repr(part) for name, part in parts.items()}
    digests = [hashlib.sha256(text.encode()).digest()[:7] for text in texts.values()]
    found = _of_all([int.from_bytes(digest, "little") for digest in digests])
    unlike = (found != found[:1]).any(axis=0).tolist()
    if differing := [name for name, differs in zip(texts, unlike, strict=True) if differs]:
        here = ", ".join(f"{name} {texts[name]:.100}" for name in differing)
        raise ValueError(
            f"expected the same in all {jax.process_count()} processes of one engine, got in this "
            f"one, unlike others: {here}"
        )


def _of_all(numbers: Sequence[int]) -> np.ndarray:
    """Returns what each process says, [processes, numbers] int64, which JAX sends as two halves."""
    halves = np.array(numbers, np.int64).view(np.uint32)
    return np.ascontiguousarray(multihost_utils.process_allgather(halves)).view(np.int64)
