"""The place of a mover's unix socket, and the socket itself.

The path of a unix socket has about a hundred bytes, and TMPDIR may be longer. A temporary folder
may also be emptied by a cleaner while a run trains for weeks. So the socket lies in a private
folder under the first place that is short enough. If the folder or the socket disappears, the
mover makes it again.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.errors import RunFolderError

MAX_PATH_BYTES = 100
"""Longest path of a socket. Linux allows 107 bytes, macOS 103."""
SOCKET_NAME = "mover"
CHECK_INTERVAL_S = 1.0
"""Seconds between two checks whether the socket is still in its folder."""
LISTEN_BACKLOG = 128
_FOLDER_NAME_BYTES = len("/holdfast-12345678/") + len(SOCKET_NAME)


def socket_places() -> tuple[str, ...]:
    """Return the folders in which a private folder may be made, the best first."""
    return (tempfile.gettempdir(), "/tmp", "/dev/shm", "/var/tmp")


def make_socket_folder(places: Sequence[str] | None = None) -> tempfile.TemporaryDirectory[str]:
    """Make a private folder for a socket. Raises RunFolderError if no place is suitable."""
    reasons: dict[str, str] = {}
    for place in socket_places() if places is None else places:
        if len(os.fsencode(place)) + _FOLDER_NAME_BYTES > MAX_PATH_BYTES:
            reasons[place] = "its path is too long for a socket"
            continue
        try:
            return tempfile.TemporaryDirectory(  # mode 0700
                prefix="holdfast-", dir=place, ignore_cleanup_errors=True
            )
        except OSError as error:
            reasons[place] = error.strerror or str(error)
    raise RunFolderError(
        "no folder can hold the mover's socket: "
        + ", ".join(f"{place}: {reason}" for place, reason in reasons.items()),
        where="TMPDIR",
        remedy="set it to a folder of yours with a short path",
    )


def secure_folder(folder: Path) -> None:
    """Make the folder, or check that no other user can replace the socket there by a link or
    another socket. Raises RunFolderError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise RunFolderError(
            f"the folder of the mover's socket cannot be made ({error.strerror})",
            where=str(folder),
            remedy="set TMPDIR to a folder of your own",
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        raise RunFolderError(
            "other users of this machine can write where the mover's socket is to lie",
            where=str(folder),
            remedy="set TMPDIR to a folder of your own",
        )


class MoverSocket:
    """The socket that a mover listens on."""

    def __init__(self, path: str) -> None:
        """Listen at `path`. Raises RunFolderError if no socket can lie there."""
        self._path = path
        self._listener, self._identity = self._open()

    def wait_for_client(self, stop_fd: int) -> bool:
        """Wait for a connection; return False once `stop_fd` can be read.

        Meanwhile, make the socket again if it has disappeared.
        """
        while True:
            ready, _, _ = select.select(
                [self._listener.fileno(), stop_fd], [], [], CHECK_INTERVAL_S
            )
            if stop_fd in ready:
                return False
            if ready:
                return True
            self.restore()

    def accept(self) -> socket.socket:
        """Accept a connection. Raises OSError; BlockingIOError if the client has left."""
        return self._listener.accept()[0]

    def restore(self) -> None:
        """Make the socket again if its file has disappeared. A failure is retried later."""
        with suppress(OSError):
            if _identity_of(self._path) == self._identity:
                return
        with suppress(RunFolderError):
            listener, identity = self._open()
            self._listener.close()  # no client finds it any more; open connections stay
            self._listener, self._identity = listener, identity

    def remove(self) -> None:
        with suppress(OSError):
            Path(self._path).unlink(missing_ok=True)

    def _open(self) -> tuple[socket.socket, tuple[int, int]]:
        secure_folder(Path(self._path).parent)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            Path(self._path).unlink(missing_ok=True)
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            listener.listen(LISTEN_BACKLOG)
            listener.setblocking(False)
            return listener, _identity_of(self._path)
        except OSError as error:
            listener.close()
            raise RunFolderError(
                f"the mover's socket cannot be made ({error.strerror or error})",
                where=self._path,
                remedy="set TMPDIR to a folder of your own with a short path",
            ) from error


def _identity_of(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
