"""Takes a directory for one engine alone, and keeps the secret that names in it are made with."""

from __future__ import annotations

import os
import secrets
import weakref
from contextlib import ExitStack
from pathlib import Path

from jaxkv.errors import DirectoryInUseError
from jaxkv.files import lock, write_whole

SECRET_BYTES = 32


class Directory:
    """Has the directory to itself until `close`, or until the process ends, however it does.

    secret: made once for the directory, and kept in it for this user only.
    Raises: ValueError for a path that cannot be made or written, that others than this user can
    write to, or whose secret is broken; DirectoryInUseError where another engine has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if others_may_write(self.path):
                raise ValueError(
                    f"kv_disk: expected a directory that this user alone can write to, got "
                    f"{self.path}"
                )
            file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unusable(error) from error
        self.close = weakref.finalize(self, _let_go, file, os.getpid())
        """Lets others have the directory; also when nobody has this."""
        with ExitStack() as undo:
            undo.callback(self.close)
            try:
                lock(file)
                self.secret = self._read_secret()
            except BlockingIOError as error:
                raise DirectoryInUseError(
                    f"kv_disk: expected a directory that no other engine uses, got {self.path}; "
                    f"give each engine its own, or close the other one (LLM.shutdown)"
                ) from error
            except OSError as error:
                raise _unusable(error) from error
            undo.pop_all()

    def _read_secret(self) -> bytes:
        path = self.path / "secret"
        if not path.exists():
            whole = secrets.token_bytes(SECRET_BYTES)
            write_whole(path, [whole], sync=True)
            return whole
        secret = path.read_bytes()
        if len(secret) != SECRET_BYTES or path.stat().st_mode & 0o077:
            raise ValueError(
                f"kv_disk: expected {SECRET_BYTES} bytes that this user alone can read, got "
                f"{path}; remove it, and nothing that was kept is found any more"
            )
        return secret


def _let_go(file: int, owner: int) -> None:
    """Ends the lock, which children share that were forked meanwhile: to close the file would leave
    it to them. They in turn only close it.
    """
    import fcntl

    try:
        if os.getpid() == owner:
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def _unusable(error: OSError) -> ValueError:
    return ValueError(f"kv_disk: expected a directory that can be made and written, got {error}")


def others_may_write(folder: Path) -> bool:
    """Tells whether anybody but this user can change what is in the folder."""
    status = folder.stat()
    return os.name == "posix" and (status.st_uid != os.geteuid() or bool(status.st_mode & 0o022))
