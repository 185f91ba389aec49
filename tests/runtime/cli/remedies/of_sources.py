"""Remedies of messages about the files and rows of a source."""

from __future__ import annotations

import bz2
import io
import json
import sqlite3
import subprocess
import tarfile
import zipfile
from pathlib import Path
from re import Match
from typing import Any

import pyarrow as pa
from pyarrow import ipc, parquet
from xxhash import xxh3_128

from holdfast.config.sections.data import SourceConfig
from holdfast.data.read.sources import plan_source, read_unit
from tests.runtime.cli.remedies.lab import Case, Lab, case, fetch_again, fixed, remove, setting

TEXT = "Seven quick words of a text.\n"
ROWS = "".join(json.dumps({"n": n, "text": f"{TEXT} {n}"}) + "\n" for n in range(4))
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def read(lab: Lab) -> list[str]:
    """Read a source whose keys are the lab's settings."""
    given = {"limit": 1 << 20, **lab.settings}
    limit = given.pop("limit")
    plan = plan_source(SourceConfig(**given), 0, 0)
    if plan.refused:
        raise plan.refused[0]
    found = [text for unit in plan.units for text in read_unit(unit, limit, xxh3_128())]
    assert found, "nothing is read"
    return found


def source(kind: str, content: str | bytes, name: str = "in/a.txt", **more: Any) -> Any:
    """Begin with one file that is wrong, next to one that is right if the kind is text."""

    def begin(lab: Lab) -> None:
        path = lab.write(name, content)
        if kind == "text":
            lab.write("in/good.txt", TEXT)
            path = path.parent
        lab.settings.update(kind=kind, path=str(path), **more)

    return begin


def unzip(lab: Lab, found: Match[str]) -> None:
    with zipfile.ZipFile(lab.path("in/a.txt")) as archive:
        archive.extractall(lab.path("in"))
    (lab.folder / "in/a.txt").unlink()


def untar(lab: Lab, found: Match[str]) -> None:
    with tarfile.open(lab.path("in/a.txt")) as archive:
        archive.extractall(lab.path("in"), filter="data")
    (lab.folder / "in/a.txt").unlink()


def in_zip(text: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("inner.txt", text)
    return buffer.getvalue()


def in_tar(text: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("inner.txt")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def unpack_bz2(lab: Lab, found: Match[str]) -> None:
    path = lab.folder / "in/a.txt"
    path.write_bytes(bz2.decompress(path.read_bytes()))


def as_parquet(**columns: Any) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink, compression="zstd")
    return bytes(sink.getvalue())


def use_parquet(lab: Lab, found: Match[str]) -> None:
    lab.settings.update(kind=found[1], path=lab.path("in/a.txt"))


def write_arrow(lab: Lab, table: pa.Table) -> Path:
    path = lab.write("set/train-0.arrow", b"")
    with path.open("wb") as file, ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return path


def as_arrow(lab: Lab) -> None:
    path = write_arrow(lab, pa.table({"text": [TEXT]}))
    lab.settings.update(kind="text", path=str(path))


def use_folder(lab: Lab, found: Match[str]) -> None:
    lab.settings.update(kind=found[1], path=str(Path(lab.settings["path"]).parent))


def export_text(lab: Lab, found: Match[str]) -> None:
    path = lab.folder / "in/a.txt"
    with sqlite3.connect(path) as connection:
        (text,) = connection.execute("select text from page").fetchone()
    path.write_text(text)


def as_sqlite(lab: Lab) -> None:
    lab.write("in/good.txt", TEXT)
    with sqlite3.connect(lab.path("in/a.txt")) as connection:
        connection.execute("create table page (text)")
        connection.execute("insert into page values (?)", (TEXT,))
    lab.settings.update(kind="text", path=lab.path("in"))


def run_iconv(lab: Lab, found: Match[str]) -> None:
    path = lab.folder / "in/a.txt"
    done = subprocess.run([*found[1].split(), path], capture_output=True, check=True)
    path.write_bytes(done.stdout)


def as_utf8(lab: Lab, found: Match[str]) -> None:
    path = lab.folder / "in/a.txt"
    path.write_bytes(path.read_bytes().decode("latin-1").encode())


def rewritten(name: str, content: str | bytes) -> Any:
    """Mend, write again, split or remove by hand what the remedy says."""
    return lambda lab, found: lab.write(name, content)


def spoilt(kind: str, content: bytes, damage: Any, name: str = "in/a.txt", **more: Any) -> Any:
    def begin(lab: Lab) -> None:
        path = lab.write(name, content)
        lab.settings.update(kind=kind, path=str(path), **more)
        lab.spoil(path, damage(content))

    return begin


def damage_page(content: bytes) -> bytes:
    return content[:200] + bytes(60) + content[260:]


def not_utf8_column(lab: Lab, column: pa.Array) -> None:
    path = lab.write("a.parquet", b"")
    parquet.write_table(pa.table({"text": column}), path)
    lab.settings.update(kind="parquet", path=str(path))


def begin_not_utf8(lab: Lab) -> None:
    raw = b"plain" + b"caf\xe9"
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 5, 9)))
    not_utf8_column(lab, pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(raw)]))


