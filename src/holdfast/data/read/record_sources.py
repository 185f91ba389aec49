"""Shards of records that other trainers read: TFRecord, WebDataset, MDS, WARC and Lance.

Each reader yields the place of a record and the bytes of its text. For a record that cannot be used
it yields a DataError, and reads the next one. What makes the rest of a file unreadable is raised.
Framing and checksums are checked here, as the formats have them:

    tfrecord     length, CRC-32C of it, record, CRC-32C of that; the record is a tf.train.Example
    webdataset   tar; files of one name, up to the first dot, are a sample
    mds          index.json with sizes and hashes of shards; a shard has a table of offsets
    warc         headers and a block, with a SHA-1 of it; text is in conversion records (WET files)
    lance        a folder, read by the package of that name
"""

from __future__ import annotations

import base64
import hashlib
import os
import struct
import tarfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from holdfast.core.json_parsing import parse_json
from holdfast.data.read.containers import empty_error, open_packed, read_head
from holdfast.data.read.text_sources import nearest_column, too_long_error
from holdfast.errors import DataError

Records = Iterator[tuple[str, bytes | DataError]]
AGAIN = "fetch it again, or leave it out of the source"
SKIP = "mend it, or leave bad rows out with bad_rows: skip"
DEFAULT_FIELD = "text"
LINE = 1 << 16  # most bytes of a header's line


def read_documents(kind: str, path: str, field: str, limit: int) -> Records:
    """The records of a file. limit: most bytes of a text. Raises DataError."""
    if kind != "lance" and not read_head(path):
        raise empty_error(path, f"a {kind} file")
    for where, data in READERS[kind](path, field, limit):
        if isinstance(data, bytes) and len(data) > limit:
            yield where, too_long_error(where, limit, "the text is longer than")
        else:
            yield where, data


def _damaged(what: str, where: str) -> DataError:
    return DataError(f"the file is damaged or cut short ({what})", where=where, remedy=AGAIN)


def _exactly(file: BinaryIO, size: int, where: str) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise _damaged("it ends inside a record", where)
    return data


def _skip(file: BinaryIO, size: int, where: str) -> None:
    while size > 0:
        size -= len(_exactly(file, min(size, 1 << 20), where))


def _lacks(field: str, names: list[str], where: str) -> DataError:
    return DataError(
        f"the record has no text {field!r}, only {names[:20]}",
        where=where,
        remedy=nearest_column(field, names),
    )


# --- TFRecord -------------------------------------------------------------------------------
@lru_cache(1)
def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


def masked_crc32c(data: bytes) -> int:
    """The checksum of TFRecord: CRC-32C, rotated and shifted."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _tfrecord(path: str, field: str, limit: int) -> Records:
    with open_packed(path) as file:
        row = 0
        while head := file.read(12):
            where = f"{path}, row {row}"
            if len(head) != 12 or masked_crc32c(head[:8]) != struct.unpack("<I", head[8:])[0]:
                raise _damaged("the length of a record does not fit its checksum", where)
            (size,) = struct.unpack("<Q", head[:8])
            if size > limit + LINE:
                _skip(file, size + 4, where)
                yield where, too_long_error(where, limit, "the record is longer than")
            else:
                data = _exactly(file, size, where)
                (crc,) = struct.unpack("<I", _exactly(file, 4, where))
                if masked_crc32c(data) != crc:
                    yield (
                        where,
                        DataError("the record does not fit its checksum", where=where, remedy=SKIP),
                    )
                else:
                    yield where, _example_text(data, field, where)
            row += 1


def _example_text(data: bytes, field: str, where: str) -> bytes | DataError:
    """The first bytes of a feature of a tf.train.Example."""
    try:
        found: dict[str, bytes] = {}
        for features in _messages(data, 1):
            for entry in _messages(features, 1):
                name = next(_messages(entry, 1), b"").decode()
                for feature in _messages(entry, 2):
                    for values in _messages(feature, 1):
                        found[name] = next(_messages(values, 1), b"")
    except (IndexError, ValueError):
        return DataError(
            "the record is no tf.train.Example", where=where, remedy="write the text as a feature"
        )
    return found[field] if field in found else _lacks(field, sorted(found), where)


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """The fields of this number, of those that have a length, of a protocol buffer. Raises
    IndexError and ValueError for what is none."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = number()
        if key & 7 == 2:
            size = number()
            if at + size > len(data):
                raise ValueError("a field ends after its message")
            if key >> 3 == wanted:
                yield data[at : at + size]
            at += size
        elif key & 7 == 0:
            number()
        elif key & 7 in (1, 5):
            at += 8 if key & 7 == 1 else 4
        else:
            raise ValueError("an unknown type of field")


