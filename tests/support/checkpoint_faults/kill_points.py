"""Every point at which a process that writes files can be stopped.

`Points.watching()` counts the system calls by which Python changes files below a folder. A point is
before each call, after each, and in the middle of the bytes of a write. At a given number something
happens: the process ends, the disk is full, or another process has its turn. A first pass without a
number counts the points, so a step added to the protocol is covered automatically.

With `power=True` the loss is that of the machine, not of the process: unsynced changes may be lost.
File data not fsynced since it was written is cut or zeroed. Each new, removed or renamed name
without a later fsync of its folder is, by chance, as it was before.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BY_PATH = ("open", "link", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "truncate")
BY_DESCRIPTOR = (
    "write",
    "pwrite",
    "writev",
    "pwritev",
    "fsync",
    "fdatasync",
    "ftruncate",
    "posix_fallocate",
)
WRITES = ("write", "pwrite")

REAL = {name: getattr(os, name) for name in (*BY_PATH, *BY_DESCRIPTOR)}

Act = Callable[[str], None]


class Points:
    """Counts; at point number `at`, and if `lasting` at every one after it, calls `act`."""

    def __init__(
        self,
        folder: Path,
        at: int | None,
        act: Act,
        *,
        lasting: bool = False,
        power: random.Random | None = None,
    ) -> None:
        self.folder = str(folder)
        self.count = 0
        self.names: list[str] = []
        self._at, self._act, self._lasting = at, act, lasting
        self._acting = False
        self.loss = Loss(folder, power) if power is not None else None

    @contextmanager
    def watching(self) -> Iterator[Points]:
        try:
            for name in REAL:
                setattr(os, name, self._watched(name))
            yield self
        finally:
            for name, real in REAL.items():
                setattr(os, name, real)

    def reach(self, what: str) -> None:
        """One more point. May not return."""
        if self._acting:
            return
        number, self.count = self.count, self.count + 1
        if self._at is None:
            self.names.append(what)
            return
        if number == self._at or (self._lasting and number > self._at):
            self._acting = True  # calls of the action itself are no points
            try:
                self._act(what)
            finally:
                self._acting = False

    def _ours(self, name: str, arguments: tuple[Any, ...]) -> bool:
        if name in BY_DESCRIPTOR:
            target = _path_of(arguments[0])
        else:
            target = os.path.abspath(os.fspath(arguments[0]))
        if name == "open" and not _writes(arguments):
            return False
        return target.startswith(self.folder)

    def _watched(self, name: str) -> Callable[..., Any]:
        real = REAL[name]

        def call(*arguments: Any, **options: Any) -> Any:
            if self._acting or not self._ours(name, arguments):
                return real(*arguments, **options)
            label = f"{name} {_short(name, arguments, self.folder)}"
            self.reach(f"before {label}")
            if self.loss is not None:
                self.loss.before(name, arguments)
            half = _half(arguments[1]) if name in WRITES else 0
            if half:
                result = self._in_two(real, arguments, half, label)
            else:
                result = real(*arguments, **options)
            if self.loss is not None:
                self.loss.after(name, arguments, result)
            self.reach(f"after {label}")
            return result

        return call

    def _in_two(
        self, real: Callable[..., Any], arguments: tuple[Any, ...], half: int, label: str
    ) -> int:
        """A write of which the first half is there before the second is begun."""
        fd, data, *offset = arguments
        view = memoryview(data).cast("B")
        done = int(real(fd, view[:half], *offset))
        self.reach(f"inside {label}")
        if done < half:
            return done
        return done + int(real(fd, view[half:], *(at + half for at in offset)))


def _half(data: Any) -> int:
    """Return where to cut a write in two: between pages if it consists of full pages (it may be
    direct)."""
    size = memoryview(data).nbytes
    unit = 4096 if size % 4096 == 0 else 1
    return size // 2 // unit * unit


def _path_of(target: Any) -> str:
    """The file behind a descriptor or a path."""
    if isinstance(target, int):
        try:
            return os.readlink(f"/proc/self/fd/{target}")
        except OSError:
            return ""
    return os.path.abspath(os.fspath(target))


def _writes(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) > 1 and bool(arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _short(name: str, arguments: tuple[Any, ...], folder: str) -> str:
    which = arguments[1] if name in ("link", "rename", "replace") else arguments[0]
    name = _path_of(which).removeprefix(folder).lstrip("/")
    return name.split(".tmp-")[0] + "(temporary)" if ".tmp-" in name else name


class Loss:
    """What a loss of power would take away: changes that nothing has made durable yet."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng = rng
        self._shadow = folder.parent / f"{folder.name}.shadow"
        self._shadow.mkdir()
        self._names: list[tuple[str, Callable[[], None]]] = []  # (folder, undo), oldest first
        self._dirty: dict[tuple[int, int], int] = {}  # inode -> our own descriptor of it
        self._kept = 0

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("unlink", "remove"):
            path = os.path.abspath(os.fspath(arguments[0]))
            self._kept += 1
            kept = str(self._shadow / str(self._kept))
            with suppress(OSError):
                REAL["link"](path, kept)
                self._names.append((os.path.dirname(path), lambda: _relink(kept, path)))
        elif name == "open" and arguments[1] & os.O_CREAT:
            path = os.path.abspath(os.fspath(arguments[0]))
            if not os.path.lexists(path):
                self._names.append((os.path.dirname(path), lambda: _unlink(path)))
        elif name == "mkdir":
            path = os.path.abspath(os.fspath(arguments[0]))
            if not os.path.isdir(path):
                undo = lambda: shutil.rmtree(path, ignore_errors=True)  # noqa: E731
                self._names.append((os.path.dirname(path), undo))
        elif name == "link":
            path = os.path.abspath(os.fspath(arguments[1]))
            if not os.path.lexists(path):
                self._names.append((os.path.dirname(path), lambda: _unlink(path)))

    def after(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name in ("write", "pwrite", "writev", "pwritev", "ftruncate"):
            about = os.fstat(arguments[0])
            if (about.st_dev, about.st_ino) not in self._dirty:
                fd = REAL["open"](f"/proc/self/fd/{arguments[0]}", os.O_RDWR | os.O_CLOEXEC)
                self._dirty[about.st_dev, about.st_ino] = fd
        elif name in ("fsync", "fdatasync"):
            about = os.fstat(arguments[0])
            if stat.S_ISDIR(about.st_mode):
                folder = _path_of(arguments[0])
                self._names = [entry for entry in self._names if entry[0] != folder]
            else:
                fd = self._dirty.pop((about.st_dev, about.st_ino), None)
                if fd is not None:
                    os.close(fd)

    def strike(self) -> None:
        """The power goes."""
        for fd in self._dirty.values():
            size = os.fstat(fd).st_size
            if size == 0:
                continue
            cut = self._rng.randrange(size + 1)
            if self._rng.random() < 0.5:
                REAL["ftruncate"](fd, cut)
            else:
                REAL["pwrite"](fd, bytes(size - cut), cut)
        for _, undo in reversed(self._names):
            if self._rng.random() < 0.5:
                undo()
        shutil.rmtree(self._shadow, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._shadow, ignore_errors=True)


def _unlink(path: str) -> None:
    with suppress(OSError):
        REAL["unlink"](path)


def _relink(kept: str, path: str) -> None:
    with suppress(OSError):
        REAL["link"](kept, path)
