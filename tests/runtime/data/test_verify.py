"""One changed byte, anywhere, is found; and what a look inside shows."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.core.data.skips import Skip, Skips
from holdfast.data.order.audit import audit_records
from holdfast.data.stream.batch import MASKED_TARGET, Batches
from holdfast.data.stream.dataset import RECIPE, Dataset
from holdfast.data.stream.inspect import dataset_numbers, mask_shares, render_sample
from holdfast.data.stream.verify import check_dataset, find_problems
from holdfast.errors import DataError
from tests.runtime.data.test_audit import EVEN, changed, committed, feed
from tests.support.corpus import batches, train_config


@pytest.fixture(name="copy")
def _copy(small: Dataset, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small.folder, tmp_path / "copy"))


def test_a_sound_dataset_has_no_problems(small: Dataset) -> None:
    assert find_problems(small.folder) == []
    check_dataset(small)
    check_dataset(small, limit=1)


def test_one_changed_byte_in_any_file_is_found(copy: Path) -> None:
    """Ten places in each file: by verify, and by what a resume does (open, then check)."""
    rng = random.Random(3)
    files = [p for p in sorted(copy.rglob("*")) if p.is_file()]
    assert {p.suffix for p in files} == {".json", ".bin", ".idx", ".yaml"}
    for path in files:
        raw = path.read_bytes()
        for _ in range(10):
            at = rng.randrange(len(raw))
            changed = bytearray(raw)
            changed[at] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            problems = find_problems(copy)
            assert problems, f"{path.name} byte {at}"
            assert path.name in problems[0]
            if path.name == RECIPE:  # a run does not read it
                continue
            with pytest.raises(DataError, match=path.name):
                check_dataset(Dataset.open(copy))
        path.write_bytes(raw)
    assert find_problems(copy) == []


def test_files_cut_short_or_missing_are_found_on_open(copy: Path) -> None:
    shard = next((copy / "shards").glob("train-*.bin"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-2])
    with pytest.raises(DataError, match=r"has [\d,]+ bytes, it was written with"):
        Dataset.open(copy)
    shard.unlink()
    with pytest.raises(DataError, match="is missing"):
        Dataset.open(copy)
    shard.write_bytes(raw)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="tokenizer is missing"):
        Dataset.open(copy)


def test_white_space_in_the_manifest_counts(copy: Path) -> None:
    manifest = copy / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text())))
    assert "not what was written" in find_problems(copy)[0]


def test_a_newer_format_and_no_dataset_are_told_apart(copy: Path, tmp_path: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    assert "format 99 is newer" in find_problems(copy)[0]
    assert "there is no prepared dataset" in find_problems(tmp_path / "nothing")[0]


def test_numbers_are_the_manifest_s(small: Dataset, small_config: DataConfig) -> None:
    found = json.loads(json.dumps(dataset_numbers(small)))
    assert found["version"] == small.version
    assert found["splits"]["train"]["tokens"] == sum(s.tokens for s in small.streams("train"))
    assert set(found["splits"]["train"]["sources"]) == {"a", "b"}
    mask = mask_shares(batches(small, small_config))
    b = batches(small, small_config)
    targets = b.read_samples(0, min(256, sum(b.order.sizes))).targets
    assert mask["masked_share"] == pytest.approx(float(np.mean(targets == -100)))
    assert 0.0 < mask["masked_share"] < 0.2


def test_render_shows_the_text_and_where_documents_end(
    small: Dataset, small_config: DataConfig
) -> None:
    b = batches(small, small_config)
    ended = [p for p in range(200) if (b.read_samples(p, p + 1).inputs == small.end).any()]
    text = render_sample(b, ended[0])
    assert "=== end of document (target masked) ===" in text
    whole = next(p for p in range(200) if p not in ended)
    assert render_sample(b, whole).count("|") >= small_config.sequence_length


# --- skips ----------------------------------------------------------------------------------------
SKIPS = Skips([Skip(2, 1, "step 2 is not finite: bad on a; on 1 other device bad")])


@pytest.fixture(name="source")
def _source(small: Dataset, small_config: DataConfig) -> Batches:
    return Batches(small, small_config, train_config(), 1, SKIPS)


def test_nothing_of_a_skipped_microbatch_is_fed(source: Batches, small: Dataset) -> None:
    skipped = source.microbatch(2, 1)
    assert skipped.tokens == 0
    assert (skipped.targets == MASKED_TARGET).all()
    assert (skipped.inputs == small.end).all()
    (entry,) = skipped.entries
    assert entry["skipped"].startswith("step 2 is not finite")
    assert (entry["start"], entry["stop"]) == source.positions(2, 1)


def test_the_others_are_as_ever(source: Batches, small: Dataset, small_config: DataConfig) -> None:
    plain = batches(small, small_config)
    for step, index in ((1, 1), (2, 0), (2, 2), (3, 1)):
        one, other = source.microbatch(step, index), plain.microbatch(step, index)
        assert np.array_equal(one.inputs, other.inputs)
        assert one.entries == other.entries


@pytest.mark.parametrize("parts", [1, 2])
def test_the_audit_shows_it_as_skipped(source: Batches, parts: int) -> None:
    plans = [plan for plan in EVEN for _ in range(parts)]
    result = audit_records([*feed(source, plans, 1, 3, parts=parts), committed(3)], source)
    assert result.ok
    (reason,) = result.skipped
    assert reason.startswith("step 2 is not finite")
    assert result.skipped[reason] == 2
    assert "none missing, none twice, 2 skipped" in result.describe()
    assert sum(use.used for use in result.epochs) == 3 * 8 - 2


def test_what_is_called_skipped_but_was_fed_is_a_problem(
    source: Batches, small: Dataset, small_config: DataConfig
) -> None:
    fed = feed(batches(small, small_config), EVEN, 1, 3)
    records = changed(fed, 2, 0, lambda e: {"skipped": "so it says"})
    result = audit_records([*records, committed(3)], source)
    assert [(p.kind, p.step, p.microbatch) for p in result.problems] == [
        ("wrong", 2, 0),
        ("wrong", 2, 1),
    ]
    assert "calls it skipped (so it says), but tokens were fed" in result.describe()
