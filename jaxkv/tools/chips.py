"""Chips that need not be here: what they have, and devices of theirs that a compiler makes programs
for.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

GIB = 2**30

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What libtpu needs on a machine without a TPU, before JAX looks for devices: no metadata server,
no lock file.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """Describes what one device has, of `per_chip` on a chip.

    memory_gib: what a program may use, as the compiler says when one does not fit. dimensions: of
    its topologies.
    bandwidth: published bytes per second of its memory; clock in Hz, derived (peak operations /
    operations per cycle); None where no schedule is counted.
    """

    memory_gib: float
    dimensions: int
    per_chip: int = 1
    bandwidth: float | None = None
    clock: float | None = None


CHIPS = {
    "v4": Chip(memory_gib=15.25, dimensions=3, per_chip=2),
    "v5e": Chip(memory_gib=15.75, dimensions=2, bandwidth=820e9, clock=1.5e9),
    "v5p": Chip(memory_gib=95.7, dimensions=3),
    "v6e": Chip(memory_gib=31.25, dimensions=2, bandwidth=1640e9, clock=1.75e9),
    "tpu7x": Chip(memory_gib=94.75, dimensions=3, per_chip=2, bandwidth=3690e9, clock=2.2e9),
}


@dataclass(frozen=True, slots=True)
class CountedDevice:
    """Stands for a device of which only the kind and the number are known."""

    id: int
    platform: str = "tpu"
    compute_capability: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Chips of one kind in a topology: v6e:2x4 is 8 chips of v6e."""

    kind: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.chip.per_chip

    def counted_devices(self) -> list[Any]:
        """Returns what stands for the devices where nothing is compiled."""
        return [CountedDevice(number) for number in range(self.num_devices)]

    def devices(self) -> list[Any]:
        """Returns what the compiler takes for them; `ENVIRONMENT` must hold before JAX looks for
        devices.

        Raises: RuntimeError naming what to install, and for a topology that the compiler does not
        know.
        """
        from jax.experimental import topologies

        if find_spec("libtpu") is None:
            raise RuntimeError(
                f'{self}: its compiler is missing: pip install "jaxkv[tpu]" (Linux on x86-64)'
            )
        one_chip = {"chips_per_host_bounds": [1, 1, 1]} if math.prod(self.shape) == 1 else {}
        return list(topologies.get_topology_desc(str(self), "tpu", **one_chip).devices)


def parse_target(text: str) -> Target:
    """Reads the target of "v6e:2x4"; of "v6e", one chip. Raises: ValueError saying what is
    expected.
    """
    kind, _, shape = text.partition(":")
    if kind not in CHIPS:
        known = ", ".join(CHIPS)
        raise ValueError(
            f"target: expected one of {known}, alone or with a topology such as v6e:2x4, got "
            f"{text!r}"
        )
    count = CHIPS[kind].dimensions
    if not shape:
        return Target(kind, (1,) * count)
    if not re.fullmatch(r"[1-9]\d{0,3}" + r"x[1-9]\d{0,3}" * (count - 1), shape):
        raise ValueError(
            f"target: expected {kind}:{'x'.join('AxBxC'[: 2 * count - 1 : 2])}, got {text!r}"
        )
    return Target(kind, tuple(map(int, shape.split("x"))))
