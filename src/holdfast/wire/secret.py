"""The run's secret: 32 random bytes that only the processes of a run have.

It lies in the run folder, readable by its owner alone from the first moment. Or the launcher
provides it by one of these variables:

    HOLDFAST_SECRET_FILE    names a file
    HOLDFAST_SECRET         holds it: removed from the environment at once, so no child inherits it
    HOLDFAST_SECRET_FROM    names it in a cloud's secret manager (`secret_managers`)

The last two end in an anonymous memory file, which HOLDFAST_SECRET_FILE then names. The secret
reaches other processes through inherited pipes and sockets only, and is never an argument.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import RunFolderError, StoreError
from holdfast.wire.store.publish import publish_file
from holdfast.wire.store.run_store import translate_os_error

if TYPE_CHECKING:
    import ssl

    from holdfast.wire.secret_managers.request import Ask

SECRET_FILE_VARIABLE = "HOLDFAST_SECRET_FILE"
SECRET_VARIABLE = "HOLDFAST_SECRET"
SECRET_SOURCE_VARIABLE = "HOLDFAST_SECRET_FROM"
_SECRET_BYTES = 32


@dataclass(frozen=True)
class Secret:
    """The key of every HMAC of a run. Its repr and str show nothing of it.

    certificate: the run's certificate (DER), if the processes of the run speak TLS (`http/tls.py`);
    empty if they do not. It follows from the key.
    """

    key: bytes = field(repr=False)
    certificate: bytes = field(default=b"", repr=False)

    @property
    def uses_tls(self) -> bool:
        return bool(self.certificate)

    @cached_property
    def client_tls(self) -> ssl.SSLContext | None:
        """Settings of TLS for a client, made once; None if the run's processes do not speak TLS."""
        from holdfast.wire.http.tls import make_client_context

        return make_client_context(self) if self.uses_tls else None

    def hex(self) -> str:
        """For a pipe to a child, and for nothing else."""
        return f"{self.key.hex()}:{self.certificate.hex()}" if self.uses_tls else self.key.hex()

    @staticmethod
    def from_hex(text: str) -> Secret:
        """Raises ValueError for anything but 16 or more bytes in hexadecimal digits."""
        digits, _, certificate = text.strip().partition(":")
        key = bytes.fromhex(digits)
        if len(key) < 16:
            raise ValueError("a secret has at least 16 bytes (32 hexadecimal digits)")
        return Secret(key, bytes.fromhex(certificate))


def open_secret(
    folder: Path | str,
    environ: MutableMapping[str, str] | None = None,
    say: Callable[[str], None] = lambda note: None,
) -> Secret:
    """The secret of the run in `folder`: the launcher's, or the folder's own, made when absent.

    `say` gets a note about a launcher's file that a group may read. Raises RunFolderError when
    other users can read the file, or it does not hold a secret.
    """
    named = given_secret_file(os.environ if environ is None else environ)
    if named is not None:
        return read_secret(named, is_given=True, say=say)
    path = Path(folder) / "secret"
    if not secret_exists(path):
        create_secret(path)
    return read_secret(path)


def secret_exists(path: Path) -> bool:
    """Return True if the file is there. Raises StoreError if its disk does not tell: such a secret
    is not lost, and no other one may be made in its place."""
    try:
        return path.exists()
    except OSError as error:
        why = f"the run folder is out of reach ({error.strerror})"
        raise StoreError(why, where=str(path.parent), remedy="mount its disk again") from error


