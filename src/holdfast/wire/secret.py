"""The run's secret: 32 random bytes that only the processes of a run have.

It lies in the run folder, readable by its owner alone from the first moment. Or the launcher
provides it in a file named by `HOLDFAST_SECRET_FILE`. It reaches other processes through inherited
pipes and sockets only. It is never an argument or an environment variable, which every user of the
machine may read in `/proc`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import RunFolderError
from holdfast.wire.store.run_store import translate_os_error

SECRET_FILE_VARIABLE = "HOLDFAST_SECRET_FILE"
_SECRET_BYTES = 32


@dataclass(frozen=True)
class Secret:
    """The key of every HMAC of a run. Its repr and str show nothing of it."""

    key: bytes = field(repr=False)

    def hex(self) -> str:
        """For a pipe to a child, and for nothing else."""
        return self.key.hex()

    @staticmethod
    def from_hex(text: str) -> Secret:
        """Raises ValueError for anything but 16 or more bytes in hexadecimal digits."""
        key = bytes.fromhex(text.strip())
        if len(key) < 16:
            raise ValueError("a secret has at least 16 bytes (32 hexadecimal digits)")
        return Secret(key)


def open_secret(folder: Path | str, environ: Mapping[str, str] | None = None) -> Secret:
    """The secret of the run in `folder`: the launcher's, or the folder's own, made when absent.

    Raises RunFolderError when other users can read the file, or it does not hold a secret.
    """
    named = (os.environ if environ is None else environ).get(SECRET_FILE_VARIABLE)
    if named:
        return read_secret(Path(named).expanduser())
    path = Path(folder) / "secret"
    if not path.exists():
        _create_secret(path)
    return read_secret(path)


def read_secret(path: Path) -> Secret:
    """Raises RunFolderError when the file is missing, readable by other users, written by another
    user (but root), or not a secret."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # of what is read, whatever the path names by now
            text = file.read(4096).decode("ascii")
    except FileNotFoundError:
        raise RunFolderError("the secret's file is missing", where=str(path)) from None
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise translate_os_error(error, path) from error
    if status.st_uid not in (os.getuid(), 0):
        raise RunFolderError(
            "the run's secret belongs to another user, who knows it then",
            where=str(path),
            remedy="remove it: a new one is made; or use a copy that is yours",
        )
    if status.st_mode & 0o077:
        raise RunFolderError(
            "other users of this machine can read the run's secret",
            where=str(path),
            remedy=f"remove it, or run: chmod 600 {path}",
        )
    try:
        return Secret.from_hex(text)
    except ValueError:
        raise RunFolderError(
            "this is not a secret", where=str(path), remedy="write 64 hexadecimal digits into it"
        ) from None


def _create_secret(path: Path) -> None:
    """Write a new secret; of two makers at once one wins, and both then read the same."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, secrets.token_bytes(_SECRET_BYTES).hex().encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    except OSError as error:
        raise translate_os_error(error, path.parent) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