# --- WebDataset -----------------------------------------------------------------------------
def _webdataset(path: str, field: str, limit: int) -> Records:
    ending = "txt" if field == DEFAULT_FIELD else field
    for where, endings in read_samples(path, lambda found: found == ending, limit):
        if ending in endings:
            yield f"{where}.{ending}", endings[ending]
            continue
        yield (
            where,
            DataError(
                f"the sample has no file .{ending}, only {sorted(endings)}",
                where=where,
                remedy=nearest_column(ending, sorted(endings)),
            ),
        )


def read_samples(
    path: str, is_wanted: Callable[[str], bool], limit: int
) -> Iterator[tuple[str, dict[str, bytes | DataError]]]:
    """Yield the place of each sample of a tar file, and its files by their endings. Files whose
    ending is not wanted are not read, and b"". Raises DataError."""
    with open_packed(path) as file:
        try:
            archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
        except tarfile.TarError as error:
            raise _damaged(f"no tar file: {error}", path) from None
        name = ""
        endings: dict[str, bytes | DataError] = {}
        try:
            for member in archive:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, rest = base.partition(".")
                key = f"{folder}/{stem}"
                if key != name and endings:
                    yield f"{path}, {name.lstrip('/')}", endings
                    endings = {}
                name, where = key, f"{path}, {member.name}"
                if not is_wanted(rest):
                    endings[rest] = b""
                elif member.size > limit:
                    endings[rest] = too_long_error(where, limit, "the file is longer than")
                else:
                    content = archive.extractfile(member)
                    assert content is not None
                    endings[rest] = _exactly(content, member.size, where)  # type: ignore[arg-type]
        except tarfile.TarError as error:
            raise _damaged(str(error), f"{path}, after {name.lstrip('/') or 'its start'}") from None
        # The module takes a header that is damaged for the end.
        file.seek(archive.offset)
        at_end = file.read(2 * tarfile.BLOCKSIZE)
        if at_end.count(0) != len(at_end) or len(at_end) < tarfile.BLOCKSIZE:
            raise _damaged("no end of the tar file", f"{path}, after {name.lstrip('/')}")
        if endings:
            yield f"{path}, {name.lstrip('/')}", endings


# --- MDS ------------------------------------------------------------------------------------
def mds_shards(path: str, files: list[str]) -> list[str]:
    """The shards that the index files name, in their order. Raises DataError."""
    found = []
    for index in (name for name in files if os.path.basename(name) == "index.json"):
        for shard in _mds_index(index):
            info = shard.get("zip_data") or shard["raw_data"]
            found.append(os.path.join(os.path.dirname(index), info["basename"]))
    if not found:
        raise DataError(
            "there is no index.json, so these are no MDS shards",
            where=path,
            remedy="name the folder that MDSWriter wrote",
        )
    return found


def _mds_index(path: str) -> list[dict[str, Any]]:
    try:
        shards = parse_json(Path(path).read_bytes())["shards"]
        if all(shard["format"] == "mds" and shard["raw_data"]["bytes"] >= 0 for shard in shards):
            return list(shards)
        what = "it names shards of another format than mds"
    except OSError as error:
        what = str(error)
    except (ValueError, KeyError, TypeError) as error:
        what = f"no index of MDS: {error!r}"
    raise DataError(f"the index cannot be read ({what})", where=path, remedy=AGAIN)


