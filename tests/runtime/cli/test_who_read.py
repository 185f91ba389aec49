"""`holdfast data who-read`: the steps that read a document, from the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.data.stream.document_reads import document_hash
from holdfast.launch.run.runs import open_run
from tests.runtime.cli.conftest import Trained
from tests.runtime.data.test_stages import lines_file, removed
from tests.support.commands import within
from tests.support.corpus import data_config, make


def steps_by_text(trained: Trained) -> dict[str, list[int]]:
    """Text of each training document -> the steps with a sample that has any of its tokens. Each
    position and each document is looked at by itself."""
    run = open_run(trained.folder)
    dataset = open_dataset(run.dataset_location, run.config.data)
    batches = Batches(dataset, run.config.data, run.config.train, run.config.seed)
    tokenizer = Tokenizer.from_file(str(dataset.tokenizer_path))
    stream, length = dataset.streams("train")[0], batches.sequence_length
    tokens = stream.read(0, stream.tokens)
    ends = np.flatnonzero(tokens == dataset.end) + 1
    found = {}
    for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        steps = set()
        for step in range(1, run.config.train.steps + 1):
            first, last = batches.schedule.position(step), batches.schedule.position(step + 1)
            for position in range(first, last):
                begin = batches.order.place(position).sample * length
                if begin < stop and start < begin + length + 1:
                    steps.add(step)
        found[tokenizer.decode(tokens[start : stop - 1].tolist())] = sorted(steps)
    return found


def test_the_steps_are_those_whose_samples_have_its_tokens(
    trained: Trained, tmp_path: Path
) -> None:
    expected = steps_by_text(trained)
    assert len(expected) > 5
    for number, (text, steps) in enumerate(expected.items()):
        path = tmp_path / f"{number}.txt"
        path.write_text(text)
        done = within("data", "who-read", path, trained.folder, "--json")
        assert done.code == (0 if steps else 1)
        found = json.loads(done.out)
        assert found["document"] == document_hash(text)
        reads = found["runs"][str(trained.folder)]
        assert reads["steps"] == steps
        assert reads["lost_steps"] == []
    assert any(expected.values())


def test_a_document_of_no_dataset_and_a_missing_file(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("nothing that was ever read")
    done = within("data", "who-read", path, trained.folder)
    assert done.code == 1
    assert "the document is not in the dataset" in done.out
    within("data", "who-read", tmp_path / "none.txt", trained.folder).refuses("none.txt")


def test_a_document_is_removed_by_its_hash(tmp_path: Path) -> None:
    """A new version lacks it, also if another stage changes it. A hash of nothing is named."""
    texts = [f"Note {number} is from anna{number}@mail.test.de." for number in range(12)]
    source = lines_file(tmp_path / "notes.jsonl", texts)
    before = make(data_config(tmp_path / "a", source))
    name = document_hash(texts[3])
    named = {"kind": "remove", "documents": [name, "f" * 32]}
    stages: list[dict[str, Any]] = [{"kind": "personal_data"}, named]
    said: list[str] = []
    after = prepare_dataset(data_config(tmp_path / "b", source, stages=stages), say=said.append)
    assert any("names 2 documents, and met 1" in line for line in said)
    assert before.version != after.version
    assert [line["document"] for line in removed(after)] == [name]
    total = [sum(d.counts(split)["documents"] for split in d.splits) for d in (before, after)]
    assert total == [12, 11]
