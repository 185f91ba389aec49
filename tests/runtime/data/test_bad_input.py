"""Every mistake with a source, a tokenizer or a folder: one sentence that names the place."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.read.files import explain_os_errors
from holdfast.errors import DataError, OutOfSpaceError, UserError
from tests.support.corpus import data_config, jsonl_file, make, text_folder, text_source, tree


def refused(tmp_path: Path, source: dict[str, Any], **more: Any) -> str:
    """The one sentence with which preparing a source is refused; nothing is left that opens."""
    with pytest.raises(DataError) as caught:
        make(data_config(tmp_path / "out", source, **more))
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert caught.value.remedy
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out" / "manifest.json").exists()
    return sentence


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x89PNG ok so far \0\0", "offset 15"),
        ("café".encode("latin-1"), "byte 0xe9 at offset 3 is not UTF-8"),
    ],
)
def test_a_file_that_is_no_text(content: bytes, words: str, tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=2, words=20)
    (folder / "odd.txt").write_bytes(content)
    sentence = refused(tmp_path, text_source(folder))
    assert "odd.txt" in sentence
    assert words in sentence


def test_jsonl_that_is_not_utf8_names_the_offset_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    sentence = refused(tmp_path, {"kind": "jsonl", "path": str(path)})
    assert "offset 27" in sentence


def test_nothing_left(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").touch()
    (folder / "b.txt").write_text("  \n")
    sentence = refused(tmp_path, text_source(folder))
    assert "nothing is left of 2 documents: 2 empty" in sentence
    lines = tmp_path / "empty.jsonl"
    lines.write_text("\n")
    assert "nothing is left" in refused(tmp_path, {"kind": "jsonl", "path": str(lines)})


def test_line_too_long(tmp_path: Path) -> None:
    path = jsonl_file(tmp_path / "a.jsonl", lines=5, words=3)
    with path.open("a") as file:
        file.write(json.dumps({"body": "x" * 5000}) + "\n")
    source = {"kind": "jsonl", "path": str(path), "field": "body"}
    sentence = refused(tmp_path, source, max_document_bytes=4096)
    assert f"{path}:6" in sentence
    assert "data.max_document_bytes (4,096)" in sentence
    assert "raise data.max_document_bytes" in sentence
    dataset = make(data_config(tmp_path / "out", source))
    assert dataset.manifest["sources"][0]["documents"] == 6


def test_line_of_exactly_the_limit_is_taken(tmp_path: Path) -> None:
    for ending in ("\n", "\r\n", ""):
        path = tmp_path / "a.jsonl"
        line = json.dumps({"text": "y" * 100})
        path.write_bytes((line + ending).encode())
        out = tmp_path / f"out{len(ending)}"
        make(
            data_config(
                out,
                {"kind": "jsonl", "path": str(path)},
                max_document_bytes=len(line),
                validation_fraction=0.0,
            )
        )


def test_a_huge_line_is_never_held(tmp_path: Path) -> None:
    """A sparse file of 3 GB without one line feed is refused in 300 MB of address space."""
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n')
        file.truncate(3 << 30)
    config = data_config(tmp_path / "out", {"kind": "jsonl", "path": str(path)}, processes=1)
    code = (
        "import resource, sys\n"
        "from xxhash import xxh3_128\n"
        "from holdfast.data.read.sources import plan_source, read_unit\n"
        "from holdfast.config.sections.data import DataConfig\n"
        "config = DataConfig.model_validate_json(sys.argv[1])\n"
        "units = plan_source(config.sources[0], 0, 0).units\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (300 << 20, 300 << 20))\n"
        "for unit in (units[-1], units[0]):\n"  # the last skips a line that others own
        "    for text in read_unit(unit, 1 << 24, xxh3_128()): print(text)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, config.model_dump_json()], capture_output=True, text=True
    )
    assert done.stdout == "a\n"
    assert (
        f"{path}:2, column 'text': the line is longer than data.max_document_bytes" in done.stderr
    )


def test_text_file_too_long(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("0123456\n" * 100)
    sentence = refused(tmp_path, text_source(path), max_document_bytes=100)
    assert f"{path}:13" in sentence


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": 3}', "no text in the field 'text' (it has ['text'])"),
        ('{"body": "b"}', "no text in the field 'text' (it has ['body'])"),
        ('["text"]', "it is not an object"),
        ('{"text": "b"', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_jsonl_lines(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "first"}\n\n' + line + "\n")
    sentence = refused(tmp_path, {"kind": "jsonl", "path": str(path)})
    assert f"{path}:3" in sentence
    assert says in sentence


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"body": ["a"], "n": [1]}), path)
    sentence = refused(tmp_path, {"kind": "parquet", "path": str(path)})
    assert "no column 'text', only ['body', 'n']" in sentence
    sentence = refused(tmp_path, {"kind": "parquet", "path": str(path), "field": "n"})
    assert "holds int, not text" in sentence
    long = pa.table({"text": ["b" * 50, "a" * 500]})
    parquet.write_table(long, path)
    sentence = refused(tmp_path, {"kind": "parquet", "path": str(path)}, max_document_bytes=100)
    assert "row 1" in sentence


def test_parquet_without_its_extra(tmp_path: Path) -> None:
    """In an interpreter that cannot import pyarrow."""
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from holdfast.data.read.columnar_sources import parquet_ranges\n"
        "parquet_ranges(['a.parquet'], ['text'], 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'holdfast[data]'" in done.stderr


def test_paths(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path, text_source(tmp_path / "nowhere"))
    assert "holds no file" in refused(tmp_path, text_source(tmp_path / "*.txt"))
    source = text_source(text_folder(tmp_path / "in", 1, 20))
    with pytest.raises(DataError, match="two sources are named 'text'"):
        make(data_config(tmp_path / "out", source, source))


def test_tokenizer_that_does_not_match_the_dataset(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=4, words=60)
    config = data_config(tmp_path / "out", text_source(folder))
    dataset = make(config)
    before = tree(dataset.folder)
    other = make(
        data_config(
            tmp_path / "other",
            text_source(folder),
            tokenizer={"vocab_size": 280, "sample_bytes": 20_000},
        )
    )

    def with_tokenizer(path: Path) -> Any:
        return data_config(tmp_path / "out", text_source(folder), tokenizer={"path": str(path)})

    with pytest.raises(DataError, match=r"does not match the dataset.*300 tokens|280 tokens"):
        make(with_tokenizer(other.tokenizer_path))
    swapped = json.loads(dataset.tokenizer_path.read_text())
    vocab = swapped["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "swapped.json").write_text(json.dumps(swapped))
    with pytest.raises(DataError, match="2 tokens have another id"):
        make(with_tokenizer(tmp_path / "swapped.json"))
    # The dataset's own, spelt otherwise, is the same tokenizer.
    (tmp_path / "same.json").write_text(json.dumps(json.loads(dataset.tokenizer_path.read_text())))
    assert make(with_tokenizer(tmp_path / "same.json")).version == dataset.version
    assert tree(dataset.folder) == before


def test_tokenizers_that_will_not_do(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=2, words=20)
    path = tmp_path / "t.json"
    source = text_source(folder)
    assert "does not exist" in refused(tmp_path, source, tokenizer={"path": str(path)})
    path.write_text("{}")
    assert "is not a tokenizer.json" in refused(tmp_path, source, tokenizer={"path": str(path)})
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(path))
    assert "no end-of-text token" in refused(tmp_path, source, tokenizer={"path": str(path)})


def test_a_folder_that_holds_another_dataset(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=4, words=60)
    dataset = make(data_config(tmp_path / "out", text_source(folder)))
    before = tree(dataset.folder)
    for change in (
        {"validation_fraction": 0.5},
        {"tokenizer": {"vocab_size": 290, "sample_bytes": 20_000}},
    ):
        with pytest.raises(DataError, match=f"another data.{next(iter(change))}"):
            make(data_config(tmp_path / "out", text_source(folder), **change))
    with pytest.raises(DataError, match=r"another data\.sources"):
        make(data_config(tmp_path / "out", text_source(folder / "000.txt")))
    assert tree(dataset.folder) == before


def test_a_folder_that_someone_else_prepares(tmp_path: Path) -> None:
    source = text_source(text_folder(tmp_path / "in", files=2, words=20))
    (tmp_path / "out" / ".prepare").mkdir(parents=True)
    with (tmp_path / "out" / ".prepare" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is preparing" in refused(tmp_path, source)
    make(data_config(tmp_path / "out", source))


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    source = text_source(text_folder(tmp_path / "in", files=2, words=20))
    with pytest.raises(DataError, match="is a file, not a folder"):
        make(data_config(tmp_path / "out", source))
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, OutOfSpaceError), (errno.EDQUOT, OutOfSpaceError), (errno.EROFS, DataError)],
)
def test_errors_of_the_system_become_sentences(code: int, kind: type[UserError]) -> None:
    with pytest.raises(kind), explain_os_errors(Path("somewhere")):
        raise OSError(code, "x")
