"""The errors that jaxkv raises on purpose; a caller's plain mistake is a ValueError."""


class CheckpointError(ValueError):
    """A checkpoint or its config is broken, unsafe or inconsistent; the message names the file,
    expected and got.
    """


class CapacityError(RuntimeError):
    """A finite resource (pages, rows) is exhausted; the message says how much was needed and how
    much is free.
    """


class EngineDeadError(RuntimeError):
    """The engine of an `AsyncLLM` has ended: it was shut down, or died of the exception that is
    this one's cause.
    """
