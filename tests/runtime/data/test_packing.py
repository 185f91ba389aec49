"""Rows of chat data in samples: each once, complete, and apart. Long ones are counted."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.sections.data import DataConfig
from holdfast.data.order.packing import pack
from holdfast.data.stream.batch import MASKED_TARGET
from holdfast.data.stream.coverage import describe_long_rows, describe_use
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.data.stream.inspect import render_sample
from holdfast.data.stream.verify import find_problems
from holdfast.errors import DataError
from tests.support.chat import message_rows, tokenizer_folder, write_rows
from tests.support.corpus import batches, data_config, make, text_folder, text_source, train_config


@given(st.lists(st.integers(1, 40), min_size=1, max_size=300), st.integers(40, 60))
@settings(max_examples=200, deadline=None)
def test_no_bin_is_too_full_and_none_could_be_spared(lengths: list[int], room: int) -> None:
    bins = pack(np.array(lengths), room)
    filled = np.bincount(bins, np.array(lengths))
    assert filled.max() <= room
    assert filled.min() > 0
    # Best-fit decreasing needs at most 11/9 of the best possible, and one (Johnson, 1973).
    assert len(filled) <= 11 / 9 * -(-sum(lengths) // room) * 2 + 1
    rest = np.sort(filled)
    assert len(rest) < 2 or rest[0] + rest[1] > room, "two bins could be one"


def test_a_million_rows_are_packed_at_once() -> None:
    lengths = np.random.default_rng(1).integers(2, 2049, 1_000_000)
    bins = pack(lengths, 2049)
    assert np.bincount(bins, lengths).max() <= 2049
    assert lengths.sum() / (2049 * (bins.max() + 1)) > 0.99


def chat_config(root: Path, rows: list[dict[str, Any]] | None = None, **more: Any) -> DataConfig:
    folder = tokenizer_folder(root / "tokenizer")
    path = write_rows(root / "rows.jsonl", message_rows(60) if rows is None else rows)
    source = {"kind": "jsonl", "path": str(path), "rows": "messages", "name": "chat"}
    defaults: dict[str, Any] = {
        "tokenizer": {"path": str(folder)},
        "attention": "document",
        "sequence_length": 150,
    }
    sources = more.pop("sources", [])
    return data_config(root / "dataset", source, *sources, **defaults | more)


def stored_rows(dataset: Dataset) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(tokens, mask) of each training row."""
    (stream,) = dataset.streams("train")
    starts = stream.document_starts().tolist()
    return [
        (tuple(stream.read(a, b).tolist()), tuple(stream.read_mask(a, b).tolist()))
        for a, b in pairwise(starts)
    ]


