"""The sizes that `holdfast init` writes fit the data that it is given."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from holdfast.cli.first_sizes import BATCH, STEPS, FirstSizes, first_sizes
from holdfast.cli.init import describe_source, rows_word
from holdfast.config.sections.data import SourceConfig


def _sizes(path: Path, length: int, *, is_rows: bool) -> FirstSizes:
    kind = "jsonl" if is_rows else "text"
    return first_sizes(SourceConfig(kind=kind, path=str(path)), length, is_rows=is_rows)


def _rows(path: Path, number: int, reply: str, *, as_list: bool = False) -> Path:
    message = {"role": "assistant", "content": reply}
    rows = [{"messages": [{"role": "user", "content": str(n)}, message]} for n in range(number)]
    text = json.dumps(rows, indent=1) if as_list else "\n".join(map(json.dumps, rows))
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("number", [36, 300, 2_000])
def test_a_pass_over_few_rows_has_several_steps(number: int, as_list: bool, tmp_path: Path) -> None:
    rows = _rows(tmp_path / "rows.json", number, "blue " * 60, as_list=as_list)
    sizes = _sizes(rows, 2048, is_rows=True)
    assert sizes.pass_steps >= STEPS // 2
    assert sizes.batch % sizes.microbatch == 0
    assert (sizes.warmup(is_rows=True) or 0) <= sizes.pass_steps
    assert sizes.note
    assert sizes.length >= 300 + 128, "the longest row and its template fit"


def test_long_rows_keep_their_length_and_one_row_is_a_step(tmp_path: Path) -> None:
    sizes = _sizes(_rows(tmp_path / "a.jsonl", 12, "blue " * 1_000), 2048, is_rows=True)
    assert (sizes.length, sizes.batch) == (2048, 1)
    assert _sizes(_rows(tmp_path / "b.jsonl", 1, "blue"), 2048, is_rows=True).pass_steps == 1


def test_much_data_and_what_cannot_be_counted_keep_the_usual_sizes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * 5_000_000)
    assert _sizes(path, 2048, is_rows=True) == FirstSizes(2048)
    much = _rows(tmp_path / "much.jsonl", 9_000, "blue " * 100)
    assert _sizes(much, 2048, is_rows=True) == FirstSizes(2048)


def test_few_texts_are_read_a_number_of_times(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("river " * 2_000)
    sizes = _sizes(tmp_path, 256, is_rows=False)
    assert (sizes.length, sizes.epochs > 0) == (256, True)
    assert sizes.batch < BATCH
    assert (sizes.warmup(is_rows=False) or 20) <= sizes.epochs * sizes.pass_steps
    (tmp_path / "b.txt").write_text("river " * 200_000)
    assert _sizes(tmp_path, 256, is_rows=False).epochs == 0
    assert _sizes(tmp_path, 256, is_rows=False).warmup(is_rows=False) is None


@pytest.mark.parametrize("name", ["rows.JSON", "rows.jsonl.gz", "folder", "rows.parquet"])
def test_rows_are_known_in_each_file_that_a_source_reads(name: str, tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": "gpt", "value": f"Say {n}."}]} for n in range(9)]
    lines = "\n".join(map(json.dumps, rows)).encode()
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        (path / "README.md").write_text("what it is")
        (path / "part 1.jsonl").write_bytes(lines)
    elif name.endswith(".parquet"):
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), path)
    else:
        whole = json.dumps(rows, indent=1).encode()
        path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else whole)
    kind = "parquet" if name.endswith(".parquet") else "jsonl"
    assert describe_source(path, is_chat=True)["kind"] == kind
    assert rows_word(path) == "sharegpt"
