"""`data.curriculum`: documents in the order of a number, for any number of workers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from holdfast.config.sections.data import DataConfig
from holdfast.core.sharding.reduction_tree import deal
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.coverage import describe_use
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.data.stream.document_reads import find_document, find_reads
from holdfast.errors import DataError
from holdfast.events import BatchFed, Record
from tests.runtime.data.test_mixture import three_chats
from tests.runtime.data.test_stages import lines_file
from tests.support.corpus import batches, data_config, make, text, train_config

LENGTHS = [3 + 37 * i % 61 for i in range(60)]
BATCH = {"batch_size": 12, "microbatch_size": 1}


def corpus(root: Path, **more: Any) -> DataConfig:
    (root / "grade.py").write_text(
        "def vowels(text):\n    return sum(c in 'aeiou' for c in text) / len(text)\n"
        "def nothing(text):\n    return float('nan')\n"
    )
    source = lines_file(root / "docs.jsonl", [text(i, words) for i, words in enumerate(LENGTHS)])
    return data_config(root / "out", source, shard_tokens=1024, **more)


def documents_of(dataset: Dataset) -> list[list[int]]:
    stream = dataset.streams("train")[0]
    edges = stream.document_starts().tolist()
    return [stream.read(a, b).tolist() for a, b in pairwise(edges)]


def first_pass(made: Batches) -> list[int]:
    """The tokens that the first pass reads, window after window."""
    size = made.order.sizes[0]
    read = made.read_samples(0, size)
    return [int(token) for row in read.inputs for token in row]


@pytest.mark.parametrize("descending", [False, True])
def test_the_first_pass_reads_documents_by_length(tmp_path: Path, descending: bool) -> None:
    config = corpus(tmp_path, curriculum={"by": "length", "descending": descending})
    dataset = make(config)
    expected = sorted(documents_of(dataset), key=lambda ids: -len(ids) if descending else len(ids))
    tokens = [token for ids in expected for token in ids]
    read = first_pass(batches(dataset, config, **BATCH))
    assert read[: len(tokens) - 1] == tokens[:-1]
    assert dataset.version == make(corpus(tmp_path)).version, "the dataset is the same"


SCORES = {
    "function": lambda root: {"function": f"{root}/grade.py:vowels"},
    "perplexity": lambda root: {"texts": [{"path": f"{root}/good.txt"}], "order": 2},
}


@pytest.mark.parametrize("kind", SCORES)
def test_the_first_pass_reads_documents_by_a_score(tmp_path: Path, kind: str) -> None:
    (tmp_path / "good.txt").write_text(text(999, 400))
    stages = [{"kind": "length", "min_words": 5}, {"kind": "score", **SCORES[kind](tmp_path)}]
    config = corpus(tmp_path, stages=stages, curriculum={"by": "score"})
    dataset = make(config)
    assert dataset.manifest["format"] == 6
    values = dataset.streams("train")[0].document_values()
    assert values is not None
    documents = documents_of(dataset)
    assert len(set(values.tolist())) > 20
    if kind == "function":
        decode = Tokenizer.from_file(str(dataset.tokenizer_path)).decode
        texts = [decode(ids[:-1]) for ids in documents]
        own = [sum(c in "aeiou" for c in t) / len(t) for t in texts]
        assert values.tolist() == pytest.approx(own, rel=1e-6)
    order = np.argsort(values, kind="stable").tolist()
    tokens = [token for i in order for token in documents[i]]
    assert first_pass(batches(dataset, config, **BATCH))[: len(tokens) - 1] == tokens[:-1]


def test_8_3_5_and_7_workers_read_the_same_and_each_sample_once_a_pass(tmp_path: Path) -> None:
    config = corpus(tmp_path, curriculum={"by": "length", "window": 5, "passes": 1})
    dataset = make(config)
    reference = batches(dataset, config, **BATCH)
    size = reference.order.sizes[0]
    steps = 2 * size // 12
    found = []
    for step in range(1, steps + 1):
        workers = (8, 3, 5, 7)[step % 4]
        for worker in range(workers):
            for index in deal(12, workers)[worker]:
                (entry,) = reference.microbatch(step, index).entries
                found.append((entry["start"], entry["hash"]))
    assert sorted(found) == [(at, reference.hash_of(at, at + 1)) for at in range(12 * steps)]
    _, epoch, sample = reference.order.places(0, 2 * size)
    for number in (0, 1):
        assert sorted(sample[epoch == number].tolist()) == list(range(size))
    first, second = sample[:size], sample[size:]
    assert (first // 5 == np.arange(size) // 5).all(), "shuffled within five only"
    assert (first != np.arange(size)).any()
    assert (second // 5 != np.arange(size) // 5).mean() > 0.5, "the second pass is shuffled"


def test_packed_rows_come_by_their_mean_length(tmp_path: Path) -> None:
    config = three_chats(tmp_path, mix=(), curriculum={"by": "length"})
    made = batches(make(config), config, **BATCH)
    for rows in filter(None, made.packed):
        means = [rows.sample(i).lengths.mean() for i in range(rows.count)]
        assert means == sorted(means)
        assert len(set(means)) > 3


def test_the_ledger_names_the_steps_that_read_a_document(tmp_path: Path) -> None:
    config = corpus(tmp_path, curriculum={"by": "length", "window": 2})
    dataset = make(config)
    made = batches(dataset, config, **BATCH)
    steps = made.order.sizes[0] // 12
    records = []
    for step in range(1, steps + 1):
        entries = [entry for i in range(12) for entry in made.microbatch(step, i).entries]
        records.append(Record(1, "w", step, 0.0, BatchFed(step=step, rank=0, entries=entries)))
    ordered = sorted(documents_of(dataset), key=len)
    starts = np.cumsum([0, *map(len, ordered)]).tolist()
    checked = 0
    for number, words in list(enumerate(LENGTHS))[::6]:
        places = find_document(dataset, text(number, words))
        if places[0].split != "train":
            continue
        ids = dataset.streams("train")[0].read(places[0].start, places[0].stop).tolist()
        at = starts[ordered.index(ids)]
        expected = [
            step
            for step in range(1, steps + 1)
            if any(
                16 * k < at + len(ids) and at < 16 * k + 17
                for k in made.order.places(12 * step - 12, 12 * step)[2].tolist()
            )
        ]
        assert list(find_reads(records, made, places).steps) == expected
        checked += 1
    assert checked > 5


def test_the_files_of_a_step_are_those_that_it_reads(tmp_path: Path) -> None:
    config = corpus(tmp_path, curriculum={"by": "length"})
    local = make(config)
    there = f"file://{config.folder}"
    for step in (1, 5, 9):
        cache = tmp_path / f"cache{step}"
        remote = config.model_copy(update={"folder": there, "cache": str(cache)})
        made = batches(open_dataset(there, remote), remote, **BATCH)
        wanted = {Path(file.path).name for file in made.files_of(step)}
        made._prefetch = None
        entries = [made.microbatch(step, i).entries for i in range(12)]
        assert entries == [
            batches(local, config, **BATCH).microbatch(step, i).entries for i in range(12)
        ]
        assert {path.name for path in cache.glob("*/shards/*.bin")} == wanted
        assert 0 < len(wanted) < len(local.shards())


def test_what_never_comes_is_said(tmp_path: Path) -> None:
    config = corpus(tmp_path, curriculum={"by": "length"})
    said = describe_use(make(config), config, train_config(12, 1, steps=4))
    assert any("documents by length, the shortest first, in the first pass" in s for s in said)
    assert any("and never the rest" in line for line in said)


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"curriculum": {"by": "score"}}, r"curriculum\.by score needs a stage"),
        ({"curriculum": {"window": 3}}, "window has no effect"),
        ({"stages": [{"kind": "score"}]}, "kind score has one source"),
        ({"stages": [{"kind": "score", "function": "a.py"}]}, "no file and name"),
        ({"stages": [{"kind": "score", "function": "a.py:b"}] * 2}, "2 of kind score"),
    ],
)
def test_a_curriculum_that_means_nothing_is_refused(
    tmp_path: Path, more: dict[str, Any], place: str
) -> None:
    with pytest.raises(ValueError, match=place):
        corpus(tmp_path, **more)


def test_a_score_that_is_no_number_and_a_dataset_without_scores_are_refused(tmp_path: Path) -> None:
    bad = [{"kind": "score", "function": f"{tmp_path}/grade.py:nothing"}]
    with pytest.raises(DataError, match=r"returned nan for the document [0-9a-f]{32}"):
        make(corpus(tmp_path, stages=bad))
    good = [{"kind": "score", "function": f"{tmp_path}/grade.py:vowels"}]
    plain = make(corpus(tmp_path))
    config = corpus(tmp_path, stages=good, curriculum={"by": "score"})
    with pytest.raises(DataError, match="has no scores"):
        batches(plain, config, **BATCH)