def fed_rows(config: DataConfig, dataset: Dataset) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of each row of an epoch, by the numbers of documents."""
    made = batches(dataset, config)
    found = []
    for position in range(made.order.sizes[0]):
        one = made.read_samples(position, position + 1)
        assert one.documents is not None
        for number in range(int(one.documents.max()) + 1):
            here = one.documents[0] == number
            targets = one.targets[0][here].tolist()
            if any(target != MASKED_TARGET for target in targets):
                found.append((one.inputs[0][here].tolist(), targets))
    return found


def test_each_row_is_fed_once_with_its_mask_and_none_sees_another(tmp_path: Path) -> None:
    config = chat_config(tmp_path, shard_tokens=1024)
    dataset = make(config)
    assert len(dataset.streams("train")[0].shards) > 1
    expected = []
    for tokens, mask in stored_rows(dataset):
        targets = [t if m else MASKED_TARGET for t, m in zip(tokens[1:], mask[1:], strict=True)]
        expected.append(_trimmed(list(tokens[:-1]), targets))
    found = [_trimmed(*row) for row in fed_rows(config, dataset)]
    assert sorted(found) == sorted(expected)
    made = batches(dataset, config)
    fed = sum(made.read_samples(at, at + 1).tokens for at in range(made.order.sizes[0]))
    assert fed == dataset.counts("train")["targets"]


def _trimmed(inputs: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
    """Up to the last target, since the row may end with its sample."""
    last = max(i for i, t in enumerate(targets) if t != MASKED_TARGET)
    return inputs[: last + 1], targets[: last + 1]


def test_long_rows_are_left_out_or_cut_and_counted(tmp_path: Path) -> None:
    config = chat_config(tmp_path, sequence_length=80)
    dataset = make(config)
    lengths = [len(tokens) for tokens, _ in stored_rows(dataset)]
    long = sum(length > 81 for length in lengths)
    assert 0 < long < len(lengths)
    (left_out,) = batches(dataset, config).packed
    assert left_out is not None
    assert (left_out.left_out, left_out.cut, len(left_out.rows)) == (long, 0, len(lengths) - long)
    said = "\n".join(describe_use(dataset, config, train_config()))
    assert f"longer than data.sequence_length 80: {long} rows are left out and 0 cut" in said

    said = "\n".join(describe_long_rows(dataset, config, train_config()))
    assert f"{long} rows are left out and 0 cut" in said
    cutting = chat_config(tmp_path, sequence_length=80, chat={"long_rows": "cut"})
    (cut,) = batches(dataset, cutting).packed
    assert cut is not None
    trained = sum(any(mask[1:81]) for tokens, mask in stored_rows(dataset) if len(tokens) > 81)
    assert (cut.cut, cut.left_out) == (trained, long - trained)

    with pytest.raises(DataError, match=r"no row of 3 tokens or fewer.*data\.sequence_length"):
        batches(dataset, chat_config(tmp_path, sequence_length=2))


def test_the_dataset_does_not_depend_on_processes_or_form_of_the_file(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    versions = []
    for number, processes in enumerate((1, 2)):
        config = chat_config(tmp_path / str(number), message_rows(900), processes=processes)
        versions.append(make(config).version)
    assert versions[0] == versions[1]
    root = tmp_path / "0"
    parquet.write_table(pyarrow.Table.from_pylist(message_rows(900)), root / "rows.parquet")
    source = {
        "kind": "parquet",
        "path": str(root / "rows.parquet"),
        "rows": "messages",
        "name": "chat",
    }
    other = data_config(
        root / "other", source, tokenizer={"path": str(root / "tokenizer")}, attention="document"
    )
    plain = Dataset.open(root / "dataset")
    assert stored_rows(make(other)) == stored_rows(plain)


def test_text_and_chat_in_one_dataset(tmp_path: Path) -> None:
    texts = text_source(text_folder(tmp_path / "texts", 12, 40), "texts")
    config = chat_config(tmp_path, sources=[texts], sequence_length=64)
    dataset = make(config)
    made = batches(dataset, config)
    assert [rows is not None for rows in made.packed] == [True, False]
    shares = {"chat": [0, 0], "texts": [0, 0]}
    for position in range(40):
        one = made.read_samples(position, position + 1)
        name = dataset.source_names[made.order.place(position).source]
        shares[name][0] += one.tokens
        shares[name][1] += one.targets.size
    assert shares["texts"][0] / shares["texts"][1] > 0.8
    assert shares["chat"][0] / shares["chat"][1] < 0.4
    assert made.validation(8).tokens > 0
    assert made.validation_baselines(8) is None
    chat_at = next(p for p in range(40) if made.order.place(p).source == 0)
    assert "<|im_start|>assistant\n[[" in render_sample(made, chat_at)


def test_chat_data_at_an_address_gives_the_same_samples(tmp_path: Path) -> None:
    config = chat_config(tmp_path)
    local, cache = make(config), str(tmp_path / "cache")
    address = f"file://{local.folder}"
    config = config.model_copy(update={"folder": address, "cache": cache})
    remote = open_dataset(address, config, ask=True)
    made, again = batches(local, config), batches(remote, config)
    for step in range(1, 5):
        assert made.microbatch(step, 0).entries == again.microbatch(step, 0).entries
    assert made.validation(4).tokens == again.validation(4).tokens
    assert find_problems(remote) == []


def test_a_changed_mask_is_found(tmp_path: Path) -> None:
    config = chat_config(tmp_path)
    dataset = make(config)
    assert dataset.manifest["format"] == 2
    assert find_problems(dataset.folder) == []
    path = dataset.folder / dataset.streams("train")[0].shards[0].mask_path
    path.write_bytes(bytes(1 - byte for byte in path.read_bytes()))
    (problem,) = find_problems(dataset.folder)
    assert str(path) in problem
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        Dataset.open(dataset.folder)


def test_another_template_or_role_is_another_dataset(tmp_path: Path) -> None:
    make(chat_config(tmp_path))
    with pytest.raises(DataError, match=r"another data\.chat"):
        make(chat_config(tmp_path, chat={"template": "chatml"}))
    with pytest.raises(DataError, match=r"another data\.chat"):
        make(chat_config(tmp_path, chat={"train_on": ["user", "assistant"]}))
    make(chat_config(tmp_path, chat={"long_rows": "cut"}))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"attention": "full"}, "use attention: document"),
        ({"tokenizer": {}}, "use tokenizer.path, or model.from"),
    ],
)
def test_what_chat_data_needs_is_asked_for(tmp_path: Path, more: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chat_config(tmp_path, **more)
    with pytest.raises(ValueError, match="cannot be read from kind: csv"):
        chat_config(tmp_path, sources=[{"kind": "csv", "path": "a.csv", "rows": "prompt"}])
