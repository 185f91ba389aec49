"""Promise 1 with each optimizer: bit-equal on replicas, 1e-10 under ZeRO, and across a restore in
another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.run_table import run_state_table
from tests.runtime.training.test_recover import POINTS, survivors
from tests.support.layouts import assert_all_state, case, load_pieces, one_step, pieces, save_pieces
from tests.support.marks import in_campaign
from tests.support.optimizers import ELEMENTWISE, MODULE, OPTIMIZERS, engine_with, optimizer_config
from tests.support.ranks import RankContext, rank_values
from tests.support.step_recovery import assert_undisturbed
from tests.support.tiny_training import digest

STEPS = 6


def _with_slow(names: list[str], *quick: str) -> list[Any]:
    return [name if name in quick else in_campaign(name) for name in names]


def _curve(rank: RankContext, name: str, layout: str) -> list[str]:
    config = optimizer_config(name, layout, train__precision="fp32")
    made = engine_with(config, layout, rank.rank, rank.store())
    table = [(spec.name, spec.shape) for spec in run_state_table(config)]
    assert [(local.name, local.global_shape) for local in made.state()] == table
    losses = [one_step(made, step).mean_loss for step in range(1, STEPS + 1)]
    assert len(set(losses)) == STEPS
    found = [loss.hex() for loss in losses] + [digest(made)]
    made.close()
    return found


@pytest.mark.parametrize("name", _with_slow(list(OPTIMIZERS), "muon"))
def test_replicas_change_no_bit(name: str) -> None:
    curves: set[tuple[str, ...]] = set()
    for layout in ("one", "dp2", "dp3"):
        arguments = {"name": name, "layout": f"shallow.{layout}"}
        for curve in rank_values(_curve, case(layout).world_size, arguments):
            curves.add(tuple(curve))
    assert len(curves) == 1


KILLS = [(name, when) for name in ("sgd", "lion", "adafactor", "muon") for when in POINTS]


@pytest.mark.parametrize(
    ("name", "when"), [kill if kill == ("muon", "voted") else in_campaign(*kill) for kill in KILLS]
)
def test_one_of_three_replicas_is_killed(name: str, when: str) -> None:
    """At a point of a step; the other ranks continue from their own state."""
    found = survivors(f"{name}.dp3", 2, when, f"{name}.dp2", [0, 1])
    assert len(found) == 2
    assert_undisturbed(found, f"{name}.one")


def _trained(rank: RankContext, name: str, layout: str, to: str, start: str) -> None:
    """Six steps, or the last three of them from a state."""
    config = optimizer_config(name, layout)
    made = engine_with(config, layout, rank.rank, rank.store())
    first = 1
    if start:
        whole = _whole(start)
        made.load(lambda box, tensor: _read(whole, box, tensor))
        first = 4
    for step in range(first, 7 if start or "half" not in to else 4):
        one_step(made, step)
    save_pieces(f"{to}-{rank.rank}.npz", pieces(made))
    made.close()


def _whole(path: str) -> dict[str, np.ndarray]:
    return {name: values for name, _, values in load_pieces(f"{path}-0.npz")}


def _read(whole: dict[str, np.ndarray], box: Box, tensor: Tensor) -> None:
    part = whole[box.name][tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))]
    tensor.numpy()[...] = part


def _run(name: str, layout: str, to: Path, start: Path | None = None) -> list[Path]:
    arguments = {"name": name, "layout": layout, "to": str(to), "start": str(start or "")}
    count = case(layout).world_size
    rank_values(_trained, count, arguments)
    return [Path(f"{to}-{rank}.npz") for rank in range(count)]


def _compare(name: str, layouts: tuple[str, ...], folder: Path) -> None:
    """Each layout from the start, and from a state of one process in the middle."""
    one, half = folder / "one", folder / "half"
    _run(name, "shallow.one", one)
    _run(name, "shallow.one", half)
    for layout in layouts:
        for start in (None, half):
            to = folder / f"{layout}-{bool(start)}"
            assert_all_state(_whole(str(one)), _run(name, f"shallow.{layout}", to, start), 1e-10)


@pytest.mark.parametrize("name", _with_slow(ELEMENTWISE, "lion"))
def test_zero_1_agrees_with_one_process(name: str, tmp_path: Path) -> None:
    _compare(name, ("zero1.2",), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_each_cut_agrees_with_one_process(name: str, tmp_path: Path) -> None:
    _compare(name, ("zero2.2", "shard2", "tp2", "pp2", "dp2-shard2"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", f"{MODULE}:Scaled"])
def test_stages_agree_with_one_process(name: str, tmp_path: Path) -> None:
    _compare(name, ("pp2", "dp2"), tmp_path)
