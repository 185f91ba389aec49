"""What preparing yields, and that neither processes nor interruptions change a byte of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from holdfast.config.sections.data import DataConfig
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stages import task_pool
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.verify import find_problems
from holdfast.errors import HoldfastError
from tests.support.corpus import data_config, jsonl_file, make, text, text_folder, text_source, tree
from tests.support.marks import in_campaign
from tests.support.processes import children_of

ROOT = Path(__file__).parents[3]


def documents(dataset: Dataset, split: str, source: int = 0) -> list[str]:
    """The texts of one stream, decoded document by document."""
    stream = dataset.streams(split)[source]
    tokens = stream.read(0, stream.tokens)
    tokenizer = Tokenizer.from_file(str(dataset.tokenizer_path))
    ends = np.flatnonzero(tokens == dataset.end)
    pieces = np.split(tokens, ends + 1)[:-1]
    assert all(piece[-1] == dataset.end for piece in pieces)
    return [tokenizer.decode(piece[:-1].tolist()) for piece in pieces]


def test_every_document_comes_back_in_order(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=10, words=80)
    dataset = make(data_config(tmp_path / "out", text_source(folder)))
    train, validation = documents(dataset, "train"), documents(dataset, "validation")
    written = [path.read_text() for path in sorted(folder.iterdir())]
    assert sorted(train + validation) == sorted(written)
    assert train == [t for t in written if t in train]
    assert validation
    counts = dataset.counts("train")
    assert counts["documents"] == len(train)
    assert counts["bytes"] == sum(len(t.encode()) for t in train)
    assert find_problems(dataset.folder) == []
    assert not (dataset.folder / ".prepare").exists()


def test_shards_hold_whole_documents_of_about_the_asked_size(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=20, words=150)
    dataset = make(data_config(tmp_path / "out", text_source(folder), shard_tokens=1024))
    shards = dataset.streams("train")[0].shards
    assert len(shards) > 2
    for shard in shards:
        starts = np.fromfile(dataset.folder / shard.index_path, dtype="<u8")
        tokens = np.fromfile(dataset.folder / shard.path, dtype="<u2")
        assert len(starts) == shard.documents + 1
        assert (tokens[starts[1:] - 1] == dataset.end).all()
        assert shard is shards[-1] or (starts[-2] < 1024 <= starts[-1] == len(tokens))


def test_duplicates_and_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=4, words=40)
    first = (folder / "000.txt").read_text()
    (folder / "copy.txt").write_bytes(b"\xef\xbb\xbf" + first.replace("\n", "\r\n").encode())
    (folder / "padded.txt").write_text("\n\n" + first + "  \n")
    (folder / "empty.txt").touch()
    (folder / "blank.txt").write_text(" \n\t\n")
    said: list[str] = []
    config = data_config(tmp_path / "out", text_source(folder), validation_fraction=0.0)
    dataset = prepare_dataset(config, say=said.append)
    lineage = dataset.manifest["sources"][0]
    assert (lineage["documents"], lineage["empty"], lineage["duplicates"]) == (8, 2, 2)
    assert documents(dataset, "train")[0] == first
    assert dataset.splits == ("train",)
    assert dataset.baselines is None
    assert any("2 empty, 2 repeat an earlier document" in line for line in said)


def test_text_that_spells_the_end_token_ends_nothing(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=3, words=40)
    (folder / "sly.txt").write_text("before <|end|> after\n" * 3)
    dataset = make(data_config(tmp_path / "out", text_source(folder), validation_fraction=0.0))
    assert len(documents(dataset, "train")) == 4
    assert any("before <|end|> after" in d for d in documents(dataset, "train"))


def test_split_goes_by_hash_and_survives_growth(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=30, words=20)
    before = make(data_config(tmp_path / "out", text_source(folder)))
    for i in range(30, 45):
        (folder / f"{i:03d}.txt").write_text(text(i, 20))
    after = make(data_config(tmp_path / "grown", text_source(folder)))
    assert set(documents(before, "validation")) <= set(documents(after, "validation"))
    assert 1 <= before.counts("validation")["documents"] <= 15


def test_a_tiny_corpus_has_both_splits(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=2, words=60)
    for fraction in (1e-9, 0.999999):
        out = tmp_path / f"out{fraction}"
        dataset = make(data_config(out, text_source(folder), validation_fraction=fraction))
        assert dataset.counts("train")["documents"] == 1
        assert dataset.counts("validation")["documents"] == 1


def mixed(tmp_path: Path, out: str, processes: int) -> DataConfig:
    """Three kinds of source in some ten units; made once per test."""
    import pyarrow as pa
    from pyarrow import parquet

    if not (tmp_path / "rows.parquet").exists():
        for i in range(4):
            text_folder(tmp_path / f"text{i}", files=6, words=700, seed=i)
        jsonl_file(tmp_path / "lines.jsonl", lines=700, words=560, seed=5)
        rows = [text(9000 + i, 50 + i) for i in range(40)] + [None, ""]
        table = pa.table({"body": rows, "other": list(range(42))})
        parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=10)
    return data_config(
        tmp_path / out,
        *(text_source(tmp_path / f"text{i}", f"t{i}") for i in range(4)),
        {"kind": "jsonl", "path": str(tmp_path / "*.jsonl"), "field": "body"},
        {"kind": "parquet", "path": str(tmp_path / "rows.parquet"), "field": "body"},
        processes=processes,
        shard_tokens=50_000,
    )


def test_the_number_of_processes_changes_no_byte(tmp_path: Path) -> None:
    trees = []
    for processes in (1, 3):
        config = mixed(tmp_path, f"out{processes}", processes)
        dataset = make(config)
        trees.append(tree(dataset.folder))
    assert trees[0] == trees[1]
    assert (tmp_path / "lines.jsonl").stat().st_size > 1 << 20  # so that it was cut into ranges
    lines = [json.loads(line)["body"] for line in (tmp_path / "lines.jsonl").open()]
    found = documents(dataset, "train", 4) + documents(dataset, "validation", 4)
    assert sorted(found) == sorted(set(lines))


CHILD = """
import sys
from holdfast.config.sections.data import DataConfig
from holdfast.data.prepare.prepare import prepare_dataset as prepare
stop, at = sys.argv[2], int(sys.argv[3])
def halt(what, done):
    if what == stop and done >= at:
        print("here", flush=True)
        sys.stdin.read()  # until the kill
