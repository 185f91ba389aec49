"""Encryption on this side of a store: the keeper of the bytes can neither read nor change them.

Checkpoints (blobs, part manifests, commit objects) are sealed. Names and sizes, the journal, terms
and generations lie open. A sealed object is

    extent 0 | extent 1 | ... | index | footer

Extents hold `extent_bytes` of the object each, the last one less. AES-256-GCM makes each 16 bytes
longer. So a range is read by the extents that it touches. The index, sealed too, says how long each
extent is and how many bytes there are in all. The footer is open: magic, flags, the extent's size,
which key, a salt, the index' length.

**No nonce comes twice.** Each object has its own key, derived (HKDF-SHA256) from the master key, 32
random bytes of salt and the object's name. The salt is new for each create. Under that key the
nonce counts extents, and the index has a nonce of another kind. Name, footer, kind and number are
authenticated with each extent. An extent that was changed, moved to another place or name, cut off
or taken from another object is CorruptError. No byte of it is passed on. (An attacker can restore
an earlier object under the same name; a checkpoint's names are its step's alone.)

With `compress`, each extent is compressed by zstd before it is sealed, where that makes it shorter.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from holdfast.errors import CorruptError, OtherKeyError
from holdfast.wire.store.rechunk import rechunk
from holdfast.wire.store.run_store import (
    NEARBY_READS,
    AlreadyExistsError,
    Buffer,
    ChecksummedStore,
    MissingKeyError,
    ReadPreference,
    ReplacingStore,
    RunStore,
    append_interval,
    byte_views,
    segment_sizes,
)

ENCRYPTED_PREFIXES = ("data/", "parts/", "commits/")
EXTENT_BYTES = 256 * 2**10
KEY_BYTES = 32
_LARGEST_EXTENT = 1 << 26
_MAGIC = b"HFSEAL01"
_FOOTER = struct.Struct("<8sII8s32sI")  # magic, flags, extent bytes, key, salt, index bytes
_TAG_BYTES = 16
_UNCOMPRESSED_FLAG = 1 << 31  # in the index: this extent is not compressed, although the object is
_COMPRESSED_FLAG = 1
_EXTENT_NONCE, _INDEX_NONCE = 0, 1  # kinds of nonce
_TAIL_BYTES = 64 * 2**10
_READ_BYTES = 8 * 2**20
_MAX_CACHED_INDEXES = 4096
_MAX_SIBLINGS_CHECKED = 8


@dataclass(frozen=True)
class _ObjectCipher:
    """Key, footer and name of one object."""

    aead: AESGCM
    associated_data: bytes

    def encrypt(self, kind: int, number: int, data: Buffer) -> bytes:
        return self.aead.encrypt(_nonce(kind, number), bytes(data), self.associated_data)

    def decrypt(self, kind: int, number: int, data: Buffer, key: str) -> bytes:
        try:
            return self.aead.decrypt(_nonce(kind, number), bytes(data), self.associated_data)
        except InvalidTag:
            what = "index" if kind == _INDEX_NONCE else f"extent {number}"
            raise CorruptError(f"{key}: the seal of {what} does not hold") from None


@dataclass(frozen=True)
class _ObjectIndex:
    """What the end of a sealed object says."""

    cipher: _ObjectCipher
    extent_bytes: int
    compressed: bool
    size: int
    lengths: Sequence[int]
    offsets: Sequence[int]  # one more than extents


class EncryptedStore:
    """A run store whose checkpoints are sealed in another run store."""

    def __init__(
        self,
        inner: RunStore,
        key: bytes,
        *,
        compress: bool = False,
        extent_bytes: int = EXTENT_BYTES,
    ) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        self.inner = inner
        self.where = str(getattr(inner, "where", getattr(inner, "folder", "")))
        requests, most = getattr(inner, "reads", NEARBY_READS)
        # what is opened is held a second time
        self.reads = ReadPreference(requests, min(most, NEARBY_READS.bytes))
        self.append_interval_s = append_interval(inner)
        self._key = key
        self.key_id = _derive(key, b"", b"holdfast key id")[:8]
        self._compress = compress
        self._extent_bytes = extent_bytes
        self._indexes: OrderedDict[str, _ObjectIndex] = OrderedDict()
        self._lock = threading.Lock()

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        if not key.startswith(ENCRYPTED_PREFIXES):
            self.inner.create(key, data)
            return
        if not isinstance(data, bytes | bytearray | memoryview) and self._exists(key):
            if not self.has_same_bytes(key, data):
                raise AlreadyExistsError(f"{key} exists already")
            return
        self.inner.create(key, self._encrypt_object(key, byte_views(data), self._new_footer()))

    def segment_sizes(self, prefix: str) -> dict[str, int]:
        return segment_sizes(self.inner, prefix)

    def replace(self, key: str, data: Buffer) -> None:
        """Raises ValueError for an object that is sealed: those are immutable."""
        if key.startswith(ENCRYPTED_PREFIXES) or not isinstance(self.inner, ReplacingStore):
            raise ValueError(f"{key!r} cannot be replaced here")
        self.inner.replace(key, data)

    def has_same_bytes(self, key: str, data: Iterable[Buffer]) -> bool:
        """Compare a blob with the stored one, without sending it. Sealed again under a new salt, it
        would look different. Under the stored salt, the same bytes come out."""
        footer = self._footer_of(key) if key.startswith(ENCRYPTED_PREFIXES) else None
        if footer is None or not isinstance(self.inner, ChecksummedStore):
            return False
        return self.inner.has_same_bytes(key, self._encrypt_object(key, byte_views(data), footer))

    def get(self, key: str) -> bytes:
        data = self.inner.get(key)
        if not key.startswith(ENCRYPTED_PREFIXES):
            return data
        view = memoryview(data)
        opened = self._read_index(key, len(view), view)
        return b"".join(
            self._decrypt_extent(opened, number, view[opened.offsets[number] :], key)
            for number in range(len(opened.lengths))
        )

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if not key.startswith(ENCRYPTED_PREFIXES):
            self.inner.read_into(key, start, out)
            return
        view = out.cast("B")
        remembered = key in self._indexes
        try:
            self._read(key, start, view)
        except (CorruptError, MissingKeyError):
            with self._lock:
                self._indexes.pop(key, None)
            if not remembered:
                raise
            self._read(key, start, view)  # the object may have been replaced since

    def list(self, prefix: str) -> list[str]:
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        with self._lock:
            self._indexes.pop(key, None)
        self.inner.delete(key)

    def size(self, key: str) -> int:
        if not key.startswith(ENCRYPTED_PREFIXES):
            return self.inner.size(key)
        with self._lock:
            self._indexes.pop(key, None)  # the caller checks that it is there, and intact
        return self._open_index(key).size

    def append(self, key: str, data: Buffer, sync: bool = False) -> None:
        self.inner.append(key, data, sync)

    def sweep(self, prefix: str, keep: str = "") -> int:
        return self.inner.sweep(prefix, keep)

    # --- sealing ----------------------------------------------------------------------------
    def _new_footer(self) -> bytes:
        """Without the index' length, which is known at the end: so it is authenticated as 0."""
        flags = _COMPRESSED_FLAG if self._compress else 0
        return _FOOTER.pack(_MAGIC, flags, self._extent_bytes, self.key_id, os.urandom(32), 0)

    def _cipher_for(self, key: str, footer: bytes) -> _ObjectCipher:
        _, _, _, key_id, salt, _ = _FOOTER.unpack(footer)
        if key_id != self.key_id:
            # Whether objects next to this one are sealed with our key: then the key is right.
            beside = [k for k in self.inner.list(f"{key.rpartition('/')[0]}/") if k != key]
            if any(self._footer_of(k) is not None for k in beside[:_MAX_SIBLINGS_CHECKED]):
                raise CorruptError(f"{key}: its end names another key than the objects beside it")
            raise OtherKeyError(
                f"{key} is sealed with another key",
                where=self.where,
                remedy="name the file of the key that the run was begun with",
            )
        about = footer + key.encode()
        return _ObjectCipher(
            AESGCM(_derive(self._key, salt, b"holdfast object " + key.encode())), about
        )

    def _encrypt_object(
        self, key: str, data: Iterable[memoryview], footer: bytes
    ) -> Iterator[bytes]:
        _, flags, extent_bytes, key_id, salt, _ = _FOOTER.unpack(footer)
        sealer = self._cipher_for(key, footer)
        lengths: list[int] = []
        size = 0
        for number, part in enumerate(rechunk(data, extent_bytes)):
            size += len(part)
            content, mark = _compress_part(part) if flags & _COMPRESSED_FLAG else (bytes(part), 0)
            sealed = sealer.encrypt(_EXTENT_NONCE, number, content)
            lengths.append(len(sealed) | mark)
            yield sealed
        index = struct.pack(f"<Q{len(lengths)}I", size, *lengths)
        sealed = sealer.encrypt(_INDEX_NONCE, 0, index)
        yield sealed
        yield _FOOTER.pack(_MAGIC, flags, extent_bytes, key_id, salt, len(sealed))

    # --- opening ----------------------------------------------------------------------------
    def _open_index(self, key: str) -> _ObjectIndex:
        with self._lock:
            found = self._indexes.get(key)
            if found is not None:
                self._indexes.move_to_end(key)
                return found
        total = self.inner.size(key)
        tail = memoryview(bytearray(min(total, _TAIL_BYTES)))
        self.inner.read_into(key, total - len(tail), tail)
        found = self._read_index(key, total, tail)
        with self._lock:
            self._indexes[key] = found
            while len(self._indexes) > _MAX_CACHED_INDEXES:
                self._indexes.popitem(last=False)
        return found

    def _read_index(self, key: str, total: int, tail: memoryview) -> _ObjectIndex:
        """`tail`: the last bytes of an object of `total`."""
        footer = bytes(tail[-_FOOTER.size :])
        if len(footer) < _FOOTER.size or not footer.startswith(_MAGIC):
            raise CorruptError(f"{key} is not sealed, or its end is missing")
        magic, flags, extent_bytes, key_id, salt, index_bytes = _FOOTER.unpack(footer)
        need = index_bytes + _FOOTER.size
        if need > total or index_bytes < 8 + _TAG_BYTES:
            raise CorruptError(f"{key}: the end of the object is not what was written")
        if need > len(tail):
            tail = memoryview(bytearray(need))
            self.inner.read_into(key, total - need, tail)
        bare = _FOOTER.pack(magic, flags, extent_bytes, key_id, salt, 0)
        sealer = self._cipher_for(key, bare)
        index = sealer.decrypt(
            _INDEX_NONCE, 0, tail[len(tail) - need : len(tail) - _FOOTER.size], key
        )
        size, *lengths = struct.unpack(f"<Q{len(index) // 4 - 2}I", index)
        offsets = list(accumulate((length & ~_UNCOMPRESSED_FLAG for length in lengths), initial=0))
        if offsets[-1] + need != total:
            raise CorruptError(f"{key} has {total} bytes, {offsets[-1] + need} were written")
        return _ObjectIndex(
            sealer, extent_bytes, bool(flags & _COMPRESSED_FLAG), size, lengths, offsets
        )

    def _exists(self, key: str) -> bool:
        try:
            self.inner.size(key)
        except MissingKeyError:
            return False
        return True

    def _footer_of(self, key: str) -> bytes | None:
        """What an object that is there was sealed under; None when none is, or it is not sealed
        with our key."""
        try:
            total = self.inner.size(key)
            footer = bytearray(_FOOTER.size)
            self.inner.read_into(key, max(0, total - len(footer)), memoryview(footer))
        except MissingKeyError:
            return None
        except CorruptError:
            footer = bytearray()
        if not footer.startswith(_MAGIC):
            return None
        *known, _ = _FOOTER.unpack(footer)
        if not 1 <= known[2] <= _LARGEST_EXTENT or known[3] != self.key_id:
            return None  # corrupt, or sealed with another key
        return _FOOTER.pack(*known, 0)

    def _read(self, key: str, start: int, view: memoryview) -> None:
        opened = self._open_index(key)
        stop = start + len(view)
        if stop > opened.size:
            raise CorruptError(f"{key} ends at byte {opened.size}, {stop} were expected")
        step = opened.extent_bytes
        number, last = start // step, -(-stop // step)
        while number < last and view:
            until = number + 1
            while (
                until < last and opened.offsets[until + 1] - opened.offsets[number] <= _READ_BYTES
            ):
                until += 1
            base = opened.offsets[number]
            sealed = memoryview(bytearray(opened.offsets[until] - base))
            self.inner.read_into(key, base, sealed)
            for n in range(number, until):
                plain = self._decrypt_extent(opened, n, sealed[opened.offsets[n] - base :], key)
                low, high = max(start, n * step), min(stop, n * step + len(plain))
                view[low - start : high - start] = plain[low - n * step : high - n * step]
            number = until

    def _decrypt_extent(
        self, opened: _ObjectIndex, number: int, sealed: memoryview, key: str
    ) -> bytes:
        """`sealed` begins with the extent."""
        length = opened.lengths[number]
        content = opened.cipher.decrypt(
            _EXTENT_NONCE, number, sealed[: length & ~_UNCOMPRESSED_FLAG], key
        )
        due = min(opened.extent_bytes, opened.size - number * opened.extent_bytes)
        if opened.compressed and not length & _UNCOMPRESSED_FLAG:
            content = _decompress_part(content, due)
        if len(content) != due:
            raise CorruptError(f"{key}: extent {number} has {len(content)} bytes, {due} are due")
        return content


def _derive(key: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt, info).derive(key)


def _nonce(kind: int, number: int) -> bytes:
    return struct.pack(">IQ", kind, number)


def _compress_part(part: bytearray) -> tuple[bytes, int]:
    """(compressed, 0), or (as it is, the mark that says so)."""
    import zstandard  # only where it is wanted

    content = zstandard.ZstdCompressor(level=1).compress(part)
    return (content, 0) if len(content) < len(part) else (bytes(part), _UNCOMPRESSED_FLAG)


def _decompress_part(content: bytes, size: int) -> bytes:
    import zstandard

    try:
        return zstandard.ZstdDecompressor().decompress(content, max_output_size=size)
    except zstandard.ZstdError:
        return b""  # of another length than it should have
