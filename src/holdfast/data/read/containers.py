"""Opens files of text as people have them: plain, `.gz` or `.zst`; names what is no text at all.

The first bytes decide, not the name. Python's gzip reads gzip, and pyarrow's codec reads Zstandard.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from holdfast.config.huggingface.folder import POINTER_MESSAGE, POINTER_REMEDY, is_pointer
from holdfast.data.read.source_files import unreadable_error
from holdfast.errors import DataError

HEAD_BYTES = 512
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

OTHERS = (
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"BZh", "compressed with bzip2", "unpack it, or compress it with gzip or zstd"),
    (b"\xfd7zXZ\0", "compressed with xz", "unpack it, or compress it with gzip or zstd"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"PAR1", "a Parquet file", "use kind: parquet"),
    (b"ARROW1", "an Arrow file", "use kind: huggingface with its folder as path"),
    (b"\xff\xff\xff\xff", "an Arrow stream", "use kind: huggingface with its folder as path"),
    (b"%PDF-", "a PDF", "extract its text"),
    (b"SQLite format 3\0", "a SQLite database", "export its text"),
)
DAMAGE = (EOFError, zlib.error, OSError)
"""What a codec raises; an OSError with a number is the system's."""
WIDE = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"\0\0\xfe\xff", "UTF-32"))


def pointer_error(path: str) -> DataError:
    return DataError(POINTER_MESSAGE, where=path, remedy=POINTER_REMEDY)


def empty_error(path: str, what: str) -> DataError:
    return DataError(
        f"the file is empty, so it is not {what}",
        where=path,
        remedy="fetch it again, or leave it out of the source",
    )


def read_head(path: str) -> bytes:
    """The first bytes. Raises DataError for a file that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable_error(path, error) from None


def is_compressed(head: bytes) -> bool:
    return head.startswith((GZIP, ZSTD))


def refuse_container(head: bytes, path: str) -> None:
    """Raises DataError for a file that holds no text, or text in another form."""
    if is_pointer(head):
        raise pointer_error(path)
    for magic, what, remedy in OTHERS:
        if head.startswith(magic):
            raise DataError(
                f"this is {what}, not text", where=path, remedy=f"{remedy}, or leave it out"
            )
    if len(head) > 262 and head[257:262] == b"ustar":
        raise DataError(
            "this is a tar archive, not text", where=path, remedy="unpack it, or leave it out"
        )
    for magic, encoding in WIDE:
        if head.startswith(magic):
            raise DataError(
                f"this is {encoding}, not UTF-8",
                where=path,
                remedy=f"convert it with: iconv -f {encoding} -t UTF-8",
            )


@contextmanager
def open_text(path: str) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked. Raises DataError for a container, and for a damaged file."""
    head = read_head(path)
    refuse_container(head, path)
    with open_packed(path) as unpacked:
        yield _checked(unpacked, path) if is_compressed(head) else unpacked


@contextmanager
def open_packed(path: str) -> Iterator[BinaryIO]:
    """The bytes of any file, unpacked. Raises DataError for a damaged file."""
    head = read_head(path)
    if is_pointer(head):
        raise pointer_error(path)
    try:
        if head.startswith(GZIP):
            with gzip.open(path, "rb") as unpacked:
                yield cast(BinaryIO, unpacked)
        elif head.startswith(ZSTD):
            with _open_zstd(path) as raw, io.BufferedReader(raw, 1 << 18) as unpacked:
                yield unpacked
        else:
            with open(path, "rb") as plain:
                yield plain
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not of a codec
            raise unreadable_error(path, error) from None
        raise damaged_error(path, error) from None


def _checked(unpacked: Any, path: str) -> BinaryIO:
    """Refuse what is packed inside, such as a tar archive."""
    stream: BinaryIO = unpacked if hasattr(unpacked, "peek") else io.BufferedReader(unpacked)
    refuse_container(bytes(stream.peek(HEAD_BYTES)[:HEAD_BYTES]), path)  # type: ignore[attr-defined]
    return stream


def damaged_error(path: str, error: Exception) -> DataError:
    reason = str(error).split("\n")[0].rstrip(".") or type(error).__name__
    return DataError(
        f"the compressed file is damaged or cut short ({reason})",
        where=path,
        remedy="fetch it again, or leave it out of the source",
    )


class _ZstdStream(io.RawIOBase):
    """What pyarrow unpacks, as a raw stream for a BufferedReader."""

    def __init__(self, stream: Any):
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _open_zstd(path: str) -> _ZstdStream:
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            "reading .zst needs pyarrow", where=path, remedy="pip install 'holdfast[data]'"
        ) from None
    return _ZstdStream(pyarrow.input_stream(path, compression="zstd"))
