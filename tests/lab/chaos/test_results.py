"""Which runs count as recovered, and what the table tells of the others."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.core.sharding.state_table import TensorSpec
from holdfast_lab.chaos import compare
from holdfast_lab.chaos.compare import RunComparison, compare_runs
from holdfast_lab.chaos.results import (
    NOT_RECOVERED,
    count_tracebacks,
    describe_result,
    format_table,
    is_recovered,
    summarize,
)
from tests.support.mover_process import TABLE, Mover, Workers, state, topology

EQUAL = {"curve": "", "ledger": "", "tensors": "", "worst": 0.0}


def _fault(outcome: str = "recovered") -> dict[str, Any]:
    return {"number": 1, "fault": "agent", "outcome": outcome, "seconds": 1.5, "named": None}


def _result(**changes: Any) -> dict[str, Any]:
    result = {
        "run": "two-1-1",
        "faults": [_fault()],
        "rejected": [],
        "unexpected_ends": [],
        "problem": "",
        "asked": 1,
        "cut": "",
        "notes": [],
        "tracebacks": 0,
        "verdict": EQUAL,
        "tolerance": 0.0,
        "seconds": 30.0,
    } | changes
    return result | {"recovered": is_recovered(result)}


def test_a_run_that_no_fault_hit_has_not_recovered() -> None:
    result = _result(faults=[_fault("not done: 'zebra'")])
    assert not result["recovered"]
    assert "none of 1 faults hit" in describe_result(result)
    assert "two-1-1: not disturbed, none of 1 faults hit" in format_table([result])
    assert not summarize([result])["recovered"]
    assert _result()["recovered"]
    assert _result(asked=0, faults=[])["recovered"], "it was to be left in peace"


def test_a_run_that_was_started_again_has_not_recovered_without_a_hand() -> None:
    result = _result(unexpected_ends=[["b", 1], ["c", -9]])
    assert not result["recovered"]
    assert "2 agents (b with 1, c with -9) ended by themselves" in describe_result(result)
    assert "two-1-1: 2 agents (b with 1, c with -9) ended by themselves" in format_table([result])


def test_the_fault_that_a_run_did_not_survive_is_in_the_table() -> None:
    result = _result(
        faults=[_fault(), _fault(NOT_RECOVERED)], asked=2, problem="stuck", verdict=None
    )
    assert format_table([result])[1].split() == ["agent", "2", "0", "0", "1.50", "1.50"]
    assert "NOT RECOVERED after 2 faults" in describe_result(result)


def test_a_run_that_was_cut_short_is_marked() -> None:
    result = _result(asked=25, cut="its time was over", notes=["b had not come back"])
    assert result["recovered"]
    assert "cut short: its time was over" in describe_result(result)
    lines = format_table([result])
    assert "two-1-1: cut short after 1 of 25 faults, its time was over" in lines
    assert "two-1-1: b had not come back" in lines
    assert summarize([result])["cut_short"] == ["two-1-1"]


def test_tracebacks_of_agents_and_movers_are_counted(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    told = "before\nTraceback (most recent call last):\n"
    (tmp_path / "a.1.log").write_text(told)
    (tmp_path / "b.1.log").write_text("fine")
    (logs / "mover.a.log").write_text(told)
    (logs / "worker.0.log").write_text(told)
    assert count_tracebacks(tmp_path, tmp_path / "run") == 2
    assert "2 logs with a traceback, of agents and movers" in format_table([_result(tracebacks=2)])


# --- what the verdict on a disturbed run lets pass ------------------------------------------------
LOSSES = {1: 2.0, 2: 1.5, 3: 1.25}
TENSORS = {"a": np.array([1.0, 2.0]), "b": np.array([3.0])}


def judged(
    monkeypatch: pytest.MonkeyPatch,
    losses: Mapping[int, float],
    tensors: Mapping[str, NDArray[np.float64]],
    tolerance: float,
) -> RunComparison:
    """Of a run with these against one with LOSSES and TENSORS."""
    ours, theirs = Path("ours"), Path("theirs")
    monkeypatch.setattr(compare, "read_losses", {ours: losses, theirs: LOSSES}.__getitem__)
    monkeypatch.setattr(
        compare, "read_newest_state", {ours: (3, tensors), theirs: (3, TENSORS)}.__getitem__
    )
    monkeypatch.setattr(compare, "_check_ledger", lambda folder, steps: "")
    return compare_runs(ours, theirs, 3, tolerance)


@pytest.mark.parametrize("tolerance", [0.0, 1e-10])
def test_what_differs_is_named(tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, LOSSES, TENSORS, tolerance).is_equal
    for losses, words in (
        (LOSSES | {2: math.nan}, "the loss of step 2 is nan"),
        (LOSSES | {2: 1.6}, "the loss of step 2 is 1.6"),
        ({1: 2.0, 3: 1.25}, "1 of 3 steps have no line"),
        (LOSSES | {4: 1.0}, "step 4 is none"),
    ):
        found = judged(monkeypatch, losses, TENSORS, tolerance)
        assert words in found.curve, json.dumps(losses)
        assert not found.is_equal
    for tensors, words in (
        (TENSORS | {"a": np.array([1.0, np.nan])}, "a differs by inf"),
        (TENSORS | {"b": np.array([3.1])}, "b differs"),
        ({"a": TENSORS["a"]}, "b is in one"),
        (TENSORS | {"c": np.zeros(1)}, "c is in one"),
    ):
        found = judged(monkeypatch, LOSSES, tensors, tolerance)
        assert words in found.tensors, str(tensors)
        assert not found.is_equal


def test_the_state_is_read_whatever_its_dtypes_are(tmp_path: Path) -> None:
    """fp16 has a counter in 64 bits; optimizer state may be in bf16, or in codes of a byte."""
    table = (
        *TABLE,
        TensorSpec("optimizer.scale.good_steps", "I64", (12,), None),
        TensorSpec("optimizer.exp_avg.codes", "U8", (9, 4), 0),
    )
    topo, mover = topology(), Mover(tmp_path)
    try:
        Workers(mover.begin(topo, table), topo, table).commit(3)
    finally:
        mover.close()
    step, found = compare.read_newest_state(tmp_path)
    assert step == 3
    right = state(3, table)
    assert set(found) == set(right)
    for name, tensor in right.items():
        assert tensor.any(), name
        assert found[name].shape == tuple(tensor.shape)
        assert np.array_equal(found[name], tensor.double().numpy()), name
