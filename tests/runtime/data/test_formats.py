"""Sources as people have them: the same documents in any form, and errors with row and column."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet
from xxhash import xxh3_128

from holdfast.config.sections.data import SourceConfig
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.read.sources import plan_source, read_unit
from holdfast.errors import DataError
from tests.support.corpus import data_config, make, text, text_folder, text_source

TEXTS = [text(i, 30) for i in range(12)] + ['a "quoted", line\nand more', "né\t日本 🙂 [}{"]
LIMIT = 1 << 20


def read(limit: int = LIMIT, **source: Any) -> list[str]:
    """The documents of a source, all units in order; the first refusal is raised."""
    plan = plan_source(SourceConfig(**source), 0, 0)
    if plan.refused:
        raise plan.refused[0]
    return [t for unit in plan.units for t in read_unit(unit, limit, xxh3_128())]


def refused(**source: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(**source)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return str(caught.value)


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def jsonl() -> bytes:
    return "".join(json.dumps({"n": i, "text": t}) + "\n" for i, t in enumerate(TEXTS)).encode()


def as_csv(path: Path, delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([("n", "text"), *enumerate(TEXTS)])
    return path


# --- packed files, arrays, CSV ----------------------------------------------------------------
@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_packed_files_are_read_whatever_their_name(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(pack(jsonl()))
    assert read(kind="jsonl", path=str(path)) == TEXTS
    path.write_bytes(pack(TEXTS[-1].encode()) + pack(b" and a second frame"))
    assert read(kind="text", path=str(path)) == [TEXTS[-1] + " and a second frame"]
    path.write_bytes(pack(as_csv(tmp_path / "a.csv").read_bytes()))
    assert read(kind="csv", path=str(path)) == TEXTS


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_packed_file_that_is_cut_or_damaged_is_named(tmp_path: Path, pack: Any) -> None:
    path = tmp_path / "a.jsonl.xx"
    noise = np.random.default_rng(1).integers(32, 127, 40_000, dtype=np.uint8).tobytes()
    packed = pack(json.dumps({"text": noise.decode()}).encode())
    path.write_bytes(packed[:-500])
    assert "the compressed file is damaged or cut short" in refused(kind="jsonl", path=str(path))
    flipped = bytearray(packed)
    flipped[8:16] = b"\xff" * 8
    path.write_bytes(flipped)
    sentence = refused(kind="jsonl", path=str(path))
    assert f"source 'jsonl': {path}" in sentence
    (tmp_path / "inner").write_bytes(pack(b"PK\x03\x04" + bytes(100)))
    assert "a zip archive" in refused(kind="text", path=str(tmp_path / "inner"))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf \n"])
def test_an_array_of_json(tmp_path: Path, indent: int | None, mark: bytes) -> None:
    path = tmp_path / "a.json"
    rows = [{"text": t, "more": {"deep": ["]", "}", '\\"']}} for t in TEXTS]
    path.write_bytes(mark + json.dumps(rows, indent=indent).encode())
    assert read(kind="jsonl", path=str(path)) == TEXTS
    path.write_bytes(mark + json.dumps(TEXTS, indent=indent).encode())
    assert read(kind="jsonl", path=str(path)) == TEXTS
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert read(kind="jsonl", path=str(path)) == TEXTS


def test_an_array_of_many_buffers(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    many = [('\\"x' * 5000) + str(i) for i in range(60)]
    path.write_text(json.dumps(many))
    assert read(kind="jsonl", path=str(path)) == many


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('[{"text": "a"}, {"text": "b"}', "row 1, column 'text': the array does not end"),
        ('[{"text": "a"}, {"text": "b', "the array does not end"),
        ('[{"text": "a"}] more', "the array is followed by something else"),
        ('[{"text": "a"}] [1]', "the array is followed by something else"),
        ('[{"text": "a"} {"text": "b"}]', "row 0, column 'text': not JSON (Extra data"),
        ('[{"text": "a"},]', "row 1, column 'text': not JSON"),
        ('["a", {"body": "b"}]', "row 1, column 'text': the line has no text in the field 'text'"),
        ('["a", 3]', "row 1, column 'text'"),
        ('["a\\u0000b"]', "row 0, column 'text': the text has a zero byte at character 1"),
    ],
)
def test_an_array_that_is_wrong(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    sentence = refused(kind="jsonl", path=str(path))
    assert f"{path}, " in sentence
    assert says in sentence


def test_csv(tmp_path: Path) -> None:
    for delimiter in (",", "\t", ";", "|"):
        path = as_csv(tmp_path / "a.csv", delimiter)
        assert read(kind="csv", path=str(path)) == TEXTS
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert read(kind="csv", path=str(path)) == TEXTS
    assert "no column 'body', only ['n', 'text']; set field: text" in refused(
        kind="csv", path=str(as_csv(tmp_path / "a.csv")), field="body"
    ).replace("set field: n", "set field: text")
    path.write_text("n,text\n1,a\n2,b,c\n")
    (headless := tmp_path / "headless.csv").write_text("A sentence of the first row,3\nMore,4\n")
    assert "first line is no row of column names" in refused(kind="csv", path=str(headless))
    sentence = refused(kind="csv", path=str(path))
    assert f"{path}:3, row 1, column 'text': the row has 3 cells, the head 2" in sentence
    path.write_text('n,text\n1,a\n2,"b\n')
    assert "not CSV" in refused(kind="csv", path=str(path))
    path.write_bytes(b"n,text\n1,a\n2,caf\xe9\n")
    assert f"{path}:3, column 'text': byte 0xe9 at offset 16" in refused(kind="csv", path=str(path))
    path.write_text("n,text\n1," + "x" * 200_000 + "\n")
    assert read(kind="csv", path=str(path)) == ["x" * 200_000]
    with pytest.raises(DataError, match="longer than"):
        read(limit=1000, kind="csv", path=str(path))


# --- tables -----------------------------------------------------------------------------------
def bad_utf8() -> pa.Table:
    """Row 31 of 50 is no UTF-8."""
    rows = [b"plain %d" % i for i in range(50)]
    rows[31] = b"caf\xe9"
    offsets = np.cumsum([0, *(len(row) for row in rows)]).astype("<i4")
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(rows))]
    return pa.table({"text": pa.Array.from_buffers(pa.string(), 50, buffers)})


def test_parquet_names_file_row_group_row_and_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(bad_utf8(), path, row_group_size=20)
    sentence = refused(kind="parquet", path=str(path), name="web")
    where = f"source 'web': {path}, row group 1, row 31, column 'text'"
    assert sentence.startswith(f"{where}: byte 0xe9 at offset 3 of the text is not UTF-8")
    table = pa.table({"text": [f"document {i} " * 40 for i in range(2000)]})
    parquet.write_table(table, path, compression="zstd")
    torn = bytearray(path.read_bytes())
    torn[200:260] = bytes(60)
    path.write_bytes(torn)
    sentence = refused(kind="parquet", path=str(path))
    assert f"{path}, row group 0, after row 0, column 'text': the file is damaged" in sentence
    parquet.write_table(pa.table({"text": ["a", "b\0c"]}), path)
    assert "row 1, column 'text': the text has a zero byte" in refused(
        kind="parquet", path=str(path)
    )
    parquet.write_table(pa.table({"txt": ["a"], "n": [1]}), path)
    assert "set field: txt" in refused(kind="parquet", path=str(path))
    parquet.write_table(pa.table({"n": [1], "body": ["a"]}), path)
    assert "set field: body" in refused(kind="parquet", path=str(path))


def save_arrow(path: Path, texts: list[str], stream: bool = True) -> None:
    table = pa.table({"text": texts, "n": list(range(len(texts)))})
    new = ipc.new_stream if stream else ipc.new_file
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def test_folders_of_a_hugging_face_dataset(tmp_path: Path) -> None:
    def found(folder: Path, split: str = "train") -> list[str]:
        return read(kind="huggingface", path=str(folder), split=split)

    saved = tmp_path / "saved"  # Dataset.save_to_disk
    save_arrow(saved / "data-00000-of-00002.arrow", TEXTS[:7])
    save_arrow(saved / "data-00001-of-00002.arrow", TEXTS[7:], stream=False)
    for name in ("dataset_info.json", "state.json"):
        (saved / name).write_text("{}")
    assert found(saved) == TEXTS
    both = tmp_path / "both"  # DatasetDict.save_to_disk
    save_arrow(both / "train" / "data-00000-of-00001.arrow", TEXTS)
    save_arrow(both / "test" / "data-00000-of-00001.arrow", ["x"])
    (both / "dataset_dict.json").write_text("{}")
    assert found(both) == TEXTS
    assert found(both, "test") == ["x"]
    cached = tmp_path / "cached"  # as load_dataset leaves it
    save_arrow(cached / "name-train-00000-of-00001.arrow", TEXTS)
    save_arrow(cached / "name-validation.arrow", ["y"])
    assert found(cached) == TEXTS
    hub = tmp_path / "hub"  # a copy of a repository
    (hub / "data").mkdir(parents=True)
    parquet.write_table(pa.table({"text": TEXTS}), hub / "data" / "train-00000-of-00001.parquet")
    parquet.write_table(pa.table({"text": ["z"]}), hub / "data" / "test-00000-of-00001.parquet")
    (hub / "README.md").write_text("# A dataset")
    assert found(hub) == TEXTS
    assert read(kind="parquet", path=str(hub)) == [*(["z"]), *TEXTS]
    assert "has no split 'dev', only ['test', 'train']" in refused(
        kind="huggingface", path=str(hub), split="dev"
    )
    (tmp_path / "nothing").mkdir()
    assert "holds no .arrow and no .parquet file" in refused(
        kind="huggingface", path=str(tmp_path / "nothing")
    )


def test_an_arrow_file_names_its_row(tmp_path: Path) -> None:
    path = tmp_path / "set" / "data.arrow"
    path.parent.mkdir()
    table = bad_utf8()
    with pa.OSFile(str(path), "wb") as file, ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    sentence = refused(kind="huggingface", path=str(path.parent))
    assert f"{path}, row 31, column 'text': byte 0xe9 at offset 3" in sentence
    path.write_bytes(path.read_bytes()[:-200])
    assert f"{path}" in refused(kind="huggingface", path=str(path.parent))


# --- normal form, identity ----------------------------------------------------------------------
def test_no_mark_and_no_zero_byte_reaches_a_document(tmp_path: Path) -> None:
    mark = "\ufeff"
    for suffix, kind in (
        ("txt", "text"),
        ("jsonl", "jsonl"),
        ("csv", "csv"),
        ("parquet", "parquet"),
    ):
        path = tmp_path / f"a.{suffix}"
        if kind == "parquet":
            parquet.write_table(pa.table({"text": [f"{mark}one{mark} two"]}), path)
        else:
            body = {"text": "", "jsonl": '{"text": "', "csv": "text\n"}[kind]
            end = '"}' if kind == "jsonl" else ""
            path.write_text(f"{mark}{body}{mark}one{mark} two{end}")
        assert [t.strip() for t in read(kind=kind, path=str(path))] == ["one two"]
    path = tmp_path / "z.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "a\\u0000"}\n')
    assert f"{path}:2, column 'text': the text has a zero byte" in refused(
        kind="jsonl", path=str(path)
    )


def test_the_same_files_under_another_path_are_the_same_dataset(tmp_path: Path) -> None:
    here = text_folder(tmp_path / "here", files=4, words=40)
    there = text_folder(tmp_path / "there", files=4, words=40)
    first = make(data_config(tmp_path / "one", text_source(here)))
    second = make(data_config(tmp_path / "two", text_source(there)))
    assert first.version == second.version
    assert first.source_paths == (str(here),)
    said: list[str] = []
    again = prepare_dataset(data_config(tmp_path / "one", text_source(there)), said.append)
    assert again.version == first.version
    assert said == []
    link = tmp_path / "link"
    link.symlink_to(here)
    assert make(data_config(tmp_path / "one", text_source(link))).version == first.version
    last = there / "003.txt"
    last.write_text("".join(reversed(last.read_text())))
    with pytest.raises(DataError, match="which holds other text"):
        make(data_config(tmp_path / "one", text_source(there)))


def test_a_dataset_with_its_paths_in_the_manifest_keeps_its_name(tmp_path: Path) -> None:
    """As older versions wrote it; one that is prepared again answers to both names."""
    from holdfast.data.read.files import canonical_json
    from holdfast.data.stream.dataset import Dataset, with_version

    here = text_folder(tmp_path / "here", files=4, words=40)
    config = data_config(tmp_path / "set", text_source(here))
    new = make(config)
    manifest = json.loads((new.folder / "manifest.json").read_text())
    for sources in (manifest["settings"]["sources"], manifest["sources"]):
        sources[0]["path"] = str(here)
    (new.folder / "manifest.json").write_bytes(canonical_json(with_version(manifest)))
    (new.folder / "sources.json").unlink()
    old = make(config)
    assert old.version != new.version
    assert old.version == new.former_version
    assert new.is_version(old.version)
    assert Dataset.open(old.folder).source_paths == (str(here),)


# --- which files a source reads -------------------------------------------------------------------
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def refusal(tmp_path: Path, *sources: dict[str, Any], **more: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        make(data_config(tmp_path / "out", *sources, **more))
    return str(caught.value).split("\n")


def test_linked_folders_are_read_once_and_the_rest_is_counted(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=4, words=20, seed=1)
    elsewhere = text_folder(tmp_path / "elsewhere", files=3, words=20, seed=2)
    (folder / "a-link").symlink_to(elsewhere)
    (folder / "z-link").symlink_to(elsewhere)
    (elsewhere / "loop").symlink_to(folder)
    (folder / "dangling.txt").symlink_to("/nowhere/at/all.txt")
    (folder / ".hidden").write_text("no")
    (folder / ".git").mkdir()
    os.mkfifo(folder / "pipe")
    said: list[str] = []
    dataset = prepare_dataset(data_config(tmp_path / "out", text_source(folder)), said.append)
    source = dataset.manifest["sources"][0]
    assert (source["files"], source["documents"], source["duplicates"]) == (7, 7, 0)
    (line,) = [line for line in said if "not read" in line]
    assert line == (
        "text: not read: 1 dangling links (dangling.txt), 1 hidden files (.hidden), "
        "1 hidden folders (.git), 1 things that are no files (pipe)"
    )


def test_a_glob_says_what_it_does_not_enter(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=3, words=20)
    text_folder(folder / "below", files=2, words=20, seed=5)
    (folder / "gone.txt").symlink_to("nowhere")
    plan = plan_source(SourceConfig(kind="text", path=str(folder / "*")), 0, 0)
    assert plan.files == 3
    assert "1 dangling links (gone.txt)" in plan.unread
    assert "1 folders that the glob matches but does not enter (use **) (below)" in plan.unread
    (folder / "link").symlink_to(folder / "below")
    plan = plan_source(SourceConfig(kind="text", path=str(folder / "**" / "*.txt")), 0, 0)
    assert plan.files == 5


def test_all_bad_files_of_all_sources_are_named_at_once(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    texts = text_folder(tmp_path / "texts", files=8, words=20)
    for name in ("001", "004", "007"):
        (texts / f"{name}.txt").write_bytes(b"caf\xe9 bad")
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "good.jsonl").write_text('{"text": "good"}\n')
    (lines / "bad.jsonl").write_text('{"text": "good"}\n{"txet": "x", "n": 1}\n')
    (lines / "pointer.jsonl").write_text(POINTER)
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "a.parquet").write_text("no")
    parquet.write_table(pa.table({"body": ["x"]}), tables / "b.parquet")
    for processes in (1, 2):
        head, *named = refusal(
            tmp_path,
            text_source(texts),
            {"kind": "jsonl", "path": str(lines)},
            {"kind": "parquet", "path": str(tables)},
            processes=processes,
        )
        assert head == "7 files cannot be read:"
        found = "\n".join(sorted(named))
        for name in ("001", "004", "007"):
            assert f"source 'text': {texts}/{name}.txt:1: byte 0xe9 at offset 3 is not" in found
        place = f"source 'jsonl': {lines}/bad.jsonl:2, column 'text': the line has no text"
        assert place in found
        assert "set field: txet" in found
        assert f"{lines}/pointer.jsonl" in found
        assert "this is a git-lfs pointer" in found
        assert f"source 'parquet': {tables}/a.parquet: not a Parquet file" in found
        assert "there is no column 'text', only ['body']; set field: body" in found
        assert all("; " in line for line in named)


def test_very_many_bad_files_are_named_in_a_file(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number:02d}.txt").write_bytes(b"\xff")
    head, *named = refusal(tmp_path, text_source(texts))
    assert head == "60 files cannot be read:"
    assert len(named) == 51
    rest = tmp_path / "out" / ".prepare" / "refused.txt"
    assert named[-1] == f"and 10 more, all of them in {rest}"
    assert len(rest.read_text().splitlines()) == 60


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv", "parquet"])
def test_a_pointer_is_refused_for_every_kind(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    path.write_text(POINTER)
    (line,) = refusal(tmp_path, {"kind": kind, "path": str(path)})
    assert f"source {kind!r}: {path}" in line
    assert "this is a git-lfs pointer, not the file; run git lfs pull" in line


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_an_empty_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    path.touch()
    (line,) = refusal(tmp_path, {"kind": kind, "path": str(path)})
    assert str(path) in line
    assert "the file is empty" in line


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv", "parquet"])
def test_a_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the system's answer is made up."""
    path = tmp_path / "closed"
    path.write_text("text\na\n")

    def refuse(name: Any, *rest: Any, **more: Any) -> Any:
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied", str(name))
        return real(name, *rest, **more)

    real = open
    monkeypatch.setattr("builtins.open", refuse)
    (line,) = refusal(tmp_path, {"kind": kind, "path": str(path)})
    assert str(path) in line
    assert "cannot be read (Permission denied); give yourself the permission" in line


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"PK\x03\x04", "a zip archive"),
        (b"BZh9", "compressed with bzip2"),
        (b"PAR1", "a Parquet file, not text; use kind: parquet"),
        (b"%PDF-1.7", "a PDF"),
        ("text".encode("utf-16"), "UTF-16, not UTF-8; convert it with: iconv -f UTF-16 -t UTF-8"),
        (b"x" * 257 + b"ustar\0", "a tar archive"),
    ],
)
def test_another_container_is_named(tmp_path: Path, head: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(head + bytes(600))
    for kind in ("text", "jsonl", "csv"):
        (line,) = refusal(tmp_path, {"kind": kind, "path": str(path)})
        assert f"this is {says}" in line


def test_a_path_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    (line,) = refusal(tmp_path, text_source(tmp_path / "corpsu.txt"))
    assert f"did you mean {tmp_path}/corpus.txt?" in line
    (tmp_path / "link").symlink_to("nowhere")
    (line,) = refusal(tmp_path, text_source(tmp_path / "link"))
    assert "it is a dangling link" in line


def test_a_path_that_lies_in_the_current_folder_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path)
    source = SourceConfig(kind="text", path="texts").at("elsewhere/texts")
    with pytest.raises(DataError, match=f"write {tmp_path}/texts"):
        plan_source(source, 0, 0)
