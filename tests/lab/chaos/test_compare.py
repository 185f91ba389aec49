"""What the verdict on a disturbed run lets pass: nothing that differs, also what is no number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.core.sharding.state_table import TensorSpec
from holdfast_lab.chaos import compare
from holdfast_lab.chaos.compare import RunComparison, compare_runs
from tests.support.mover_process import TABLE, Mover, Workers, state, topology

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
