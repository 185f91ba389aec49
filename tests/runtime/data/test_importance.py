"""`importance`: the formula of DSIR, the right kind of text, and the same choice in any order."""

from __future__ import annotations

import random
from collections import Counter
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.data.filters.plain import hash_document
from holdfast.data.filters.shingles import word_hashes
from holdfast.data.filters.word_grams import gram_hashes
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.prepare.stage_samples import sample_sources
from holdfast.data.stages import importance
from holdfast.data.stages.importance import STEPS_OF_NAT, Features, features, select_documents
from tests.runtime.data.test_stages import all_texts, lines_file, removed
from tests.support.corpus import data_config, make
from tests.support.stage_texts import page

BUCKETS = 1000
REPOSITORY = Path(__file__).parents[3]


def pieces(files: list[Path], size: int = 800) -> list[str]:
    texts = [path.read_text() for path in files]
    return [text[at : at + size] for text in texts for at in range(0, len(text) - size, size)]


def buckets_of(text: str) -> list[int]:
    words = word_hashes(text)
    return [int(h) % BUCKETS for size in (1, 2) for h in gram_hashes(words, size)]


def reference(target: list[str], texts: list[str]) -> list[float]:
    """log w of each text, as the paper writes it, with the constant of its program."""
    of_target, of_all = (
        Counter(bucket for text in some for bucket in buckets_of(text)) for some in (target, texts)
    )
    p, q = (
        [counts[bucket] / counts.total() for bucket in range(BUCKETS)]
        for counts in (of_target, of_all)
    )
    return [sum(log(p[b] + 1e-8) - log(q[b] + 1e-8) for b in buckets_of(text)) for text in texts]


def selected(
    target: list[str], texts: list[str], share: float, units: int = 1
) -> tuple[set[str], dict[str, float]]:
    """The texts that stay, and log w of each. units: into which they are dealt."""
    parts = [texts[i::units] for i in range(units)]
    counts = np.zeros(BUCKETS, dtype=np.int64)
    for text in target:
        np.add.at(counts, features(text, 2, BUCKETS), 1)
    grams = [[features(text, 2, BUCKETS) for text in part] for part in parts]
    tables = [
        Features(np.cumsum([len(f) for f in found]), np.concatenate(found)) for found in grams
    ]
    found = select_documents(
        [np.array([hash_document(text) for text in part], dtype=np.uint64) for part in parts],
        [np.ones(len(part), dtype=bool) for part in parts],
        [lambda table=table: table for table in tables],  # type: ignore[misc]
        counts,
        share,
    )
    stays = {t for p, out in zip(parts, found.left_out, strict=True) for t in np.array(p)[~out]}
    pairs = zip(parts, found.log_weights, strict=True)
    return stays, {t: float(w) for p, values in pairs for t, w in zip(p, values, strict=True)}


def test_weights_are_those_of_the_paper_and_the_highest_with_noise_stay() -> None:
    target, texts = [page(seed, 2) for seed in range(20)], [page(100 + i, 1) for i in range(300)]
    expected = reference(target, texts)
    stays, weights = selected(target, texts, share=0.3)
    assert [weights[text] for text in texts] == pytest.approx(expected, abs=1e-3)
    rows = np.array([hash_document(text) for text in texts], dtype=np.uint64)
    noise = importance.noise(rows) / STEPS_OF_NAT
    order = np.argsort(-(np.array(expected) + noise))
    assert stays == {texts[i] for i in order[:90]}


def test_noise_has_a_gumbel_distribution() -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 2**63, (200_000, 3), dtype=np.uint64)
    noise = importance.noise(rows) / STEPS_OF_NAT
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.04)


def test_twenty_orders_and_units_choose_the_same_documents() -> None:
    target, texts = [page(seed, 2) for seed in range(20)], [page(100 + i, 1) for i in range(120)]
    expected = selected(target, texts, share=0.4)
    for number in range(20):
        random.Random(number).shuffle(texts)
        assert selected(target, texts, share=0.4, units=1 + number % 7) == expected


def two_kinds(root: Path, **more: Any) -> tuple[DataConfig, list[str], list[str]]:
    """(settings, prose, code): pieces of this repository's pages and of its modules."""
    prose = pieces(sorted((REPOSITORY / "docs" / "guide").glob("*.md")))[:150]
    code = pieces(sorted((REPOSITORY / "src" / "holdfast" / "data").glob("*/*.py")))[:150]
    mixed = random.Random(1).sample(prose + code, 300)
    sample = root / "sample.txt"
    sample.write_text("\n".join(pieces(sorted((REPOSITORY / "docs" / "internals").glob("*.md")))))
    stage = {"kind": "importance", "texts": [{"path": str(sample)}], "share": 0.2}
    source = lines_file(root / "all.jsonl", mixed)
    return data_config(root / "out", source, stages=[stage], **more), prose, code


def test_a_target_sample_selects_its_kind_of_text(tmp_path: Path) -> None:
    config, prose, _ = two_kinds(tmp_path)
    said: list[str] = []
    dataset = prepare_dataset(config, say=said.append)
    assert "all: stage 0 (importance) left out 240: share 240" in said
    left_out = removed(dataset)
    assert {entry["rule"] for entry in left_out} == {"share"}
    assert len({entry["score"] for entry in left_out}) > 100
    kept = all_texts(dataset)
    assert len(kept) == 60
    assert sum(text in {piece.strip() for piece in prose} for text in map(str.strip, kept)) >= 58
    (sample,) = sample_sources(config, documents=300, examples=3)
    (stage,) = sample.stages
    assert (stage.left_out, stage.met) == ({"share": 240}, 300)
    assert len(stage.scores) == 300
    assert all(example.score in stage.scores for example in stage.examples)


def test_documents_of_another_source_are_neither_counted_nor_left_out(tmp_path: Path) -> None:
    config, _, _ = two_kinds(tmp_path)
    other = lines_file(tmp_path / "other.jsonl", [page(900 + i, 1) for i in range(40)])
    first = removed(make(config))
    stages = [config.stages[0].model_copy(update={"sources": ("all",)})]
    sources = [*config.sources, *data_config(tmp_path, other).sources]
    both = config.model_copy(
        update={"sources": tuple(sources), "stages": tuple(stages), "folder": f"{tmp_path}/both"}
    )
    assert removed(make(both)) == first
