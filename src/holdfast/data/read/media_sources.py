"""Documents with an image or a recording: files, tar files, Parquet and Arrow.

A document's text is what `field` names: a file next to the image, the name of its folder, or a
column. A document is decoded when its hash or its numbers are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.data.read.columnar_sources import plain_cell, read_cells
from holdfast.data.read.features import FeatureFormat
from holdfast.data.read.record_sources import DEFAULT_FIELD, read_samples
from holdfast.data.read.source_files import FoundFiles
from holdfast.data.read.text_sources import clean_text, nearest_column, normal_form, too_long_error
from holdfast.errors import DataError

FOLDER = "folder"
"""The `field` of a source of files whose texts are the names of their folders."""

Media = tuple[str, bytes, bytes | str]  # place, image or recording, text


def chosen_files(found: FoundFiles, field: str, format: FeatureFormat) -> None:
    """Leave in `found` the files that are images or recordings, by their endings. Those that are
    neither these nor their texts are counted."""
    texts = f".{_ending(field)}"
    for path, _ in found.files:
        if not path.lower().endswith((*format.endings, texts)):
            found.leave(f"files that are no {format.column}, by their ending", path)
    found.files = [each for each in found.files if each[0].lower().endswith(format.endings)]


def read_media(
    kind: str, part: tuple[str, int, int], media: str, field: str, format: FeatureFormat, limit: int
) -> Iterator[Media | DataError]:
    """Yield the documents of a part of a unit, or why one cannot be used. limit: most bytes of an
    image, recording or text. Raises DataError for a file that cannot be read."""
    path, start, stop = part
    if kind == "files":
        yield _of_file(path, field, limit)
    elif kind == "webdataset":
        yield from _of_tar(path, media, field, format, limit)
    else:
        columns = [media or format.column, *([field] if field else [])]
        for where, cells in read_cells(kind, path, start, stop, columns):
            try:
                values = [plain_cell(cell, where) for cell in cells]
            except DataError as error:
                yield error
            else:
                yield _of_row(where, columns, values, limit)


def _ending(field: str) -> str:
    return "txt" if field == DEFAULT_FIELD else field


def _of_file(path: str, field: str, limit: int) -> Media | DataError:
    beside = f"{os.path.splitext(path)[0]}.{_ending(field)}"
    names = [path] if field in ("", FOLDER) else [path, beside]
    for name in names:
        if not os.path.isfile(name):
            return DataError(
                f"its text {os.path.basename(name)} is missing",
                where=path,
                remedy="write it, or use field: folder for the folder's name, or field: '' for "
                "none, in data.sources",
            )
        if os.path.getsize(name) > limit:
            return too_long_error(name, limit, "the file is longer than")
    content, *texts = (Path(name).read_bytes() for name in names)
    if field == FOLDER:
        return path, content, os.path.basename(os.path.dirname(os.path.abspath(path)))
    return path, content, texts[0] if texts else ""


def _of_tar(
    path: str, media: str, field: str, format: FeatureFormat, limit: int
) -> Iterator[Media | DataError]:
    endings = (f".{media.lower().lstrip('.')}",) if media else format.endings
    text = _ending(field)

    def is_media(ending: str) -> bool:
        return f".{ending}".lower().endswith(endings)

    for where, files in read_samples(path, lambda e: is_media(e) or e == text, limit):
        images = [ending for ending in files if is_media(ending)]
        wanted = [*images, *([text] if field else [])]
        if problem := next((f for e in wanted if isinstance(f := files.get(e), DataError)), None):
            yield problem
        elif len(images) != 1:
            yield DataError(
                f"the sample has {len(images)} files of an {format.column}, not one, among "
                f"{sorted(files)}",
                where=where,
                remedy="set media in data.sources to the ending",
            )
        elif field and text not in files:
            yield DataError(
                f"the sample has no file .{text}, only {sorted(files)}",
                where=where,
                remedy=nearest_column(text, sorted(set(files) - set(images))),
            )
        else:
            content, said = files[images[0]], files[text] if field else b""
            assert isinstance(content, bytes)
            assert isinstance(said, bytes)
            yield f"{where}.{images[0]}", content, said


def _of_row(where: str, columns: list[str], cells: list[Any], limit: int) -> Media | DataError:
    content, text = cells[0], cells[1] if len(cells) > 1 else ""
    if isinstance(content, dict):  # as datasets stores images and recordings
        name, content = content.get("path"), content.get("bytes")
        if content is None and name:
            return DataError(
                f"the column {columns[0]!r} names the file {name} and holds no bytes",
                where=where,
                remedy="write the bytes into the column (embed_external_files of datasets)",
            )
    if not isinstance(content, bytes):
        what = "is empty" if content is None else f"holds {type(content).__name__}, not bytes"
        return DataError(
            f"the column {columns[0]!r} {what}",
            where=where,
            remedy="set media in data.sources to the column with the bytes",
        )
    if len(content) > limit:
        return too_long_error(where, limit, f"the column {columns[0]!r} is longer than")
    if text is None:
        text = ""
    if not isinstance(text, str | int):
        return DataError(
            f"the column {columns[1]!r} holds {type(text).__name__}, not text",
            where=where,
            remedy="set field in data.sources to a column of texts or of whole numbers",
        )
    return where, content, str(text)


def text_of(text: bytes | str, where: str) -> str:
    """Return a text in its normal form, without outer white space. Raises DataError."""
    return (
        clean_text(text, where) if isinstance(text, str) else normal_form(text, where, 0)
    ).strip()
