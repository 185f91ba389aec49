"""`data.deduplicate`: which repeated documents stay, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.verify import find_problems
from holdfast.errors import DataError
from tests.support.corpus import data_config, make, text_folder, text_source


def config(tmp_path: Path, scope: object, out: str) -> DataConfig:
    """Source a has 4 documents and one of them again; b has 2 of a's and 2 of its own."""
    if not (tmp_path / "a").exists():
        a = text_folder(tmp_path / "a", files=4, words=30, seed=1)
        (a / "again.txt").write_text((a / "000.txt").read_text())
        b = text_folder(tmp_path / "b", files=2, words=30, seed=2)
        for name in ("000", "001"):
            (b / f"of-a-{name}.txt").write_text((a / f"{name}.txt").read_text())
    return data_config(
        tmp_path / out,
        text_source(tmp_path / "a", "a"),
        text_source(tmp_path / "b", "b"),
        deduplicate=scope,
        validation_fraction=0.0,
    )


def prepared(given: DataConfig) -> tuple[Dataset, list[str]]:
    said: list[str] = []
    return prepare_dataset(given, said.append), said


def kept(dataset: Dataset) -> list[int]:
    return [stream.documents for stream in dataset.streams("train")]


def test_scopes_and_what_they_say(tmp_path: Path) -> None:
    dataset, said = prepared(config(tmp_path, True, "all"))
    assert kept(dataset) == [4, 2]
    why = "data.deduplicate: true"
    assert f"a: 4 documents (left out: 1 repeat an earlier document; {why})" in said
    assert f"b: 2 documents (left out: 2 repeat a document of an earlier source; {why})" in said
    within, said = prepared(config(tmp_path, "within_source", "within"))
    assert kept(within) == [4, 4]
    assert "b: 4 documents" in said
    none, said = prepared(config(tmp_path, False, "none"))
    assert kept(none) == [5, 4]
    assert "a: 5 documents" in said
    assert len({dataset.version, within.version, none.version}) == 3
    assert [find_problems(d.folder) for d in (dataset, within, none)] == [[], [], []]


def test_a_dataset_of_another_scope_is_refused(tmp_path: Path) -> None:
    make(config(tmp_path, True, "set"))
    with pytest.raises(DataError, match=r"another data\.deduplicate \(true, not false\)"):
        make(config(tmp_path, False, "set"))


def test_a_source_that_only_repeats_names_the_cause_and_the_key(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "in", files=2, words=30)
    given = data_config(tmp_path / "out", text_source(folder, "a"), text_source(folder, "b"))
    with pytest.raises(DataError) as caught:
        make(given)
    sentence = str(caught.value)
    assert "source 'b': nothing is left of 2 documents" in sentence
    assert "2 repeat a document of an earlier source" in sentence
    assert "set data.deduplicate: within_source" in sentence
