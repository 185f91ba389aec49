"""Each key says what a change of it does, and the identity of a run follows from that alone."""

from __future__ import annotations

import pytest

from holdfast.config.loading.fields import all_keys, change_of
from holdfast.config.loading.identity import (
    DATASET_KEYS,
    LATER_KEYS,
    SCHEDULE_STEPS,
    decisive_values,
)
from holdfast.config.loading.reference import markdown
from holdfast.config.run import RunConfig
from holdfast.config.sections.base import Change

KEYS = [key for key, _ in all_keys()]
LISTS = {
    "data": {"sources": [{"kind": "text", "path": "a"}]},
    "train": {
        "batch_warmup": [{"from_step": 5, "batch_size": 8}],
        "optimizer": {"groups": [{"match": "*"}]},
    },
    "model": {"rope_scaling": {"factor": 4.0}},
    "layout": {"replicas": [{}]},
    "checkpoint": {"peers": [{"name": "b", "address": "127.0.0.1:1"}]},
}


@pytest.mark.parametrize("key", KEYS)
def test_each_key_has_a_class(key: str) -> None:
    assert change_of(key) is not None, (
        "declare it: InPlace, Branch or Never (config/sections/base.py)"
    )


def test_an_unknown_key_has_none() -> None:
    assert change_of("train.no_such_key") is None


def test_a_key_has_the_class_of_its_section_unless_it_declares_another() -> None:
    assert change_of("checkpoint.keep_last") is Change.IN_PLACE
    assert change_of("train.optimizer.eps") is Change.BRANCH
    assert change_of("train.batch_warmup.3.from_step") is Change.BRANCH
    assert change_of("model.rope_scaling.factor") is Change.NEVER
    assert change_of("data.sources.0.weight") is Change.NEVER
    assert change_of("data.processes") is Change.IN_PLACE


def test_what_may_change_in_place_is_no_part_of_the_identity_and_all_else_is() -> None:
    dumped = RunConfig.model_validate(LISTS).model_dump(mode="json")
    # A later key enters the identity only with another value than its default.
    decisive = {_general(key) for key in decisive_values(dumped)}
    changed = {key for key in KEYS if change_of(key) is not Change.IN_PLACE}
    assert decisive <= changed
    missing = changed - decisive - set(DATASET_KEYS) - set(LATER_KEYS)
    assert {key for key in missing if not key.startswith("model.")} == {"data.sources.*.rows"}
    assert SCHEDULE_STEPS in decisive


def test_the_page_names_the_class_of_each_key() -> None:
    tables = [line.split(" | ") for line in markdown().splitlines() if line.startswith("| `")]
    named = {cells[0]: cells[3] for cells in tables if len(cells) == 5}
    assert len(named) > 100
    assert set(named.values()) == {change.value for change in Change}


def test_the_page_lists_each_class() -> None:
    rows = {
        line.split(" | ")[0]: line
        for line in markdown().splitlines()
        if " | `holdfast train` " in line
    }
    assert "`train.steps`" in rows["| in place"]
    assert "`cluster.*`" in rows["| in place"]
    assert "`train.optimizer.groups.*`" in rows["| branch"]
    assert "| `train.optimizer.name` | text | `'adamw'` | never |" in markdown()
    assert "| `seed` | whole number, ≥ 0 | `1` | never |" in markdown()


def _general(key: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in key.split("."))
