"""Keeps compiled programs between starts, in the user's cache folder: an engine's own programs as
executables (`programs.executables`), a CPU's kernels as machine code (`ops.native`), others in
JAX's persistent compilation cache.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxkv.holding.directory import others_may_write

if TYPE_CHECKING:
    from jaxkv.programs.executables import ProgramFiles

PROGRAMS = "programs"
"""The folder of executables, in that of JAX's cache."""

KERNELS = "kernels"
"""The folder of machine code, beside it."""

UNKNOWN_JAX = (0, 13)
"""From here on nobody has seen that `programs.executables` works: it takes apart what is private to
jax. JAX's own cache is used there alone.
"""

MIN_COMPILE_S = 0.1
"""Compilations that take less are not worth a file."""


def use_compile_cache(device: jax.Device) -> str:
    """Points JAX at the user's cache folder, for the whole process; returns that folder, or why
    there is none.

    Whoever has set jax_compilation_cache_dir, or switched the cache off, keeps what they chose.
    Entries hold machine code that JAX trusts, so the folder is never beside a checkpoint, and
    nobody else may write to it.
    """
    config: Any = jax.config  # its flags are not in its type
    if not config.jax_enable_compilation_cache:
        return "off: jax_enable_compilation_cache is False"
    try:
        folder = _folder(device)
        chosen = config.jax_compilation_cache_dir
        if chosen is not None and chosen != str(folder):
            return f"{chosen or 'off'} (jax_compilation_cache_dir)"
        for name in (PROGRAMS, KERNELS):
            open_folder(device, name)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        return f"off: {error}"
    config.update("jax_compilation_cache_dir", str(folder))
    # Of several processes JAX would keep what the first one compiles, and that one alone would
    # find it (`ProgramFiles.is_shared`).
    least = MIN_COMPILE_S if jax.process_count() == 1 else math.inf
    config.update("jax_persistent_cache_min_compile_time_secs", least)
    return str(folder)


def open_folder(device: jax.Device, name: str) -> Path:
    """Makes a folder in the one that this user has for such devices, and returns it.

    Raises: OSError where it cannot be written, or others may write to it; RuntimeError where the
    user has no home directory.
    """
    folder = _folder(device) / name
    for one in (folder.parent.parent, folder.parent, folder):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
        if others_may_write(one):
            raise PermissionError(f"{one} can be written by others than this user")
    with tempfile.TemporaryFile(dir=folder):
        pass
    return folder


def open_program_files(devices: Sequence[jax.Device]) -> ProgramFiles | None:
    """Returns where the programs of an engine on these devices are kept, inside the folder of
    `use_compile_cache`; None where that has chosen none, or jax is newer than we know.
    """
    chosen = _chosen(devices[0])
    if chosen is None or jax.__version_info__ >= UNKNOWN_JAX:
        return None
    from jaxkv.programs.executables import ProgramFiles

    return ProgramFiles(chosen / PROGRAMS, tuple(devices))


def kernel_folder(device: jax.Device) -> Path | None:
    """Returns where machine code is kept, inside the folder of `use_compile_cache`; None where that
    has chosen none.
    """
    chosen = _chosen(device)
    return None if chosen is None else chosen / KERNELS


def _chosen(device: jax.Device) -> Path | None:
    config: Any = jax.config
    chosen = Path(config.jax_compilation_cache_dir or "")
    is_on = config.jax_enable_compilation_cache and chosen.parent.name == "jaxkv"
    return chosen if is_on and chosen == _folder(device) else None


def _folder(device: jax.Device) -> Path:
    """Names $XDG_CACHE_HOME/jaxkv/<platform>-<hash of what its machine code depends on beyond what
    JAX's own keys hold>.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # as the XDG specification wants it
        base = Path("~/.cache").expanduser()
    name = (
        _cpu()
        if device.platform == "cpu"
        else f"{device.device_kind} {device.client.platform_version}"
    )
    return base / "jaxkv" / f"{device.platform}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _cpu() -> str:
    """Names model and instruction sets of this CPU: XLA compiles for exactly these."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = (
        cpuinfo.read_text().split("\n\n")[0].splitlines()
        if cpuinfo.is_file()
        else [platform.processor()]
    )
    names = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "flags",
        "CPU implementer",
        "CPU part",
        "Features",
    )
    chosen = [line for line in lines if line.partition(":")[0].strip() in names] or lines
    return "\n".join([platform.machine(), *chosen])