def hub_folder(lab: Lab) -> None:
    parquet.write_table(pa.table({"text": [TEXT]}), lab.write("set/train-0.parquet", b""))
    parquet.write_table(pa.table({"text": [TEXT]}), lab.write("set/test-0.parquet", b""))


def begin_split(lab: Lab) -> None:
    hub_folder(lab)
    lab.settings.update(kind="huggingface", path=lab.path("set"), split="validation")


def begin_no_columns(lab: Lab) -> None:
    hub_folder(lab)
    lab.write("rows/a.jsonl", ROWS)
    lab.settings.update(kind="huggingface", path=lab.path("rows"))


def begin_arrow_column(lab: Lab) -> None:
    write_arrow(lab, pa.table({"body": [TEXT], "n": [1]}))
    lab.settings.update(kind="huggingface", path=lab.path("set"))


def begin_named(lab: Lab) -> None:
    lab.write("texts/a.txt", TEXT)
    lab.settings.update(kind="text", path=lab.path("textz"))


def begin_dangling(lab: Lab) -> None:
    (lab.folder / "link.txt").symlink_to(lab.folder / "gone.txt")
    lab.settings.update(kind="text", path=lab.path("link.txt"))


def begin_empty_folder(lab: Lab) -> None:
    (lab.folder / "none").mkdir()
    lab.write("texts/a.txt", TEXT)
    lab.settings.update(kind="text", path=lab.path("none"))


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


LFS = r"run git lfs pull where it was cloned"
FETCH = r"fetch it again, or leave it out of the source"
LEAVE = r"leave it out of the source"
C, T, S, K = (
    f"data/{module}.py: "
    for module in ("containers", "text_sources", "source_files", "columnar_sources")
)
CSV = "n,text\n1,one text\n2,another text\n"
ARRAY = json.dumps([{"text": TEXT}, {"text": TEXT}])

