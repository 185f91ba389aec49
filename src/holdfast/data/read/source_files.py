"""Finds the files of a source: a file, a folder with what is linked into it, or a glob.

What is not read is counted with its cause, so that no part of a corpus is left out in silence.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from typing import TYPE_CHECKING

from holdfast.errors import DataError, nearest_of

if TYPE_CHECKING:  # a preparing process needs no pydantic
    from holdfast.config.sections.data import SourceConfig

# Folders of the standard library that are tests, or programs rather than library.
STDLIB_SKIP = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "lib2to3",
        "ensurepip",
        "turtledemo",
        "lib-dynload",
    }
)

COMPANIONS = frozenset(
    {
        "readme.md",
        "license",
        "license.txt",
        "license.md",
        "_success",
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "state.json",
    }
)
"""Files that lie in a folder of data and describe it. Only a source of plain text reads them."""

TOKEN_KIND = "megatron"
"""Pairs of files with tokens, `.bin` and `.idx`."""

NAMED = 3
"""Files that a line names; the rest is counted."""


@dataclass
class FoundFiles:
    """Files as (path, size), sorted by path; `unread`: cause -> what was left for it."""

    files: list[tuple[str, int]] = field(default_factory=list)
    unread: dict[str, list[str]] = field(default_factory=dict)
    refused: list[DataError] = field(default_factory=list)

    def leave(self, cause: str, path: str) -> None:
        self.unread.setdefault(cause, []).append(path)

    def describe_unread(self) -> str:
        """A line about what was not read; "" if everything was."""
        parts = []
        for cause, paths in sorted(self.unread.items()):
            names = ", ".join(os.path.basename(p) for p in sorted(paths)[:NAMED])
            more = ", ..." if len(paths) > NAMED else ""
            parts.append(f"{len(paths):,} {cause} ({names}{more})")
        return "not read: " + ", ".join(parts) if parts else ""


def find_files(config: SourceConfig, where: str) -> FoundFiles:
    """Return a source's files. Raises DataError if there is none."""
    found = FoundFiles()
    if config.kind == "python-stdlib":
        path = sysconfig.get_path("stdlib")
        chosen = [p for p in _walk_stdlib(path) if p.endswith(".py")]
        paths = [p for p in chosen if not os.path.basename(p).startswith("_sysconfigdata")]
    else:
        path = os.path.expanduser(config.place or "")  # the run file demands one
        is_prefix = config.kind == TOKEN_KIND and os.path.isfile(f"{path}.idx")
        matches = _chosen(f"{path}.idx" if is_prefix else path, found)
        if matches is None:
            folder = os.path.dirname(path) or "."
            remedy = "name a file, a folder or a glob"
            if config.path and path != config.path and os.path.exists(config.path):
                remedy = (
                    "a relative path in a run file starts at the run file's folder: write "
                    f"{os.path.abspath(config.path)}"
                )
            elif os.path.islink(path):
                remedy = "it is a dangling link: mend it, or name another file"
            elif os.path.isdir(folder):
                near = nearest_of(os.path.basename(path), sorted(os.listdir(folder)))
                remedy = f"did you mean {os.path.join(folder, near)}?" if near else remedy
            raise DataError(f"{path} does not exist", where=f"{where}.path", remedy=remedy)
        paths = matches
        if config.kind != "text" and paths != [path]:
            companions = [p for p in paths if os.path.basename(p).lower() in COMPANIONS]
            for companion in companions:
                found.leave("files that describe the data", companion)
            paths = sorted(set(paths) - set(companions))
        if config.kind == TOKEN_KIND:
            paths, rest = _with_pairs(paths)
            for other in rest:
                found.leave("files that are no .bin and no .idx", other)
    for name in sorted(paths):
        try:
            found.files.append((name, os.path.getsize(name)))
        except OSError as error:
            found.refused.append(unreadable_error(name, error))
    if not found.files and not found.refused:
        raise DataError(
            f"{path} holds no file" + (f" ({found.describe_unread()})" if found.unread else ""),
            where=f"{where}.path",
            remedy="name a file, a folder or a glob that matches one",
        )
    return found


def _chosen(path: str, found: FoundFiles) -> list[str] | None:
    """Files that a path means; None if there is nothing."""
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        return list(walk(path, found))
    if not has_magic(path):
        return None
    chosen: list[str] = []
    for match in sorted(glob(path, recursive=True), key=_real_first):
        if os.path.isdir(match):
            if "**" not in path:
                found.leave("folders that the glob matches but does not enter (use **)", match)
        elif not os.path.exists(match):
            found.leave("dangling links", match)
        elif not os.path.isfile(match):
            found.leave("things that are no files", match)
        else:
            chosen.append(match)
    # Without files that a linked folder shows a second time.
    seen: dict[str, str] = {}
    for path in chosen:
        folder = os.path.realpath(os.path.dirname(path))
        seen.setdefault(os.path.join(folder, os.path.basename(path)), path)
    return list(seen.values())


def _with_pairs(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return both files of each pair that one of the paths is of, and the paths of no pair."""
    stems = {path[:-4] for path in paths if path.endswith((".bin", ".idx"))}
    rest = [path for path in paths if not path.endswith((".bin", ".idx"))]
    both = sorted(stem + end for stem in stems for end in (".bin", ".idx"))
    return [path for path in both if os.path.exists(path)], rest


def _real_first(path: str) -> tuple[bool, str]:
    return os.path.realpath(os.path.dirname(path)) != os.path.abspath(os.path.dirname(path)), path


def walk(root: str, found: FoundFiles) -> Iterator[str]:
    """Files below a folder, and below the folders that are linked into it. Each folder is walked
    once: under its own path if it has one here, otherwise under the first link in order."""
    seen: set[tuple[int, int]] = set()
    pending = [root]

    def refuse(error: OSError) -> None:
        found.refused.append(unreadable_error(str(error.filename), error))

    while pending:
        linked: list[str] = []
        for start in pending:
            for folder, folders, files in os.walk(start, onerror=refuse):
                state = os.stat(folder)
                if (state.st_dev, state.st_ino) in seen:
                    folders[:] = []
                    continue
                seen.add((state.st_dev, state.st_ino))
                linked += _enter(folder, folders, found)
                for name in files:
                    path = os.path.join(folder, name)
                    if name.startswith("."):
                        found.leave("hidden files", path)
                    elif os.path.isfile(path):
                        yield path
                    elif os.path.islink(path) and not os.path.exists(path):
                        found.leave("dangling links", path)
                    else:
                        found.leave("things that are no files", path)
        pending = sorted(linked)


def _enter(folder: str, folders: list[str], found: FoundFiles) -> list[str]:
    """Leave in `folders` the ones to walk now; return the linked ones."""
    linked = []
    for name in list(folders):
        path = os.path.join(folder, name)
        if name.startswith("."):
            found.leave("hidden folders", path)
        elif os.path.islink(path):
            linked.append(path)
    folders[:] = sorted(f for f in folders if not f.startswith("."))
    folders[:] = [f for f in folders if os.path.join(folder, f) not in linked]
    return linked


def _walk_stdlib(root: str) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in STDLIB_SKIP and not f.startswith("."))
        for name in files:
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield path


def unreadable_error(path: str, error: OSError) -> DataError:
    return DataError(
        f"cannot be read ({error.strerror or error})",
        where=path,
        remedy="give yourself the permission to read it, or leave it out of the source",
    )
