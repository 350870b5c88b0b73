"""Makes one engine of several processes: has JAX know them, and chooses the devices."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from threading import current_thread, main_thread

import jax

from jaxkv.build.options import EngineOptions
from jaxkv.config import is_int


def join(options: EngineOptions) -> None:
    """Has JAX know the other processes, before it looks for devices; nothing for one process.

    Raises: ValueError where it knows others already, or has looked for devices before.
    """
    if options.nnodes == 1:
        return
    if not jax.distributed.is_initialized():
        address, handler = options.master_addr, signal.getsignal(signal.SIGTERM)
        try:
            if address is None:  # JAX asks the TPU, or what has started the job
                jax.distributed.initialize()
            else:
                host = f"[{address}]" if ":" in address else address
                jax.distributed.initialize(
                    f"{host}:{options.master_port}", options.nnodes, options.node_rank
                )
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"nnodes: expected processes that can join ({error}): give node_rank and "
                f"master_addr, and make the engine before JAX is used for other things"
            ) from error
        if handler is not None and current_thread() is main_thread():
            # JAX has taken it, for programs that store their state when they are told to end.
            signal.signal(signal.SIGTERM, handler)
    if jax.process_count() != options.nnodes:
        raise ValueError(
            f"nnodes: expected {jax.process_count()}, the processes that JAX knows, got "
            f"{options.nnodes}"
        )


def is_first(options: EngineOptions) -> bool:
    """Joins, and tells whether this is the process that takes requests."""
    join(options)
    return jax.process_index() == 0


def devices_for(options: EngineOptions) -> Sequence[jax.Device]:
    """Returns the devices that an engine may take: those of this process, or where it needs more
    and takes all there are, those of all processes.

    Raises: ValueError for more than this process has, and less than all.
    """
    if jax.process_count() == 1:
        return jax.devices()
    size, own, every = options.tensor_parallel_size, jax.local_devices(), jax.devices()
    if not is_int(size) or (options.nnodes == 1 and size <= len(own)):
        return own
    if size != len(every):
        raise ValueError(
            f"tensor_parallel_size: expected {len(every)}, the devices of all "
            f"{jax.process_count()} processes, or with nnodes=1 at most {len(own)}, those of this "
            f"one, got {size}"
        )
    for name, none in ALONE.items():
        if (got := getattr(options, name)) != none:
            raise NotImplementedError(
                f"{name}: expected {none!r} with an engine of several processes, got {got!r}"
            )
    return every


ALONE = {
    "data_parallel_size": 1,
    "disaggregate": None,
    "kv_host_bytes": 0,
    "kv_disk": None,
}
"""What is not built for devices of several processes."""