prepare(
    DataConfig.model_validate_json(sys.argv[1]),
    say=lambda text: halt(text, 0),
    progress=lambda what, done, total: halt(what, done),
)
"""


@pytest.mark.parametrize(
    ("stop", "at", "again"),
    [
        in_campaign("reading", 2, "reading: "),
        ("tokenising", 4, "tokenising: "),
        in_campaign("writing shards", 0, None),
    ],
)
def test_killed_half_way_it_goes_on_to_the_same_bytes(
    tmp_path: Path, stop: str, at: int, again: str | None
) -> None:
    config = mixed(tmp_path, "out", processes=2)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, config.model_dump_json(), stop, str(at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "here\n"
    helpers = psutil.Process(child.pid).children()
    assert helpers or stop == "writing shards"
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdin.close()
    child.stdout.close()
    _, alive = psutil.wait_procs(helpers, timeout=120)
    assert not alive, "a preparing process outlived its parent"
    assert not (tmp_path / "out" / "manifest.json").exists()

    said: list[str] = []
    prepare_dataset(config, say=said.append)
    if again is not None:
        assert any(line.startswith(again) and "were done before" in line for line in said), said
    elsewhere = make(mixed(tmp_path, "whole", processes=1))
    assert tree(tmp_path / "out") == tree(elsewhere.folder)


def test_a_preparing_process_that_dies_is_named_and_costs_its_unit_only(tmp_path: Path) -> None:
    config = mixed(tmp_path, "out", processes=2)

    def kill(what: str, done: int, total: int) -> None:
        if (what, done) == ("tokenising", 2):
            for child in children_of(os.getpid(), "holdfast.data.stages.task_pool"):
                child.kill()

    with pytest.raises(HoldfastError, match="a preparing process ended with -9"):
        prepare_dataset(config, say=lambda _: None, progress=kill)
    said: list[str] = []
    assert find_problems(prepare_dataset(config, say=said.append).folder) == []
    assert any("were done before" in line for line in said)


def stop_at(config: DataConfig, stage: str) -> None:
    """Prepare up to a stage, of which nothing is done."""

    def stop(what: str, *_: int) -> None:
        if what == stage:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        prepare_dataset(config, say=stop, progress=stop)


def test_changed_sources_start_over(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=3, words=40)
    config = data_config(tmp_path / "out", text_source(folder), validation_fraction=0.0)

    stop_at(config, "tokenising")
    (folder / "000.txt").write_text("something else\n")
    said: list[str] = []
    dataset = prepare_dataset(config, say=said.append)
    assert any("starting over" in line for line in said)
    assert "something else\n" in documents(dataset, "train")


def test_a_torn_result_of_a_unit_is_made_again(tmp_path: Path) -> None:
    """What a power loss can do: the name is there, the bytes are not."""
    folder = text_folder(tmp_path / "in", files=3, words=40)
    config = data_config(tmp_path / "out", text_source(folder))

    stop_at(config, "writing shards")
    for result in (tmp_path / "out" / ".prepare").glob("*/00000000"):
        if result.parent.name != "lots":
            result.write_bytes(result.read_bytes()[:-3])
    torn = make(config)
    whole = make(data_config(tmp_path / "whole", text_source(folder)))
    assert torn.version == whole.version


def test_the_standard_library_is_a_source(tmp_path: Path) -> None:
    """Found, hashed and free of tests; only its plan is looked at (11 MB would be slow here)."""
    from holdfast.config.sections.data import SourceConfig
    from holdfast.data.read.sources import plan_source

    plan = plan_source(SourceConfig(), 0, 0)
    paths = [path for unit in plan.units for path, _, _ in unit.parts]
    assert plan.files == len(paths) > 300
    assert plan.bytes > 5_000_000
    assert any(path.endswith("argparse.py") for path in paths)
    skipped = ("/test/", "/tests/", "/idlelib/", "site-packages", "/lib2to3/", "/ensurepip/")
    assert not [path for path in paths if any(part in path for part in skipped)]


def test_any_tokenizer_and_wide_tokens(tmp_path: Path) -> None:
    """A given tokenizer.json is copied byte for byte; above 65,536 ids tokens take four bytes."""
    folder = text_folder(tmp_path / "in", files=4, words=60)
    small = make(data_config(tmp_path / "small", text_source(folder)))
    spec = json.loads(small.tokenizer_path.read_text())
    known = len(spec["model"]["vocab"])
    spec["model"]["vocab"] |= {f"filler{i}": known + i for i in range(70_000)}
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    wide_path = tmp_path / "wide.json"
    wide_path.write_text(json.dumps(spec))
    config = data_config(tmp_path / "wide", text_source(folder), tokenizer={"path": str(wide_path)})
    wide = make(config)
    assert wide.tokenizer_path.read_bytes() == wide_path.read_bytes()
    assert wide.vocab_size == known + 70_000
    a, b = (d.streams("train")[0] for d in (small, wide))
    assert b.read(0, 5).dtype == np.dtype("<u4")
    assert np.array_equal(a.read(0, a.tokens), b.read(0, b.tokens))


def test_how_a_source_is_cut_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a unit is our business: no part of a dataset may depend on it."""
    trees = []
    for size in (1 << 14, 1 << 30):
        monkeypatch.setattr("holdfast.data.read.sources.UNIT_BYTES", size)
        trees.append(tree(make(mixed(tmp_path, f"out{size}", processes=1)).folder))
    assert trees[0] == trees[1]