def _mds(path: str, field: str, limit: int) -> Records:
    index = os.path.join(os.path.dirname(path), "index.json")
    name = os.path.basename(path)
    shard = next(
        s
        for s in _mds_index(index)
        if name in ((s.get("zip_data") or {}).get("basename"), s["raw_data"]["basename"])
    )
    _check_hashes(path, shard.get("zip_data") or shard["raw_data"])
    columns, encodings = shard["column_names"], shard["column_encodings"]
    if field not in columns or encodings[columns.index(field)] != "str":
        texts = [c for c, e in zip(columns, encodings, strict=True) if e == "str"]
        raise _lacks(field, texts, path)
    with open_packed(path) as file:
        data = file.read()
    count = int(shard["samples"])
    if len(data) != shard["raw_data"]["bytes"] or len(data) < 4 * count + 8:
        raise _damaged(f"{len(data):,} bytes, the index says otherwise", path)
    offsets = struct.unpack(f"<{count + 1}I", data[4 : 4 * count + 8])
    sizes = shard["column_sizes"]
    for row in range(count):
        where, at = f"{path}, row {row}", offsets[row]
        free = [n for n, size in enumerate(sizes) if size is None]
        begin = at + 4 * len(free)
        if not at <= begin <= offsets[row + 1] <= len(data):
            raise _damaged("the offsets of the samples do not rise", where)
        given = dict(zip(free, struct.unpack(f"<{len(free)}I", data[at:begin]), strict=True))
        lengths = [given.get(n, size) for n, size in enumerate(sizes)]
        if begin + sum(lengths) != offsets[row + 1]:
            yield (
                where,
                DataError(
                    "the sizes of the columns are not those of the sample", where=where, remedy=SKIP
                ),
            )
            continue
        begin += sum(lengths[: columns.index(field)])
        yield where, data[begin : begin + lengths[columns.index(field)]]


def _check_hashes(path: str, info: dict[str, Any]) -> None:
    for name, wanted in (info.get("hashes") or {}).items():
        make = getattr(xxhash, name, None) or getattr(hashlib, name, None)
        if make is None:
            raise DataError(
                f"the index has hashes of the unknown kind {name!r}",
                where=path,
                remedy="write the shards with hashes sha1, sha256 or xxh64",
            )
        state = make()
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                state.update(piece)
        if state.hexdigest() != wanted:
            raise _damaged(f"its {name} is not that of the index", path)


# --- WARC -----------------------------------------------------------------------------------
def _warc(path: str, field: str, limit: int) -> Records:
    with open_packed(path) as file:
        row = 0
        while line := file.readline(LINE):
            if not line.strip():
                continue
            where = f"{path}, record {row}"
            if not line.startswith(b"WARC/"):
                raise _damaged("a record does not begin with WARC/", where)
            headers: dict[str, str] = {}
            while (line := file.readline(LINE)).strip():
                name, _, value = line.decode(errors="replace").partition(":")
                headers[name.strip().lower()] = value.strip()
            length = headers.get("content-length", "")
            if not line.endswith(b"\n") or not length.isdecimal():
                raise _damaged("a record has no Content-Length", where)
            size, is_text = int(length), headers.get("warc-type") == "conversion"
            if not is_text or size > limit:
                _skip(file, size, where)
                if is_text:
                    yield where, too_long_error(where, limit, "the text is longer than")
            else:
                block = _exactly(file, size, where)
                kind, _, wanted = headers.get("warc-block-digest", "").partition(":")
                digest = base64.b32encode(hashlib.sha1(block, usedforsecurity=False).digest())
                if kind.lower() == "sha1" and wanted.upper() != digest.decode():
                    yield (
                        where,
                        DataError(
                            "the text does not fit its WARC-Block-Digest", where=where, remedy=SKIP
                        ),
                    )
                else:
                    yield where, block
            if file.read(4) != b"\r\n\r\n":
                raise _damaged("a record does not end with two empty lines", where)
            row += 1


# --- Lance ----------------------------------------------------------------------------------
def _lance(path: str, field: str, limit: int) -> Records:
    try:
        import lance
    except ImportError:
        raise DataError(
            "reading Lance needs pylance", where=path, remedy="pip install 'holdfast[lance]'"
        ) from None
    row = 0
    try:
        table = lance.dataset(path)
        names = [each.name for each in table.schema if "string" in str(each.type)]
        if field not in names:
            raise _lacks(field, names, path)
        for batch in table.to_batches(columns=[field], batch_size=256):
            for value in batch.column(0):
                where, data = f"{path}, row {row}", _raw_bytes(value)
                row += 1
                yield where, data
    except (OSError, ValueError, RuntimeError) as error:
        raise _damaged(str(error).splitlines()[0][:200], f"{path}, after row {row}") from None


def _raw_bytes(value: Any) -> bytes:
    """The bytes of a cell of text, which may not be UTF-8."""
    buffer = value.as_buffer() if value.is_valid else None
    return b"" if buffer is None else bytes(buffer)


READERS = {
    "tfrecord": _tfrecord,
    "webdataset": _webdataset,
    "mds": _mds,
    "warc": _warc,
    "lance": _lance,
}
