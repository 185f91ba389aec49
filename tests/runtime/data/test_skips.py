"""What is skipped is dealt and entered into the ledger with its reason, and nothing of it is read
or fed."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.core.data.skips import Skip, Skips
from holdfast.data.order.audit import audit_records
from holdfast.data.stream.batch import MASKED_TARGET, Batches
from holdfast.data.stream.dataset import Dataset
from tests.runtime.data.test_audit import EVEN, changed, committed, feed
from tests.support.corpus import batches, train_config

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
