"""Sources at an address: a preparation fetches their files to this node and reads them there.

    <cache>/sources/<hash>/files/...        the objects below the address, under the same names
    <cache>/sources/<hash>/fetched.jsonl    a line for each file that is complete, with its version

A file that is complete is fetched again only if the size or the version of its object has changed.
So a preparation that was killed continues. Files whose objects are no longer there are removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from holdfast.config.sections.data import DataConfig, SourceConfig
from holdfast.core.json_parsing import parse_json
from holdfast.data.stream.dataset_location import cache_root, is_address
from holdfast.data.stream.node_cache import explain_cache_errors
from holdfast.errors import DataError
from holdfast.wire.store.location import open_objects, parse_location
from holdfast.wire.store.object_version import Objects, ObjectVersion
from holdfast.wire.store.run_store import MissingKeyError

FETCH_THREADS = 8
PIECE_BYTES = 8 << 20
"""Bytes of one request."""
LIST = "fetched.jsonl"


def fetch_sources(
    config: DataConfig, say: Callable[[str], None], progress: Callable[[str, int, int], None]
) -> tuple[SourceConfig, ...]:
    """Return the sources as they lie on this node. Those at an address are fetched first.

    Raises DataError for an address that has no source, and StoreError if it does not answer."""
    return tuple(
        fetch_source(config, index, say=say, progress=progress)
        for index in range(len(config.sources))
    )


def fetch_source(
    config: DataConfig,
    index: int,
    *,
    say: Callable[[str], None],
    progress: Callable[[str, int, int], None],
) -> SourceConfig:
    """Return one source as it lies on this node. Raises as `fetch_sources` does."""
    source = config.sources[index]
    if source.place is None or not is_address(source.place):
        return source
    key = f"data.sources[{index}].path"
    place = _fetch(source.place, key, cache_root(config), progress)
    say(f"{source.mix_name}: read from {place}")
    return source.at(str(place))


def _fetch(location: str, key: str, root: Path, progress: Callable[[str, int, int], None]) -> Path:
    """Return the folder, or the file, that has the source now."""
    parsed = parse_location(location)
    if parsed.scheme == "file" or parsed.seal or parsed.compress:
        what = "starts with file://" if parsed.scheme == "file" else "has an option of run stores"
        remedy = "write the path alone" if parsed.scheme == "file" else "leave it out"
        raise DataError(f"the address of a source {what}", where=key, remedy=remedy)
    objects, name = open_objects(parsed), ""
    versions = _without_markers(objects)
    if not versions and parsed.prefix:  # the address of one object
        parent, _, name = parsed.prefix.rpartition("/")
        objects = open_objects(replace(parsed, prefix=parent))
        try:
            versions = [objects.version(name)]
        except MissingKeyError:
            what = f"there is no object at {parsed.where}, and none below it"
            remedy = "name an object, or what the names of several begin with up to a /"
            raise DataError(what, where=key, remedy=remedy) from None
    for each in versions:
        if {"", ".", ".."} & set(each.path.split("/")):
            raise DataError(
                f"the object {each.path!r} has a name that is no path",
                where=parsed.where,
                remedy="give it another name",
            )
    names = {each.path for each in versions}
    for each in versions:
        parts = each.path.split("/")
        above = names & {"/".join(parts[:end]) for end in range(1, len(parts))}
        if above:
            raise DataError(
                f"the object {min(above)!r} would be a file and the folder of {each.path!r}",
                where=parsed.where,
                remedy="give it another name",
            )
    folder = root / "sources" / xxh3_128_hexdigest(parsed.where.encode())
    with explain_cache_errors(folder):
        (folder / "files").mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _update(objects, versions, folder, progress)
    return folder / "files" / name


def _without_markers(objects: Objects) -> list[ObjectVersion]:
    """Return all objects but the empty ones with a name that ends in a slash: web consoles write
    these as folders. A listing has their names without the slash, under which no object is."""
    found = []
    for each in objects.versions(""):
        if not each.size:
            if not each.path:
                continue
            try:
                objects.version(each.path)
            except MissingKeyError:
                continue
        found.append(each)
    return found


def _update(
    objects: Objects,
    versions: Sequence[ObjectVersion],
    folder: Path,
    progress: Callable[[str, int, int], None],
) -> None:
    """Fetch what is missing or has changed, and remove what is no longer there."""
    files, wanted = folder / "files", {each.path: each for each in versions}
    complete = _read_list(folder / LIST)
    for path in sorted(path for path in files.rglob("*") if path.is_file()):
        known = complete.get(path.relative_to(files).as_posix())
        if known is None or known != wanted.get(known.path) or path.stat().st_size != known.size:
            path.unlink()
    for path in sorted((path for path in files.rglob("*") if path.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
    missing = [each for each in versions if not (files / each.path).is_file()]
    done, lock = len(versions) - len(missing), threading.Lock()
    progress("fetching", done, len(versions))

    def fetch(each: ObjectVersion) -> None:
        nonlocal done
        target, part = files / each.path, folder / f".{xxh3_128_hexdigest(each.path.encode())}"
        with part.open("wb") as out:
            for at in range(0, each.size, PIECE_BYTES):
                piece = bytearray(min(PIECE_BYTES, each.size - at))
                objects.read_range(each.path, at, [memoryview(piece)])
                out.write(piece)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, target)
        with lock:
            with (folder / LIST).open("a") as file:
                file.write(json.dumps(each) + "\n")
            done += 1
            progress("fetching", done, len(versions))

    with ThreadPoolExecutor(FETCH_THREADS) as threads:
        list(threads.map(fetch, missing))


def _read_list(path: Path) -> dict[str, ObjectVersion]:
    """Return the files that are complete. A line that a kill cut short is left out."""
    found: dict[str, ObjectVersion] = {}
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        try:
            name, size, version = parse_json(line)
        except ValueError:
            continue
        found[str(name)] = ObjectVersion(str(name), int(size), str(version))
    return found
