"""Documents of files of text: a document a file, a line of JSON, an element of JSON, a row of CSV.

No more than one document and one buffer is held, whatever the size of the file. Every error names
file and place; `data.sources.read_unit` adds the source and the column.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, Protocol

from xxhash import xxh3_128

from holdfast.core.json_parsing import parse_json
from holdfast.data.read.containers import DAMAGE, damaged_error, empty_error, open_text
from holdfast.errors import DataError, nearest_of

READ_BYTES = 1 << 18
DELIMITERS = ",\t;|"
WHITE = b" \t\r\n"
BOM = b"\xef\xbb\xbf"
_OUTSIDE = re.compile(rb'["\[\]{},]')
_SURROGATE = re.compile("[\ud800-\udfff]")
_IN_STRING = re.compile(rb'["\\]')


# --- normal form ----------------------------------------------------------------------------
def clean_text(text: str, where: str) -> str:
    """The normal form of a document: no byte order mark, lines that end in a line feed. Raises
    DataError for a zero character."""
    at = text.find("\0")
    if at >= 0:
        raise DataError(
            f"the text has a zero byte at character {at}: this is binary, not text",
            where=where,
            remedy="remove it, or leave the document out",
        )
    half = _SURROGATE.search(text)
    if half:
        raise DataError(
            f"the text holds half of a surrogate pair at character {half.start()}, which is no "
            "character",
            where=where,
            remedy="mend or remove it",
        )
    return text.replace("\ufeff", "").replace("\r\n", "\n")


def normal_form(raw: bytes, path: str, at: int, line: int | None = None) -> str:
    """Decode and normalise bytes that stand at offset `at` of a file. `line`: the line of the first
    byte, if it is known."""
    zero = raw.find(b"\0")
    if zero >= 0:
        raise DataError(
            f"a zero byte at offset {at + zero}: this is a binary file, not text",
            where=_place(raw, path, zero, line),
            remedy="leave it out of the source",
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte 0x{raw[error.start]:02x} at offset {at + error.start} is not UTF-8",
            where=_place(raw, path, error.start, line),
            remedy="convert the file to UTF-8, or leave it out of the source",
        ) from None
    return text.replace("\ufeff", "").replace("\r\n", "\n")


def _place(raw: bytes, path: str, offset: int, line: int | None) -> str:
    return path if line is None else f"{path}:{line + raw.count(10, 0, offset)}"


def too_long_error(where: str, limit: int, what: str) -> DataError:
    return DataError(
        f"{what} data.max_document_bytes ({limit:,})",
        where=where,
        remedy="raise data.max_document_bytes, or split the document",
    )


def nearest_column(field: str, texts: list[str]) -> str:
    """A remedy that names the column of text that was probably meant."""
    if texts:
        return f"set field: {nearest_of(field, texts) or texts[0]} in data.sources"
    return "set field in data.sources to the one that holds the text"


class TakeDocument(Protocol):
    """Gives the document of a record. bare: the record is an element of an array. Raises
    DataError."""

    def __call__(self, value: Any, where: str, *, bare: bool = False) -> str: ...


LeaveRow = Callable[[DataError], None]
"""Takes the error of a bad row. Raises it if bad rows are not left out."""


def refuse_row(error: DataError) -> None:
    raise error


def text_in(field: str) -> TakeDocument:
    """Take the text in a field, or an element of an array that is a text by itself."""
    return partial(_field, field=field)


def _field(value: Any, where: str, *, field: str, bare: bool = False) -> str:
    """The text of a record. `bare`: a text by itself is a document too."""
    if bare and isinstance(value, str):
        return clean_text(value, where)
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        has = f"it has {sorted(value)}" if isinstance(value, dict) else "it is not an object"
        texts = (
            [k for k, v in value.items() if isinstance(v, str)] if isinstance(value, dict) else []
        )
        texts.sort(key=lambda key: -len(value[key]))
        raise DataError(
            f"the line has no text in the field {field!r} ({has})",
            where=where,
            remedy=nearest_column(field, texts),
        )
    return clean_text(value[field], where)


# --- a document a file ----------------------------------------------------------------------
def text_document(path: str, limit: int, seen: xxh3_128) -> str:
    with open_text(path) as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        line = raw.count(b"\n") + 1
        raise too_long_error(f"{path}:{line}", limit, "the file passes")
    seen.update(raw)
    return normal_form(raw, path, 0, 1)


# --- lines of JSON, or an array of it ---------------------------------------------------------
def json_documents(
    path: str,
    start: int,
    stop: int,
    take: TakeDocument,
    limit: int,
    seen: xxh3_128,
    leave: LeaveRow = refuse_row,
) -> Iterator[str]:
    """Documents of the lines that begin in [start, stop) of a file; stop 0: of all of the file,
    which is compressed or one array. An element of an array that is bad ends it."""
    with open_text(path) as file:
        if stop == 0:
            first = _first_byte(file)
            if first == b"":
                raise empty_error(path, "JSON")
            if first == b"[":
                for row, element in enumerate(_array_elements(file, path, limit)):
                    seen.update(element + b"\n")
                    where = f"{path}, row {row}"
                    text = normal_form(element, where, 0)
                    try:
                        value = parse_json(text)
                    except ValueError as error:
                        reason = getattr(error, "msg", str(error))
                        raise DataError(
                            f"not JSON ({reason})", where=where, remedy="mend the element"
                        ) from None
                    yield take(value, where, bare=True)
                return
            yield from _lines(file, path, take, limit, seen, None, leave)
            return
        at = start
        if start:
            file.seek(start - 1)
            while (piece := file.readline(1 << 20)) and not piece.endswith(b"\n"):
                pass  # the rest of a line that an earlier unit owns, never held in full
            at = file.tell()
        yield from _lines(file, path, take, limit, seen, (at, stop), leave)


def begins_array(path: str) -> bool:
    """Return True if a file, packed or not, holds an array."""
    with open_text(path) as file:
        return _first_byte(file) == b"["


def _first_byte(file: BinaryIO) -> bytes:
    """The first byte that is no white space; nothing is consumed but white space and a mark."""
    while head := file.peek(64):  # type: ignore[attr-defined]
        rest = head.removeprefix(BOM).lstrip(WHITE)
        if rest:
            return bytes(rest[:1])
        file.read(len(head))
    return b""


def _lines(
    file: BinaryIO,
    path: str,
    take: TakeDocument,
    limit: int,
    seen: xxh3_128,
    section: tuple[int, int] | None,
    leave: LeaveRow,
) -> Iterator[str]:
    at, stop = section or (0, 0)
    number = None if section and at else 1  # the number of a line is counted for an error only
    while section is None or at < stop:
        try:
            line = file.readline(limit + 2)  # with its line ending
        except DAMAGE as error:
            if number is None or getattr(error, "errno", None) is not None:
                raise
            raise damaged_error(f"{path}, after line {number - 1}", error) from None
        if not line:
            return
        if len(line.removesuffix(b"\n").removesuffix(b"\r")) > limit:
            where = f"{path}:{number or _line_number(path, at)}"
            leave(too_long_error(where, limit, "the line is longer than"))
            at += len(line)
            while line and not line.endswith(b"\n"):
                at += len(line := file.readline(1 << 20))
        else:
            seen.update(line)
            try:
                text = _line_document(line, path, at, take, number)
            except DataError as error:
                leave(error)
            else:
                yield text
            at += len(line)
        number = None if number is None else number + 1


def _line_number(path: str, offset: int) -> int:
    """1-based number of the line that begins at `offset`; only errors pay for counting."""
    lines = 1
    with open(path, "rb") as file:
        while offset > 0 and (piece := file.read(min(offset, 1 << 20))):
            lines += piece.count(b"\n")
            offset -= len(piece)
    return lines


def with_line(where: str) -> str:
    """The place of a line that was known by its offset, "file:@offset", as file and line."""
    path, _, offset = where.rpartition(":@")
    return f"{path}:{_line_number(path, int(offset))}" if path and offset.isdecimal() else where


def _line_document(line: bytes, path: str, at: int, take: TakeDocument, number: int | None) -> str:
    try:
        text = normal_form(line, path, at, number)
    except DataError as error:
        if number is None:
            error = DataError(
                error.message, where=f"{path}:{_line_number(path, at)}", remedy=error.remedy
            )
        raise error from None
    if not text.strip():
        return ""
    try:
        return take(parse_json(text), f"{path}:{number or f'@{at}'}")
    except ValueError as error:
        what, remedy = _not_json(text, error)
    except DataError as error:
        if number is not None:
            raise
        what, remedy = error.message, str(error.remedy)
    where = f"{path}:{number or _line_number(path, at)}"
    raise DataError(what, where=where, remedy=remedy)


def _not_json(text: str, error: ValueError) -> tuple[str, str]:
    """What is wrong with a line that is not JSON, and a remedy."""
    reason = getattr(error, "msg", str(error))
    if text.strip() == "{":
        return (
            "an object begins here and does not end on the line",
            "write one object a line, or one array of objects",
        )
    if not text.lstrip().startswith(("{", "[", '"')):
        return f"not JSON ({reason})", "mend the line, or use kind: text or csv"
    return f"not JSON ({reason})", "mend the line, or use kind: text"


def _array_elements(file: BinaryIO, path: str, limit: int) -> Iterator[bytes]:
    """The bytes of each element of one array. Structure is found here, meaning is not."""
    element = bytearray()
    depth, quoted, escaped, row, ended = 0, False, False, 0, False
    while chunk := file.read(READ_BYTES):
        at = 0
        while at < len(chunk):
            if escaped:
                element += chunk[at : at + 1]
                at, escaped = at + 1, False
                continue
            match = (_IN_STRING if quoted else _OUTSIDE).search(chunk, at)
            end = match.start() if match else len(chunk)
            element += chunk[at:end]
            if len(element) > limit:
                raise too_long_error(f"{path}, row {row}", limit, "the element is longer than")
            if match is None:
                break
            mark, at = match[0], end + 1
            if quoted:
                element += mark
                quoted, escaped = mark != b'"', mark == b"\\"
                continue
            if ended:
                raise _array_error(path, row, "is followed by something else")
            depth += (mark in b"[{") - (mark in b"]}")
            if depth == 1 and mark == b"[" and row == 0 and not element.removeprefix(BOM).strip():
                element.clear()  # the array's own bracket
            elif depth == 0 or (depth == 1 and mark == b","):
                if depth or row or element.strip():
                    yield bytes(element)
                    row += 1
                element.clear()
                ended = depth == 0
            else:
                quoted = mark == b'"'
                element += mark
    if not ended:
        raise _array_error(path, row, "does not end")
    if element.strip():
        raise _array_error(path, row, "is followed by something else")


def _array_error(path: str, row: int, state: str) -> DataError:
    return DataError(
        f"the array {state}", where=f"{path}, row {row}", remedy="fetch the file again, or mend it"
    )


# --- CSV ------------------------------------------------------------------------------------
def csv_documents(path: str, field: str, limit: int, seen: xxh3_128) -> Iterator[str]:
    """The column `field` of each row. The first row names the columns."""
    with open_text(path) as file:
        lines = _csv_lines(file, path, limit, seen)
        head = next(lines, None)
        if head is None:
            raise empty_error(path, "CSV")
        delimiter, names = _columns(head, field, path)
        place = names.index(field)
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        number = 0
        while True:
            where = f"{path}:{rows.line_num + 2}, row {number}"
            try:
                row = _next_row(rows, limit)
            except StopIteration:
                return
            except csv.Error as error:
                if "field limit" in str(error):
                    raise too_long_error(where, limit, "the cell is longer than") from None
                raise DataError(
                    f"not CSV ({error})", where=where, remedy="mend the row; quote text with commas"
                ) from None
            if not row:
                continue
            if len(row) != len(names):
                raise DataError(
                    f"the row has {len(row)} cells, the head {len(names)}",
                    where=where,
                    remedy="mend the row; quote text with commas or line feeds",
                )
            if len(row[place]) > limit:
                raise too_long_error(where, limit, "the cell is longer than")
            yield clean_text(row[place], where)
            number += 1


def _next_row(rows: Iterator[list[str]], limit: int) -> list[str]:
    """The next row, whose cells may have `limit` characters and one more. The module `csv` has one
    limit for all its readers, which gets its value back."""
    before = csv.field_size_limit(limit + 1)
    try:
        return next(rows)
    finally:
        csv.field_size_limit(before)


_COLUMN_NAME = re.compile(r"[^\W\d][\w.:/()-]*( [\w.:/()-]+)?")
"""A name of one word or two that begins with a letter; a cell of text or a number is none."""


def _columns(head: str, field: str, path: str) -> tuple[str, list[str]]:
    """(delimiter, names of the columns). Raises DataError if `field` is none of them."""
    found: list[list[str]] = []
    for delimiter in DELIMITERS:
        names = next(iter(csv.reader([head], delimiter=delimiter)), [])
        if field in names:
            return delimiter, names
        found.append(names)
    names = max(found, key=len)
    if not all(_COLUMN_NAME.fullmatch(name.strip()) for name in names):
        raise DataError(
            f"the first line is no row of column names, and {field!r} is not in it",
            where=f"{path}:1",
            remedy=f"write the names above the first row, {field} among them",
        )
    raise DataError(
        f"there is no column {field!r}, only {names}",
        where=f"{path}:1",
        remedy=nearest_column(field, names),
    )


def _csv_lines(file: BinaryIO, path: str, limit: int, seen: xxh3_128) -> Iterator[str]:
    at, number = 0, 1
    while line := file.readline(limit + 2):
        if len(line) > limit + 1 and not line.endswith(b"\n"):
            raise too_long_error(f"{path}:{number}", limit, "the line is longer than")
        seen.update(line)
        # The line ending stays as it is: the reader of rows needs it.
        text = normal_form(line, path, at, number)
        yield text
        at, number = at + len(line), number + 1