CASES: list[Case] = [
    case(
        C + "(pointer_error)",
        spoilt("jsonl", ROWS.encode(), lambda _: POINTER),
        read,
        LFS,
        fetch_again,
    ),
    case(
        C + "(pointer_error)",
        spoilt("parquet", as_parquet(text=[TEXT]), lambda _: POINTER),
        read,
        LFS,
        fetch_again,
    ),
    case(
        C + "the file is empty, so it is not …",
        spoilt("parquet", as_parquet(text=[TEXT]), lambda _: b""),
        read,
        FETCH,
        fetch_again,
    ),
    case(
        C + "this is …, not text",
        source("text", in_zip(TEXT)),
        read,
        r"unpack it, or leave it out",
        unzip,
    ),
    case(
        C + "this is …, not text",
        source("text", bz2.compress(TEXT.encode())),
        read,
        r"unpack it, or compress it with gzip or zstd, or leave it out",
        unpack_bz2,
    ),
    case(
        C + "this is …, not text",
        source("text", as_parquet(text=[TEXT])),
        read,
        r"use kind: (parquet), or leave it out",
        use_parquet,
    ),
    case(
        C + "this is …, not text",
        as_arrow,
        read,
        r"use kind: (huggingface) with its folder as path, or leave it out",
        use_folder,
    ),
    case(
        C + "this is …, not text",
        source("text", b"%PDF-1.4 and so on"),
        read,
        r"extract its text, or leave it out",
        rewritten("in/a.txt", TEXT),
    ),
    case(
        C + "this is …, not text",
        as_sqlite,
        read,
        r"export its text, or leave it out",
        export_text,
    ),
    case(
        C + "this is a tar archive, not text",
        source("text", in_tar(TEXT)),
        read,
        r"unpack it, or leave it out",
        untar,
    ),
    case(
        C + "this is …, not UTF-8",
        source("text", TEXT.encode("utf-16")),
        read,
        r"convert it with: (iconv -f UTF-16 -t UTF-8)",
        run_iconv,
    ),
    case(
        C + "the compressed file is damaged or cut short (…)",
        spoilt("jsonl", bytes(pa.Codec("zstd").compress(ROWS.encode(), asbytes=True)), half),
        read,
        FETCH,
        fetch_again,
    ),
    case(
        T + "a zero byte at offset …: this is a binary file, not text",
        source("text", b"a\0b"),
        read,
        LEAVE,
        remove("in/a.txt"),
    ),
    case(
        T + "byte 0x… at offset … is not UTF-8",
        source("text", b"caf\xe9 bar"),
        read,
        r"convert the file to UTF-8, or leave it out of the source",
        as_utf8,
    ),
    case(
        T + "… data.max_document_bytes (…)",
        source("text", TEXT * 9, limit=100),
        read,
        r"raise data.max_document_bytes, or split the document",
        fixed(limit=1000),
    ),
    case(
        T + "the text has a zero byte at character …: this is binary, not text",
        source("jsonl", json.dumps({"text": "a\0b"}) + "\n" + ROWS),
        read,
        r"remove it, or leave the document out",
        rewritten("in/a.txt", ROWS),
    ),
    case(
        T + "the text holds half of a surrogate pair at character …, which is no character",
        source("jsonl", '{"text": "a \\ud800 b"}\n'),
        read,
        r"mend or remove it",
        rewritten("in/a.txt", '{"text": "a  b"}\n'),
    ),
    case(
        T + "the line has no text in the field … (…)",
        source("jsonl", ROWS, field="txt"),
        read,
        r"set field: (\S+) in data.sources",
        setting("field"),
    ),
    case(
        T + "(_line_document)",
        source("jsonl", "no JSON at all\n"),
        read,
        r"mend the line, or use kind: (text) or csv",
        setting("kind"),
    ),
    case(
        T + "(_line_document)",
        source("jsonl", '{"text": "a"\n'),
        read,
        r"mend the line, or use kind: text",
        rewritten("in/a.txt", '{"text": "a"}\n'),
    ),
    case(
        T + "(_line_document)",
        source("jsonl", '{\n"text": "a"\n}\n'),
        read,
        r"write one object a line, or one array of objects",
        rewritten("in/a.txt", '[{\n"text": "a"\n}]\n'),
    ),
    case(
        T + "not JSON (…)",
        source("jsonl", '[{"text": "a"}, {text: 3}]'),
        read,
        r"mend the element",
        rewritten("in/a.txt", '[{"text": "a"}, {"text": "3"}]'),
    ),
    case(
        T + "the array …",
        spoilt("jsonl", ARRAY.encode(), lambda content: content[:-9]),
        read,
        r"fetch the file again, or mend it",
        fetch_again,
    ),
    case(
        T + "the row has … cells, the head …",
        source("csv", CSV + "3,a,b\n"),
        read,
        r"mend the row; quote text with commas or line feeds",
        rewritten("in/a.txt", CSV + '3,"a,b"\n'),
    ),
    case(
        T + "not CSV (…)",
        source("csv", CSV + '3,"a\n'),
        read,
        r"mend the row; quote text with commas",
        rewritten("in/a.txt", CSV + '3,"a"\n'),
    ),
    case(
        T + "there is no column …, only …",
        source("csv", CSV, field="txet"),
        read,
        r"set field: (\S+) in data.sources",
        setting("field"),
    ),
    case(
        S + "… does not exist",
        begin_named,
        read,
        r"did you mean (\S+)\?",
        setting("path"),
    ),
    case(
        S + "… does not exist",
        begin_dangling,
        read,
        r"it is a dangling link: mend it, or name another file",
        rewritten("gone.txt", TEXT),
    ),
    case(
        S + "… holds no file (…) | ",
        begin_empty_folder,
        read,
        r"name a file, a folder or a glob that matches one",
        lambda lab, found: lab.settings.update(path=lab.path("texts/*.txt")),
    ),
    case(
        K + "not a Parquet file (…)",
        spoilt("parquet", as_parquet(text=[TEXT]), half),
        read,
        r"name Parquet files only, and fetch a damaged one again",
        fetch_again,
    ),
    case(
        K + "there is no column …, only …",
        source("parquet", as_parquet(n=[1], body=[TEXT])),
        read,
        r"set field: (\S+) in data.sources",
        setting("field"),
    ),
    case(
        K + "there is no column …, only …",
        begin_arrow_column,
        read,
        r"set field: (\S+) in data.sources",
        setting("field"),
    ),
    case(
        K + "the file is damaged (…)",
        spoilt("parquet", as_parquet(text=[f"text {n} " * 40 for n in range(2000)]), damage_page),
        read,
        FETCH,
        fetch_again,
    ),
    case(
        K + "byte 0x… at offset … of the text is not UTF-8",
        begin_not_utf8,
        read,
        r"convert the column to UTF-8, or leave the row out",
        lambda lab, found: not_utf8_column(lab, pa.array(["plain", "café"])),
    ),
    case(
        K + "the column … holds …, not text",
        source("parquet", as_parquet(n=[1], body=[TEXT]), field="n"),
        read,
        r"set field to a column of text",
        fixed(field="body"),
    ),
    case(
        K + "… has no split …, only … | ",
        begin_split,
        read,
        r"set split: (\w+)",
        setting("split"),
    ),
    case(
        K + "… holds no .arrow and no .parquet file",
        begin_no_columns,
        read,
        r"name the folder of a dataset, or use kind: jsonl, csv or text",
        fixed(kind="jsonl"),
    ),
    case(
        K + "… holds no .arrow and no .parquet file",
        begin_no_columns,
        read,
        r"name the folder of a dataset, or use kind: jsonl, csv or text",
        lambda lab, found: lab.settings.update(path=lab.path("set")),
    ),
]
