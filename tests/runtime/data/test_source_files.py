"""Which files a source reads, what a line counts, and what is refused by name, all at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.data import SourceConfig
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.read.sources import plan_source
from holdfast.errors import DataError
from tests.support.corpus import data_config, make, text_folder, text_source

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
