"""A disk that hangs, is slow or read-only on command: `python -m tests.support.faulty_disk FOLDER
POINT`.

A file system in user space (FUSE, spoken directly) shows FOLDER at POINT. It needs the rights of
root in the user namespace of the caller, so `unshare -Urm` is enough. The caller looks at FOLDER,
which always answers. Each line of the standard input is a command:

    well        Every request is answered at once.
    slow S      Each fsync takes S seconds.
    hang        No request is answered.
    read-only   Every change fails with EROFS.

Prints `ready` once it is mounted, and a line of JSON for each fsync. That has begin and end in
seconds of the monotonic clock, the process that asked, and the path within FOLDER.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = 48
"""Requests under way at a time: more than the threads of all agents and movers of a test."""
_MAX_WRITE = 128 * 1024
_REQUEST = struct.Struct("<IIQQIIIHH")
_REPLY = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
_STATFS = struct.Struct("<QQQQQIIIIIIIIII")
_SET_MODE, _SET_SIZE, _SET_TIMES = 1, 8, 16 | 32
_FLAGS = 1 | 1 << 5 | 1 << 18  # asynchronous reads, big writes, parallel lookups
_OPEN_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_TRUNC
_SILENT = {2, 36, 42}  # FORGET, INTERRUPT, BATCH_FORGET: have no reply
_ROOT = 1


def _name(data: bytes) -> str:
    return os.fsdecode(data.split(b"\0", 1)[0])


def _names(data: bytes) -> tuple[str, str]:
    old, new = data.split(b"\0")[:2]
    return os.fsdecode(old), os.fsdecode(new)


class Disk:
    """What the disk does: one thread sets it, all threads read it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mode, self._seconds = "well", 0.0

    def order(self, command: str) -> None:
        mode, _, seconds = command.strip().partition(" ")
        with self._changed:
            self._mode, self._seconds = mode, float(seconds or 0)
            self._changed.notify_all()

    def wait(self, is_sync: bool) -> None:
        """Return once the disk answers."""
        with self._changed:
            self._changed.wait_for(lambda: self._mode != "hang")
            seconds = self._seconds if is_sync and self._mode == "slow" else 0.0
        time.sleep(seconds)

    @property
    def is_read_only(self) -> bool:
        return self._mode == "read-only"


class Files:
    """The files below a folder by number. Each number is a descriptor of this process."""

    def __init__(self, folder: Path) -> None:
        self._root = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._folder = os.fspath(folder)
        self._lock = threading.Lock()
        self._by_inode: dict[tuple[int, int], int] = {}

    def path(self, node: int) -> str:
        return f"/proc/self/fd/{self._root if node == _ROOT else node}"

    def name(self, fd: int) -> str:
        """Return the path of an open file within the folder."""
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), self._folder)

    def find(self, parent: int, name: str) -> int:
        """Return the number of a file. It stays open, so no other file gets its inode."""
        fd = os.open(f"{self.path(parent)}/{name}", os.O_PATH | os.O_NOFOLLOW)
        found = os.fstat(fd)
        with self._lock:
            known = self._by_inode.setdefault((found.st_dev, found.st_ino), fd)
        if known != fd:
            os.close(fd)
        return known