def test_prepared_twice_is_opened_and_the_version_is_the_content_s(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=4, words=60)
    config = data_config(tmp_path / "out", text_source(folder))
    first = make(config)
    before = tree(first.folder)
    assert make(config).version == first.version
    assert tree(first.folder) == before
    other = make(data_config(tmp_path / "other", text_source(folder)))
    assert other.version == first.version


def test_sources_that_changed_since_are_told_and_change_nothing(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=3, words=60)
    config = data_config(tmp_path / "out", text_source(folder))
    version = make(config).version
    said: list[str] = []
    assert prepare_dataset(config, said.append).version == version
    assert said == []
    path = folder / "000.txt"
    text = path.read_text()
    path.write_text(text)  # touched, and the same
    assert prepare_dataset(config, said.append).version == version
    assert said == []
    path.write_text(text.replace(" ", "-", 1))  # as many bytes
    prepare_dataset(config, said.append)
    assert f"have changed (text: {path} was written since)" in said.pop()
    path.write_text(text)
    (folder / "more.txt").write_text("another text")
    assert prepare_dataset(config, said.append).version == version
    (line,) = said
    assert "its sources have changed (text: 3 files of" in line
    assert "name another data.folder to read them anew" in line
    shutil.rmtree(folder)  # a dataset stands for itself
    assert prepare_dataset(config, said.append).version == version
    assert len(said) == 1


def test_prepare_does_without_an_affinity_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has none."""
    monkeypatch.delattr(os, "sched_getaffinity")
    config = mixed(tmp_path, "out", processes=0)
    assert make(config).counts("train")["documents"] > 0


# --- preparing processes that are gone ------------------------------------------------------------
def test_a_task_that_cannot_be_handed_over_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started_and_killed() -> object:
        process = start()
        process.kill()
        process.wait()
        return process

    start = task_pool._start
    monkeypatch.setattr(task_pool, "_start", started_and_killed)
    task = {"kind": "inspect", "path": str(tmp_path / "none")}
    with (
        pytest.raises(HoldfastError, match="a preparing process ended with -9"),
        task_pool.TaskPool(1) as processes,
    ):
        processes.run([task], lambda task: None)