def given_secret_file(environ: MutableMapping[str, str], ask: Ask | None = None) -> Path | None:
    """Return the file of the launcher's secret; None if it gave none. A secret that is no file yet
    becomes one in memory, and `environ` then names that file only.

    ask: sends requests to a cloud. Raises RunFolderError if the variables hold no secret, or the
    cloud does not give it.
    """
    variables = (SECRET_FILE_VARIABLE, SECRET_VARIABLE, SECRET_SOURCE_VARIABLE)
    given = [name for name in variables if environ.get(name)]
    if len(given) > 1:
        raise RunFolderError(
            f"{given[0]} and {given[1]} both give the run's secret", remedy=f"unset {given[1]}"
        )
    if given and given[0] != SECRET_FILE_VARIABLE:
        text = environ.pop(given[0])
        if given[0] == SECRET_SOURCE_VARIABLE:
            text = _fetch_secret(text, environ, ask)
        try:
            secret = Secret.from_hex(text)
        except ValueError:
            raise RunFolderError(
                f"{given[0]} gives something that is no secret", remedy="use 64 hexadecimal digits"
            ) from None
        # Write a secret into a memory file that stays as long as this process; return its path.
        fd = os.memfd_create("secret", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.write(fd, secret.key.hex().encode())
        environ[SECRET_FILE_VARIABLE] = f"/proc/{os.getpid()}/fd/{fd}"
    named = environ.get(SECRET_FILE_VARIABLE)
    return Path(named).expanduser() if named else None


def _fetch_secret(address: str, environ: Mapping[str, str], ask: Ask | None) -> str:
    """Read a secret from a cloud's manager. Raises RunFolderError."""
    from holdfast.wire.secret_managers import aws, azure, google, request

    managers = {"aws": aws.read, "google": google.read, "azure": azure.read}
    kind, _, name = address.partition(":")
    if kind not in managers or not name:
        raise RunFolderError(
            f"{address!r} names no secret of a cloud",
            where=SECRET_SOURCE_VARIABLE,
            remedy="use aws:NAME, google:projects/PROJECT/secrets/NAME or azure:VAULT/NAME",
        )
    try:
        return managers[kind](name, environ, ask or request.ask)
    except request.SecretManagerError as error:
        raise RunFolderError(
            f"{address} could not be read: {error}",
            where=SECRET_SOURCE_VARIABLE,
            remedy="give this machine's identity the right to read it",
        ) from None


def read_secret(
    path: Path, *, is_given: bool = False, say: Callable[[str], None] = lambda note: None
) -> Secret:
    """Read a secret.

    Args:
        is_given: a launcher or a cluster made the file. If it is root's, a group may read it: that
            is how a cluster gives a file to a process of another user (`fsGroup`).
        say: gets a note if a group may read the file.

    Raises RunFolderError when the file is missing, readable by other users, written by another
    user (but root), or not a secret.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # of what is read, whatever the path names by now
            text = file.read(4096).decode("ascii")
    except FileNotFoundError:
        raise RunFolderError(
            "the secret's file is missing",
            where=str(path),
            remedy="mount its disk, or copy it from another node",
        ) from None
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
    if is_given and status.st_uid == 0 and status.st_mode & 0o077 == stat.S_IRGRP:
        say(f"{path}: the users of group {status.st_gid} can read the run's secret")
    elif status.st_mode & 0o077:
        raise RunFolderError(
            "other users of this machine can read the run's secret",
            where=str(path),
            remedy=_remedy_for_mode(path, is_given),
        )
    try:
        return Secret(Secret.from_hex(text).key)
    except ValueError:
        raise RunFolderError(
            "this is not a secret", where=str(path), remedy="write 64 hexadecimal digits into it"
        ) from None


def _remedy_for_mode(path: Path, is_given: bool) -> str:
    """Return what makes a file's mode acceptable, by who mounted it."""
    if (path.parent / "..data").is_symlink():  # how Kubernetes mounts a Secret
        return (
            "set defaultMode: 0400 for the Secret's volume (0440 together with "
            "securityContext.fsGroup, for a process that is not root's)"
        )
    try:
        is_read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        is_read_only = False
    if is_read_only or path.is_relative_to("/run/secrets"):
        return "mount it with mode 0400 (Docker and Compose: mode: 0400 of the secret)"
    return f"run: chmod 600 {path}" if is_given else f"remove it, or run: chmod 600 {path}"


def create_secret(path: Path) -> None:
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
            publish_file(temporary, path)
    except OSError as error:
        raise translate_os_error(error, path.parent) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
