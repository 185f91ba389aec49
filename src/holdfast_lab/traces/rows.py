"""Text of files that other people wrote, as rows with their line numbers.

A file may be packed (xz, gzip, bzip2), have a byte order mark, other line ends, quoted fields, or
another delimiter than a comma. What cannot be read is refused with file, line and remedy.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from math import isfinite, nan
from operator import itemgetter
from typing import Any

from holdfast.errors import DataError

_PACKED: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"\xfd7zXZ\x00", lzma.decompress),
    (b"\x1f\x8b", gzip.decompress),
    (b"BZh", bz2.decompress),
)
_DELIMITERS = ",\t;|"
MOST_NODES = 1_000_000
"""Nodes that a file may count at one time. More is an error of the file, and each gets a name."""
_DATE_FORMS = ("%m/%d/%Y %H:%M", "%m/%d/%Y %H:%M:%S")


def text_of(data: bytes, source: str) -> str:
    """The text of a file. Raises DataError if it is none."""
    for magic, unpack in _PACKED:
        if data.startswith(magic):
            try:
                data = unpack(data)
            except (OSError, EOFError, lzma.LZMAError, zlib.error):
                raise DataError(
                    "the packed file is damaged, or ends early",
                    where=source,
                    remedy="fetch it again",
                ) from None
    utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    strange = re.search(r"[\x00-\x08\x0e-\x1b\x7f]", text)
    if strange:
        line = text.count("\n", 0, strange.start()) + 1
        raise DataError(
            f"there is a byte {ord(strange[0])}, so this is no text",
            where=f"{source}:{line}",
            remedy="give a text file in UTF-8",
        )
    return text


def delimiter_of(text: str) -> str:
    """The delimiter of a table: the one that its first line has most of, outside of quotes."""
    line = next((line for line in text[:8000].splitlines() if line.strip()), "")
    bare = re.sub(r'"[^"]*"', "", line)
    return max(_DELIMITERS, key=bare.count)


def cells_of(text: str, source: str = "") -> Iterator[tuple[int, list[str]]]:
    """(line, cells without blanks) of every row that is not empty."""
    reader = csv.reader(
        # Not StringIO, which takes four bytes for each character.
        io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8", newline=""),
        delimiter=delimiter_of(text),
        skipinitialspace=True,
        strict=True,
    )
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"this is no row of a table: {error}",
                where=f"{source}:{max(1, reader.line_num)}",
                remedy="close every quote, and double each quote inside of a field",
            ) from None
        if row is None:
            return
        cells = [cell.strip() for cell in row]
        if any(cells):
            yield reader.line_num, cells


def date_place(cells: Sequence[str]) -> int:
    """The column of dates, by a row of data: the first, if no cell is a date."""
    if cells and as_date(cells[0]) is not None:
        return 0
    dates = (i for i, cell in enumerate(cells) if {"-", "/"} & set(cell) and as_date(cell))
    return next(dates, 0)


def with_date_first(rows: Sequence[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """The rows of a table with a header, with their column of dates first."""
    place = date_place(rows[1][1]) if len(rows) > 1 else 0
    if not place:
        return list(rows)
    return [
        (n, [*cells[place : place + 1], *cells[:place], *cells[place + 1 :]]) for n, cells in rows
    ]


def refuse_longer_row(header: Sequence[str], cells: Sequence[str], source: str, line: int) -> None:
    """Raise DataError for cells beyond the header: a decimal comma moves values into other
    columns."""
    if any(cells[len(header) :]):
        raise DataError(
            f"there are {len(cells)} cells for {len(header)} columns",
            where=f"{source}:{line}",
            remedy="give as many cells as the header has; quote a cell that has a comma",
        )


def sort_rows(
    rows: Sequence[tuple[float, Any, int]],
) -> tuple[list[tuple[float, Any, int]], int, int]:
    """Sorted by time, stable, without exact duplicates; how many were out of order, and dropped."""
    disorder = sum(b[0] < a[0] for a, b in itertools.pairwise(rows))
    kept: list[tuple[float, Any, int]] = []
    at, seen = nan, set[Any]()  # of one time
    for row in sorted(rows, key=itemgetter(0)):
        if row[0] != at:
            at, seen = row[0], {row[1]}
        elif row[1] in seen:
            continue
        else:
            seen.add(row[1])
        kept.append(row)
    return kept, disorder, len(rows) - len(kept)


def smallest_step(times: Sequence[float]) -> float:
    """The step on which the times of changes lie: the smallest difference there is."""
    known = sorted(set(times))
    return min((b - a for a, b in itertools.pairwise(known)), default=0.0)


def number(cell: str, source: str, line: int) -> float:
    """A number that is finite and not negative."""
    value = as_number(cell)
    if value is None or value < 0:
        raise DataError(
            f"{cell!r} is no time or length of time",
            where=f"{source}:{line}",
            remedy="write a number, 0 or more",
        )
    return value


def as_number(cell: str) -> float | None:
    """A finite number, or None. (`1_0`, which Python reads, is none.)"""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if isfinite(value) and "_" not in cell else None


def count(cell: str, source: str, line: int) -> int:
    digits = cell.lstrip("0") or "0"
    if not (cell.isascii() and cell.isdigit()) or len(digits) > 7 or int(digits) > MOST_NODES:
        raise DataError(
            f"{cell[:40]!r} is no number of nodes",
            where=f"{source}:{line}",
            remedy=f"write a whole number, 0 to {MOST_NODES:,}",
        )
    return int(digits)


def as_date(cell: str) -> float | None:
    """Seconds of a wall clock, whose zone is taken as UTC if the text has none; or None."""
    try:
        found = datetime.fromisoformat(cell)
    except ValueError:
        for form in _DATE_FORMS:
            try:
                found = datetime.strptime(cell, form)
            except ValueError:
                continue
            break
        else:
            return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def row_error(source: str, line: int, cells: Sequence[str], remedy: str) -> DataError:
    return DataError(f"{','.join(cells)[:80]!r} is no row", where=f"{source}:{line}", remedy=remedy)


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def headed(
    rows: Iterator[tuple[int, list[str]]],
) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """(the header if there is one, the other rows): a header is a first row of words only."""
    first = next(rows, (0, list[str]()))
    if any(as_number(cell) is not None or as_date(cell) is not None for cell in first[1]):
        return [], itertools.chain([first], rows)
    return first[1], rows


def first_rows(text: str) -> tuple[list[str], list[str]]:
    """The cells of the first row, and of the first that is no header; empty if there is none."""
    try:
        rows = list(itertools.islice(cells_of(text[:8000].rpartition("\n")[0] or text), 2))
    except DataError:
        return [""], [""]
    first = rows[0][1] if rows else [""]
    data = next(headed(iter(rows))[1], (0, [""]))[1]
    return first, data
