"""The place of a dataset: a folder, or an address whose files each node fetches into a cache.

`s3://bucket/datasets/mine` has the files of a dataset's folder under the same names. The addresses
are those of run stores (docs/guide/stores.md). `file:///shared/datasets/mine` is one, too: for a
slow disk that all nodes share.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from holdfast.config.sections.data import DataConfig
from holdfast.core.json_parsing import parse_json
from holdfast.data.read.chat_templates import TEMPLATE_FILE
from holdfast.data.read.files import canonical_json, checksum, write_atomic
from holdfast.data.stream.dataset import MANIFEST, SOURCES, Dataset, exists, parse_manifest
from holdfast.data.stream.node_cache import DAMAGE_REMEDY, NodeCache, explain_cache_errors
from holdfast.errors import DataError
from holdfast.wire.store.location import open_store, parse_location
from holdfast.wire.store.run_store import MissingKeyError, RunStore

GB = 10**9
TOKENIZER = "tokenizer.json"
PREPARE_REMEDY = "run holdfast data prepare"


def is_address(location: str | Path) -> bool:
    return "://" in str(location)


def resolve_place(location: str | Path) -> str:
    """A folder's path from the root, or the address itself."""
    return str(location) if is_address(location) else str(Path(location).resolve())


def open_dataset(location: str | Path, data: DataConfig, *, ask: bool = False) -> Dataset:
    """Open the dataset at a location. data: has the cache's folder and limit.

    If the node knows what is at an address, the address is not read again, unless `ask` is given.
    So a process of a run opens its data while the address does not answer. Raises DataError, and
    StoreError for an address that fails."""
    if not is_address(location):
        return Dataset.open(location)
    return RemoteDataset(str(location), data).open(ask)


def dataset_exists(location: str | Path, data: DataConfig) -> bool:
    """Return True if a dataset was prepared there. Raises StoreError."""
    if not is_address(location):
        return exists(location)
    return RemoteDataset(str(location), data).exists()


def local_files(location: str | Path, data: DataConfig) -> Path:
    """A folder of this node with the manifest, the tokenizer and the chat template of a dataset. It
    may have no manifest, if there is no dataset."""
    if not is_address(location) or not dataset_exists(location, data):
        return Path(location)
    return open_dataset(location, data).folder


class RemoteDataset:
    """A dataset at an address, and the node's cache."""

    def __init__(self, location: str, data: DataConfig):
        # Raises StoreError for an address that cannot be right.
        parsed = parse_location(location)
        if parsed.seal:
            raise DataError(
                "a dataset is not sealed, and this address has the option seal",
                where=parsed.where,
                remedy="leave out seal and compress in data.folder",
            )
        self.location, self.where = location, parsed.where
        self.store: RunStore = open_store(location)
        self.root = cache_root(data)
        self.limit = int(data.cache_gb * GB)

    def exists(self) -> bool:
        return self._known_version() is not None or self.is_prepared()

    def is_prepared(self) -> bool:
        """Ask the address whether there is a complete dataset. Raises StoreError."""
        return has_manifest(self.store)

    def open(self, ask: bool) -> Dataset:
        """Raises as `open_dataset` does."""
        version = None if ask else self._known_version()
        if version is None:
            version = self._read_small_files()
        folder = self.root / version
        cache = NodeCache(self.store, self.location, self.where, folder, self.limit)
        return Dataset.open(folder, cache)

    @property
    def prepare_folder(self) -> Path:
        """The folder in which this node prepares the dataset, before it goes to the address."""
        return self.root / "prepare" / self._name

    @property
    def claim_folder(self) -> Path:
        """What this node knows of its claim to prepare."""
        return self.root / "prepare" / f"{self._name}-claim"

    @property
    def _name(self) -> str:
        return xxh3_128_hexdigest(self.location.encode())

    @property
    def _address_file(self) -> Path:
        return self.root / "addresses" / f"{self._name}.json"

    def _known_version(self) -> str | None:
        """The version that this node has read at the address, and has the small files of."""
        try:
            version = str(parse_json(self._address_file.read_bytes())["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return version if exists(self.root / version) else None

    def _read_small_files(self) -> str:
        """Bring all files but the shards into the cache; return the version."""
        try:
            raw = self.store.get(MANIFEST)
        except MissingKeyError:
            raise DataError(
                "there is no prepared dataset", where=self.where, remedy=PREPARE_REMEDY
            ) from None
        manifest = parse_manifest(raw, f"{self.where}/{MANIFEST}")
        version = str(manifest["version"])
        small = {TOKENIZER: manifest["tokenizer"]["xxh3"], SOURCES: ""}
        if template := manifest.get("chat", {}).get("template"):
            small[TEMPLATE_FILE] = template
        files = {name: self._read_small(name, wanted) for name, wanted in small.items()}
        folder = self.root / version
        with explain_cache_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._address_file.parent.mkdir(exist_ok=True)
            with (folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for name, content in {**files, MANIFEST: raw}.items():
                    if content is not None:
                        write_atomic(folder / name, [content], sync=True)
                note = canonical_json({"location": self.location, "version": version})
                write_atomic(self._address_file, [note])
        return version

    def _read_small(self, name: str, wanted: str) -> bytes | None:
        """A file's bytes. None for one that is not there and need not be. wanted: its checksum."""
        try:
            content = self.store.get(name)
        except MissingKeyError:
            if not wanted:
                return None
            content = b""
        if wanted and checksum(content) != wanted:
            raise DataError(
                f"{name} is missing there, or is not the one the tokens were made with",
                where=self.where,
                remedy=DAMAGE_REMEDY,
            )
        return content


def has_manifest(store: RunStore) -> bool:
    """Return True if the dataset there is complete. Raises StoreError."""
    try:
        return store.size(MANIFEST) > 0
    except MissingKeyError:
        return False


def cache_root(data: DataConfig) -> Path:
    """The folder of this node for all datasets with an address."""
    if data.cache:
        return Path(data.cache)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "holdfast" / "data"