class FileSystem:
    """The requests of the kernel, by number of the operation."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._files, self._disk = Files(folder), disk
        self._listings: dict[int, list[str]] = {}  # of folders that are open
        self._reads: dict[int, Callable[[int, bytes], bytes]] = {
            1: lambda node, data: self._entry(node, _name(data)),  # LOOKUP
            3: lambda node, data: self._attributes(node),  # GETATTR
            5: lambda node, data: os.fsencode(os.readlink(self._files.path(node))),  # READLINK
            15: self._read,
            17: self._statfs,
            18: self._release,
            25: lambda node, data: b"",  # FLUSH
            26: self._init,
            27: self._open,  # OPENDIR
            28: self._read_folder,
            29: self._release,  # RELEASEDIR
        }
        self._changes: dict[int, Callable[[int, bytes], bytes]] = {
            4: self._set_attributes,
            9: self._make_folder,
            10: lambda node, data: self._remove(os.unlink, node, data),
            11: lambda node, data: self._remove(os.rmdir, node, data),
            12: lambda node, data: self._rename(node, data, 8),
            13: self._link,
            16: self._write,
            20: self._sync,
            30: self._sync,  # FSYNCDIR
            35: self._create,
            45: lambda node, data: self._rename(node, data, 16),  # RENAME2, without its flags
        }

    def answer(self, operation: int, node: int, process: int, data: bytes) -> bytes:
        """Return the reply to a request. Raises OSError."""
        is_sync, begin = operation in (20, 30), time.monotonic()
        title = _title(process) if is_sync else ""  # before the thread that asked is over
        self._disk.wait(is_sync)
        writes = operation == 14 and struct.unpack_from("<I", data)[0] & os.O_ACCMODE
        if self._disk.is_read_only and (writes or operation in self._changes):
            raise OSError(errno.EROFS, "read-only")
        if operation == 14:  # OPEN
            return self._open(node, data)
        do = self._reads.get(operation) or self._changes.get(operation)
        if do is None:
            raise OSError(errno.ENOSYS, "not needed")
        done = do(node, data)
        if is_sync:
            name = self._files.name(struct.unpack_from("<Q", data)[0])
            line = {"begin": begin, "end": time.monotonic(), "process": title, "path": name}
            os.write(1, json.dumps(line).encode() + b"\n")  # at once: many threads write
        return done

    # --- what is there --------------------------------------------------------------------------
    def _init(self, node: int, data: bytes) -> bytes:
        ahead = struct.unpack_from("<III", data)[2]
        head = struct.pack("<IIIIHHII", 7, 31, ahead, _FLAGS, 64, 48, _MAX_WRITE, 1)
        return head.ljust(64, b"\0")

    def _attributes(self, node: int) -> bytes:
        return bytes(16) + _pack_attributes(os.stat(self._files.path(node)), node)

    def _entry(self, parent: int, name: str) -> bytes:
        node = self._files.find(parent, name)
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + _pack_attributes(os.fstat(node), node)

    def _read(self, node: int, data: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", data)
        return os.pread(fd, size, offset)

    def _read_folder(self, node: int, data: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", data)
        if not offset:  # a listing in several pieces is that of its beginning
            self._listings[fd] = os.listdir(self._files.path(node))
        out = b""
        for number, entry in enumerate(self._listings[fd][offset:], 1):
            text = os.fsencode(entry)
            one = struct.pack("<QQII", 2**40 + offset + number, offset + number, len(text), 0)
            one += text.ljust((len(text) + 7) // 8 * 8, b"\0")
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def _statfs(self, node: int, data: bytes) -> bytes:
        v = os.statvfs(self._files.path(_ROOT))
        sizes = (
            v.f_blocks,
            v.f_bfree,
            v.f_bavail,
            v.f_files,
            v.f_ffree,
            v.f_bsize,
            255,
            v.f_frsize,
        )
        return _STATFS.pack(*sizes, *[0] * 7)

    # --- open files -----------------------------------------------------------------------------
    def _open(self, node: int, data: bytes) -> bytes:
        flags = struct.unpack_from("<I", data)[0] & _OPEN_FLAGS
        fd = os.open(self._files.path(node), flags & ~os.O_APPEND)
        return struct.pack("<QII", fd, 0, 0)

    def _create(self, node: int, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", data)
        name = _name(data[16:])
        flags = flags & (_OPEN_FLAGS | os.O_EXCL) & ~os.O_APPEND | os.O_CREAT
        fd = os.open(f"{self._files.path(node)}/{name}", flags, mode & 0o7777)
        return self._entry(node, name) + struct.pack("<QII", fd, 0, 0)

    def _release(self, node: int, data: bytes) -> bytes:
        (fd,) = struct.unpack_from("<Q", data)
        self._listings.pop(fd, None)
        os.close(fd)
        return b""

    def _write(self, node: int, data: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", data)
        return struct.pack("<II", os.pwrite(fd, data[40 : 40 + size], offset), 0)

    def _sync(self, node: int, data: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", data)[0])
        return b""

    # --- changes of names -----------------------------------------------------------------------
    def _set_attributes(self, node: int, data: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, *_, mode, _, _, _, _ = _SETATTR.unpack_from(data)
        path = self._files.path(node)
        if valid & _SET_SIZE:
            os.truncate(path, size)
        if valid & _SET_MODE:
            os.chmod(path, mode & 0o7777)
        if valid & _SET_TIMES:
            os.utime(path, (atime, mtime))
        return self._attributes(node)

    def _make_folder(self, node: int, data: bytes) -> bytes:
        name = _name(data[8:])
        os.mkdir(f"{self._files.path(node)}/{name}", struct.unpack_from("<I", data)[0] & 0o7777)
        return self._entry(node, name)

    def _remove(self, how: Callable[[str], None], node: int, data: bytes) -> bytes:
        how(f"{self._files.path(node)}/{_name(data)}")
        return b""

    def _rename(self, node: int, data: bytes, head: int) -> bytes:
        if head == 16 and struct.unpack_from("<I", data, 8)[0]:
            raise OSError(errno.EINVAL, "flags")
        old, new = _names(data[head:])
        target = self._files.path(struct.unpack_from("<Q", data)[0])
        os.rename(f"{self._files.path(node)}/{old}", f"{target}/{new}")
        return b""

    def _link(self, node: int, data: bytes) -> bytes:
        source, name = self._files.path(struct.unpack_from("<Q", data)[0]), _name(data[8:])
        target = f"{self._files.path(node)}/{name}"
        os.link(source, target, src_dir_fd=0, follow_symlinks=True)  # 0 makes it follow
        return self._entry(node, name)


def _title(thread: int) -> str:
    """Return the role of the process of a thread, or the beginning of its command line."""
    try:
        words = Path(f"/proc/{thread}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return f"thread {thread}"
    return words.removeprefix("holdfast: ").partition(" |")[0][:60]


def _pack_attributes(found: os.stat_result, node: int) -> bytes:
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return _ATTRIBUTES.pack(
        node,
        found.st_size,
        found.st_blocks,
        *(each // 10**9 for each in times),
        *(each % 10**9 for each in times),
        found.st_mode,
        found.st_nlink,
        found.st_uid,
        found.st_gid,
        0,
        4096,
        0,
    )


def _serve(device: int, files: FileSystem) -> None:
    while True:
        try:
            request = os.read(device, _MAX_WRITE + 4096)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                continue  # the request was taken back
            return  # unmounted
        _, operation, unique, node, _, _, process, _, _ = _REQUEST.unpack_from(request)
        if operation in _SILENT:
            continue
        try:
            code, reply = 0, files.answer(operation, node, process, request[_REQUEST.size :])
        except OSError as error:
            code, reply = -(error.errno or errno.EIO), b""
        try:
            os.write(device, _REPLY.pack(_REPLY.size + len(reply), code, unique) + reply)
        except OSError:
            continue  # its process was killed


def _mount(point: Path) -> int:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    said = f"fd={device},rootmode={stat.S_IFDIR:o},user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"faulty", os.fsencode(point), b"fuse", 6, said.encode()):  # nosuid, nodev
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(point))
    return device


class FaultyDisk:
    """The program above as a process; for callers in a user and mount namespace of their own."""

    def __init__(self, folder: Path, point: Path) -> None:
        self.syncs: list[dict[str, Any]] = []
        """Each fsync that is over, as printed."""
        self._point = point
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faulty_disk", str(folder), str(point)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout
        if self._process.stdout.readline() != "ready\n":
            raise OSError(f"no file system in user space at {point}")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def order(self, command: str) -> None:
        assert self._process.stdin
        print(command, file=self._process.stdin, flush=True)

    def close(self) -> None:
        """End the disk: every request fails then."""
        self._process.kill()
        self._process.wait()
        subprocess.run(["umount", "--lazy", self._point], check=True)

    def _read(self) -> None:
        assert self._process.stdout
        self.syncs.extend(map(json.loads, self._process.stdout))


def main(folder: Path, point: Path) -> None:
    disk = Disk()
    files, device = FileSystem(folder, disk), _mount(point)
    for _ in range(THREADS):
        threading.Thread(target=_serve, args=(device, files), daemon=True).start()
    print("ready", flush=True)
    for command in sys.stdin:
        disk.order(command)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
