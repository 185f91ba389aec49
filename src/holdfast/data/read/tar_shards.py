"""Samples in tar files, by number: files of one name, such as 0007.wav and 0007.txt, are a sample.

This is the layout of WebDataset. A number is the place of a sample in the shards, which are taken
in the order of their names. An index of all members is made when the shards are opened. It reads
the headers alone, and skips what lies between them.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from holdfast.borders import Border, Unread
from holdfast.errors import TaskError

SHARDS_KEY = "task.args.shards"
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True)
class Member:
    """The place of the bytes of a file."""

    shard: int  # number of the tar file
    offset: int  # bytes from its start
    size: int  # bytes


class TarShards:
    """The samples of a folder's tar files.

    parts: the extensions of which each sample has exactly one each, as ((".wav",), (".txt",)).
    version: covers the names, places and sizes of all members. It does not cover their bytes.
    Raises TaskError for what is no such folder.
    """

    def __init__(self, folder: str | Path, parts: Collection[Collection[str]]) -> None:
        self._paths = _tar_files(Path(folder))
        self._parts = [tuple(each) for each in parts]
        used = frozenset(name for each in self._parts for name in each)
        self._unread = Unread(
            Border("the shards", used, unknown="count", entry="files that end with")
        )
        self._samples: list[tuple[str, Mapping[str, Member]]] = []
        self._files: dict[int, int] = {}  # of open shards
        digest = xxhash.xxh3_128()
        for number, path in enumerate(self._paths):
            self._index(number, path, digest)
        self.version = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._samples)

    def notes(self) -> list[str]:
        """Return a line about files that no sample uses."""
        return [line] if (line := self._unread.line()) else []

    def place(self, index: int) -> str:
        """Return the name of a sample, for a message."""
        name, members = self._samples[index]
        return f"{self._paths[next(iter(members.values())).shard]}: {name}"

    def read(self, index: int) -> dict[str, bytes]:
        """Return the bytes of a sample's parts, by extension. Raises TaskError for a short file."""
        found = {}
        for extension, member in self._samples[index][1].items():
            file = self._files.get(member.shard)
            if file is None:
                file = os.open(self._paths[member.shard], os.O_RDONLY | os.O_CLOEXEC)
                self._files[member.shard] = file
            content = os.pread(file, member.size, member.offset)
            if len(content) != member.size:
                raise TaskError(
                    f"{self.place(index)} ends early",
                    where=SHARDS_KEY,
                    remedy="write the shard again",
                )
            found[extension] = content
        return found

    def _index(self, number: int, path: Path, digest: xxhash.xxh3_128) -> None:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\0".encode())
        members: dict[str, dict[str, Member]] = {}
        try:
            with tarfile.open(path, "r:") as file:
                for info in file:
                    if not info.isfile():
                        continue
                    digest.update(f"{info.name} {info.offset_data} {info.size}\0".encode())
                    folder, _, base = info.name.rpartition("/")
                    stem, dot, extension = base.partition(".")
                    key = f"{folder}/{stem}" if folder else stem
                    of_sample = members.setdefault(key, {})
                    name = f"{dot}{extension}".lower()
                    if name in of_sample:
                        raise _refused(path, f"has {info.name} twice")
                    of_sample[name] = Member(number, info.offset_data, info.size)
                    if info.offset_data + info.size > size:
                        raise _refused(path, f"ends inside {info.name}")
        except tarfile.TarError as error:
            raise _refused(path, f"cannot be read as tar ({error})") from None
        for key, of_sample in members.items():
            self._samples.append((f"sample {key}", self._chosen(path, key, of_sample)))

    def _chosen(self, path: Path, key: str, members: Mapping[str, Member]) -> dict[str, Member]:
        """Return the parts of a sample. Raises TaskError if one is missing or there twice."""
        chosen: dict[str, Member] = {}
        for extensions in self._parts:
            there = [name for name in extensions if name in members]
            if len(there) != 1:
                words, has = " or ".join(extensions), " and ".join(sorted(members))
                what = "both" if there else f"no {words}"
                raise _refused(path, f"sample {key} has {what}: it has {has}")
            chosen[there[0]] = members[there[0]]
        unread = [name for name in members if name not in self._unread.border.used]
        self._unread.add(unread, f"{path}: {key}")
        return chosen


def _tar_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise TaskError(
            f"there is no folder {folder}", where=SHARDS_KEY, remedy="name the folder of tar files"
        )
    names = sorted(path for path in folder.iterdir() if path.is_file())
    if packed := [path for path in names if path.name.endswith(_COMPRESSED)]:
        raise TaskError(
            f"{packed[0]} is compressed, and samples of it cannot be read by number",
            where=SHARDS_KEY,
            remedy="unpack the tar file, for audio and images are compressed themselves",
        )
    if not (found := [path for path in names if path.suffix == ".tar"]):
        raise TaskError(
            f"{folder} has no file *.tar", where=SHARDS_KEY, remedy="name the folder of tar files"
        )
    return found


def _refused(path: Path, what: str) -> TaskError:
    return TaskError(f"{path} {what}", where=SHARDS_KEY, remedy="write the shard again")
