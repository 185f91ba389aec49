"""Samples against windows cut by hand from the decoded streams."""

from __future__ import annotations

import itertools
from collections import Counter
from math import log

import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest

from holdfast.config.sections.data import DataConfig
from holdfast.data.order.baselines import baselines, bits_per_byte
from holdfast.data.stream.batch import MASKED_TARGET, Batches, Microbatch
from holdfast.data.stream.dataset import Dataset
from holdfast.errors import ConfigError, DataError
from tests.support.corpus import batches, data_config, make, text_folder, text_source, train_config


def window(tokens: list[int], sample: int, length: int, end: int) -> tuple[list[int], list[int]]:
    """One sample in plain Python: inputs and targets."""
    held = tokens[sample * length : (sample + 1) * length + 1]
    inputs, targets = [], []
    for i in range(length):
        inputs.append(held[i] if i < len(held) else end)
        masked = i + 1 >= len(held) or held[i] == end
        targets.append(MASKED_TARGET if masked else held[i + 1])
    return inputs, targets


def streams(dataset: Dataset, split: str = "train") -> list[list[int]]:
    return [
        [t for s in stream.shards for t in np.fromfile(dataset.folder / s.path, "<u2").tolist()]
        for stream in dataset.streams(split)
    ]


def test_microbatches_are_the_windows_that_the_order_names(
    small: Dataset, small_config: DataConfig
) -> None:
    b = batches(small, small_config)
    length = small_config.sequence_length
    tokens = streams(small)
    for step in (1, 2, 37):
        for index in range(b.microbatches(step)):
            batch = b.microbatch(step, index)
            assert batch.inputs.shape == batch.targets.shape == (2, length)
            assert batch.inputs.dtype == batch.targets.dtype == np.int64
            assert batch.documents is None
            for row in range(2):
                place = b.order.place((step - 1) * 8 + index * 2 + row)
                expected = window(tokens[place.source], place.sample, length, small.end)
                assert (batch.inputs[row].tolist(), batch.targets[row].tolist()) == expected
            assert batch.tokens == (batch.targets != MASKED_TARGET).sum()


def test_an_epoch_has_every_target_once(small: Dataset, small_config: DataConfig) -> None:
    """Over one epoch of each source the targets are its tokens, less each document's first."""
    b = batches(small, small_config)
    for source, tokens in enumerate(streams(small)):
        length, size = small_config.sequence_length, b.order.sizes[source]
        order = b.order.permutation(source, 0).apply_many(np.arange(size))
        seen: Counter[int] = Counter()
        for sample in order.tolist():
            seen.update(
                t for t in window(tokens, sample, length, small.end)[1] if t != MASKED_TARGET
            )
        starts = [0] + [i + 1 for i, t in enumerate(tokens[:-1]) if t == small.end]
        firsts = Counter(tokens[i] for i in starts)
        assert seen == Counter(tokens) - firsts


def test_parts_are_the_rows_in_order(small: Dataset, small_config: DataConfig) -> None:
    b = batches(small, small_config, batch_size=16, microbatch_size=8)
    whole = b.microbatch(3, 1)
    for parts in (1, 2, 4, 8):
        pieces = [b.microbatch(3, 1, part, parts) for part in range(parts)]
        assert np.array_equal(np.concatenate([p.inputs for p in pieces]), whole.inputs)
        assert np.array_equal(np.concatenate([p.targets for p in pieces]), whole.targets)
        entries = [p.entries[0] for p in pieces]
        assert entries[0]["start"] == whole.entries[0]["start"] == 2 * 16 + 8
        assert entries[-1]["stop"] == whole.entries[0]["stop"] == 2 * 16 + 16
        assert all(a["stop"] == c["start"] for a, c in itertools.pairwise(entries))
        assert sum(p.tokens for p in pieces) == whole.tokens
    with pytest.raises(ConfigError, match="dp_shard 3 does not divide"):
        b.microbatch(1, 0, 0, 3)
    with pytest.raises(IndexError):
        b.microbatch(1, 2)


def test_ledger_entry_says_what_was_fed(small: Dataset, small_config: DataConfig) -> None:
    b = batches(small, small_config)
    batch = b.microbatch(5, 3)
    (entry,) = batch.entries
    raw = batch.inputs.astype("<i8").tobytes() + batch.targets.astype("<i8").tobytes()
    assert entry["hash"] == xxh3_64_hexdigest(raw)
    assert (entry["microbatch"], entry["start"], entry["stop"]) == (3, 38, 40)
    assert entry["skipped"] == ""
    sources = {b.order.place(p).source for p in (38, 39)}
    assert entry["source"] == (small.source_names[sources.pop()] if len(sources) == 1 else "")
    assert b.hash_of(38, 40) == entry["hash"]


def test_document_attention_numbers_documents(small: Dataset, small_config: DataConfig) -> None:
    config = small_config.model_copy(update={"attention": "document", "sequence_length": 400})
    b = batches(small, config)
    batch = b.microbatch(1, 0)
    assert batch.documents is not None
    assert batch.documents.dtype == np.int32
    changes = 0
    for ids, tokens in zip(batch.documents.tolist(), batch.inputs.tolist(), strict=True):
        number = 0
        for i, token in enumerate(tokens):
            assert ids[i] == number
            number += token == small.end
        changes += number
    assert changes > 0
    full = batches(small, small_config.model_copy(update={"sequence_length": 400}))
    assert full.microbatch(1, 0).entries == batch.entries


def test_the_mixture_follows_the_weights(small: Dataset, small_config: DataConfig) -> None:
    b = batches(small, small_config)
    source, _, _ = b.order.places(0, 4000)
    assert np.bincount(source).tolist() == [3000, 1000]


