"""Prepares the dataset of an address: once, by one node, on its own disk; then it is uploaded.

The node that makes the next object below `preparing/` at the address prepares. It makes another
every few seconds, as a sign of life. Other nodes watch by their own clocks, and one of them takes
over if none has come for `EXPIRY_S`. The manifest goes last, so a dataset is complete or absent.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.core.json_parsing import parse_json
from holdfast.data.read.files import READ_BYTES, checksum, file_checksum
from holdfast.data.stream.dataset import MANIFEST, Dataset
from holdfast.data.stream.dataset_location import RemoteDataset, has_manifest
from holdfast.data.stream.node_cache import explain_cache_errors, make_room
from holdfast.errors import DataError, StoreError
from holdfast.wire.store.location import probe_store
from holdfast.wire.store.run_store import AlreadyExistsError, MissingKeyError, RunStore

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]

EXPIRY_S = 60.0
"""Seconds without a sign of life after which another node takes over."""
UPLOADS = 4
"""Files that are sent at a time."""
_PREFIX = "preparing/"


def upload_dataset(
    remote: RemoteDataset,
    prepare: Callable[[], Dataset],
    say: Say,
    progress: Progress,
    *,
    wait: bool,
) -> None:
    """Have the dataset at its address: prepared here and uploaded, or by another node meanwhile.

    prepare: makes it in `remote.prepare_folder`. wait: for another node that prepares it. Raises
    UserError. What is prepared and uploaded stays; the same call resumes.
    """
    claim = _Claim(remote.store, remote.where, _node_id(remote), EXPIRY_S, say)
    if not claim.acquire(wait):
        return
    with claim.renewed():
        probe_store(remote.store, remote.where)
        folder = prepare().folder
        _upload_shards(remote.store, folder, progress)
        claim.renew()
        manifest = (folder / MANIFEST).read_bytes()
        with suppress(AlreadyExistsError):  # the opened dataset is compared with the run file
            remote.store.create(MANIFEST, manifest)
        say(f"uploaded the dataset to {remote.where}")
    claim.release()
    version = str(parse_json(manifest)["version"])
    # Let this node have the dataset already, up to the limit of its cache.
    target = remote.root / version
    with explain_cache_errors(target):
        for path in sorted(folder.glob("shards/*")):
            (target / "shards").mkdir(parents=True, exist_ok=True)
            os.replace(path, target / "shards" / path.name)
        shutil.rmtree(folder, ignore_errors=True)
        make_room(remote.root, remote.limit)


def _upload_shards(store: RunStore, folder: Path, progress: Progress) -> None:
    """Send all files but the manifest."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    keys = {p.relative_to(folder).as_posix(): p for p in files}
    keys = {key: path for key, path in keys.items() if not key.startswith(".")}
    progress("uploading", 0, len(keys))
    with ThreadPoolExecutor(UPLOADS, "upload") as pool:
        tasks = [pool.submit(_upload_file, store, key, path) for key, path in keys.items()]
        try:
            for done, task in enumerate(as_completed(tasks), start=1):
                task.result()
                progress("uploading", done, len(tasks))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _upload_file(store: RunStore, key: str, path: Path) -> None:
    """Send a file, unless its very bytes are there. Other bytes were left by another preparation:
    they are replaced."""
    try:
        store.create(key, _pieces(path))
        return
    except AlreadyExistsError:
        pass
    size = path.stat().st_size
    with suppress(MissingKeyError):
        if store.size(key) == size and checksum(store.get(key)) == file_checksum(path):
            return
    store.delete(key)
    store.create(key, _pieces(path))


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            yield piece


def _node_id(remote: RemoteDataset) -> str:
    """A name of this node's preparation of the dataset. It outlives a killed process, so that the
    next one takes over at once."""
    path = remote.claim_folder / "node"
    if not path.exists():
        path.write_text(secrets.token_hex(16))
    return path.read_text()


class _Claim:
    """The right to prepare, as numbered objects at the address, of which the newest counts."""

    def __init__(self, store: RunStore, where: str, node: str, expiry_s: float, say: Say):
        self._store, self._where, self._expiry_s, self._say = store, where, expiry_s, say
        self._content = json.dumps({"node": node, "by": platform.node() or "a node"}).encode()
        self._number = 0
        self._turn = threading.Lock()
        self._ended = threading.Event()

    def acquire(self, wait: bool) -> bool:
        """Return True if this process prepares, False once the dataset is there. wait: for another
        node that lives. Raises DataError."""
        watched, since = -1, 0.0
        while True:
            keys = self._store.list(_PREFIX)
            newest = int(keys[-1].rpartition("/")[2]) if keys else 0
            if has_manifest(self._store):
                return False
            content = self._read(newest)
            is_expired = newest == watched and time.monotonic() - since > self._expiry_s
            if content in (b"", self._content) or is_expired:
                if not self._create(newest + 1):
                    continue
                if not has_manifest(self._store):
                    return True
                self.release()  # the other node has ended meanwhile
                return False
            if newest != watched:
                if watched >= 0 and not wait:
                    raise DataError(
                        f"another node is preparing this dataset ({_name(content)})",
                        where=self._where,
                        remedy="wait for it, or name another data.folder",
                    )
                if watched < 0:
                    self._say(
                        f"another node ({_name(content)}) is preparing the dataset at "
                        f"{self._where}: waiting for it"
                    )
                watched, since = newest, time.monotonic()
            time.sleep(min(1.0, self._expiry_s / 60))

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Show signs of life meanwhile."""
        thread = threading.Thread(target=self._renew_often, name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def renew(self) -> None:
        """Raises DataError if another node has taken over."""
        with self._turn:
            if not self._create(self._number + 1):
                raise DataError(
                    "another node has taken over the preparation of this dataset, because this one "
                    "gave no sign of life",
                    where=self._where,
                    remedy="run the same command again",
                )

    def release(self) -> None:
        """Remove all claims: the dataset is there."""
        for key in self._store.list(_PREFIX):
            self._store.delete(key)

    def _renew_often(self) -> None:
        while not self._ended.wait(self._expiry_s / 6):
            try:
                self.renew()
            except StoreError:
                continue  # tried again
            except DataError:
                return  # the last renewal says so

    def _create(self, number: int) -> bool:
        try:
            self._store.create(f"{_PREFIX}{number:08d}", self._content)
        except AlreadyExistsError:
            return False
        for old in range(max(1, self._number), number):
            self._store.delete(f"{_PREFIX}{old:08d}")
        self._number = number
        return True

    def _read(self, number: int) -> bytes:
        """A claim's content; empty if there is none."""
        with suppress(MissingKeyError):
            return self._store.get(f"{_PREFIX}{number:08d}")
        return b""


def _name(content: bytes) -> str:
    try:
        return str(parse_json(content)["by"])
    except (ValueError, KeyError, TypeError):
        return "of unknown name"