def test_batch_warmup_moves_positions(small: Dataset, small_config: DataConfig) -> None:
    stages = [{"from_step": 1, "batch_size": 2}, {"from_step": 4, "batch_size": 8}]
    b = batches(small, small_config, batch_warmup=stages)
    assert [b.microbatches(s) for s in range(1, 6)] == [1, 1, 1, 4, 4]
    assert b.positions(4, 0) == (6, 8)
    assert b.positions(5, 1) == (16, 18)


def test_seed_and_dataset_decide(small: Dataset, small_config: DataConfig) -> None:
    again = Dataset.open(small.folder)
    one, two = (batches(d, small_config, seed=4) for d in (small, again))
    other = batches(small, small_config, seed=5)
    assert one.microbatch(9, 2).entries == two.microbatch(9, 2).entries
    assert one.microbatch(9, 2).entries != other.microbatch(9, 2).entries


def test_validation_is_fixed_and_spread(small: Dataset, small_config: DataConfig) -> None:
    b = batches(small, small_config)
    everything = b.validation(10**6)
    tokens = streams(small, "validation")
    counts = small.counts("validation")
    assert everything.tokens == counts["tokens"] - counts["documents"]
    assert everything.bytes == pytest.approx(counts["bytes"])
    targets = Counter(
        t for m in everything.microbatches for t in m.targets.ravel().tolist() if t != MASKED_TARGET
    )
    firsts: Counter[int] = Counter()
    for one in tokens:
        starts = [0] + [i + 1 for i, t in enumerate(one[:-1]) if t == small.end]
        firsts.update(one[i] for i in starts)
    assert targets == Counter(t for one in tokens for t in one) - firsts
    some = b.validation(5)
    assert [len(m.inputs) for m in some.microbatches] == [2, 2, 1]
    flat = np.concatenate([m.inputs for m in everything.microbatches]).tolist()
    rows = np.concatenate([m.inputs for m in some.microbatches]).tolist()
    places = [flat.index(row) for row in rows]
    assert places == sorted(places)
    assert places[-1] > len(flat) // 2
    # Every target costs one bit: text tokens per byte bits per byte.
    nats = everything.tokens * log(2)
    assert everything.bits_per_byte(nats) == pytest.approx(small.tokens_per_byte("validation"))


def test_validation_of_chosen_sources_measures_their_text_alone(
    small: Dataset, small_config: DataConfig
) -> None:
    sums = []
    for name, tokens in zip(small.source_names, streams(small, "validation"), strict=True):
        found = batches(small, small_config, evaluate={"sources": [name]}).validation(10**6)
        assert found.tokens == len(tokens) - tokens.count(small.end)
        fed = np.concatenate([m.inputs for m in found.microbatches]).ravel()
        assert fed[: len(tokens) - 1].tolist() == tokens[:-1]
        sums.append(found.bytes)
    assert sum(sums) == pytest.approx(small.counts("validation")["bytes"], rel=0.02)


def test_baselines_equal_counting_by_hand(small: Dataset, small_config: DataConfig) -> None:
    train, validation = streams(small), streams(small, "validation")
    pairs = Counter((a, b) for one in train for a, b in itertools.pairwise(one) if a != small.end)
    uni: Counter[int] = Counter()
    first: Counter[int] = Counter()
    distinct: Counter[int] = Counter()
    for (a, b), count in pairs.items():
        uni[b] += count
        first[a] += count
        distinct[a] += 1
    total = sum(uni.values()) + small.vocab_size
    loss = {"unigram": 0.0, "bigram": 0.0}
    targets = 0
    for one in validation:
        for a, b in itertools.pairwise(one):
            if a == small.end:
                continue
            p = (uni[b] + 1) / total
            q = (pairs[a, b] + distinct[a] * p) / (first[a] + distinct[a]) if first[a] else p
            loss["unigram"] -= log(p)
            loss["bigram"] -= log(q)
            targets += 1
    assert small.baselines is not None
    for name, nats in loss.items():
        bpb = bits_per_byte(nats / targets, small.tokens_per_byte("validation"))
        assert small.baselines[name] == pytest.approx(bpb, rel=1e-9)
    assert small.baselines["bigram"] < small.baselines["unigram"]
    same = batches(small, small_config).validation_baselines(10**6)
    assert same == pytest.approx({k: small.baselines[k] for k in ("unigram", "bigram")})


def test_bigrams_predict_a_cycle() -> None:
    """Text that goes round in a circle costs a bigram nothing and a unigram log2(3) bits."""
    stream = np.array([1, 2, 3] * 4000 + [0])
    found = baselines([stream], stream, vocab_size=4, end=0, tokens_per_byte=1.0)
    assert found["unigram"] == pytest.approx(np.log2(3), abs=0.01)
    assert found["bigram"] < 0.02


def test_sources_must_be_the_dataset_s(small: Dataset, small_config: DataConfig) -> None:
    renamed = small_config.sources[0].model_copy(update={"name": "z"})
    config = small_config.model_copy(update={"sources": (renamed, small_config.sources[1])})
    with pytest.raises(DataError, match="the dataset has the sources"):
        batches(small, config)


def test_a_dataset_shorter_than_a_sample(tmp_path: object) -> None:
    from pathlib import Path

    root = Path(str(tmp_path))
    folder = text_folder(root / "in", files=1, words=5)
    config = data_config(
        root / "out", text_source(folder), sequence_length=512, validation_fraction=0.0
    )
    b = Batches(make(config), config, train_config(), 1)
    batch: Microbatch = b.microbatch(1, 0)
    assert b.order.sizes == (1,)
    assert np.array_equal(batch.inputs[0], batch.inputs[1])
    assert 0 < batch.tokens < 200
    assert b.validation(4).microbatches == []
