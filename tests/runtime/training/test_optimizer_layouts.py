"""Promise 1 with each optimizer, and with state in bf16 and 8 bits. It is bit-equal on replicas,
1e-10 under ZeRO, and across a restore in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.run import RunConfig
from holdfast.core.sharding.run_table import run_state_table
from holdfast.tasks.choose import open_task
from holdfast.training.engine.engine import StepEngine
from tests.runtime.training.test_recover import POINTS, survivors
from tests.support.layouts import (
    DTYPES,
    assert_all_state,
    case,
    config_of,
    curve_of,
    engine_for,
    load_complete,
    pieces,
    restore,
    save_pieces,
)
from tests.support.marks import in_campaign
from tests.support.optimizers import ELEMENTWISE, MODULE, OPTIMIZERS, optimizer_config
from tests.support.ranks import RankContext, rank_values
from tests.support.step_recovery import assert_undisturbed, undisturbed

HALF, STEPS = 3, 6
SHORT = ("state8bit", "statebf16")
"""AdamW whose moments take fewer bits."""
QUICK = ("muon", "state8bit")


def _config(name: str, layout: str, **changes: Any) -> RunConfig:
    if name.startswith("state"):
        return config_of(case(f"{name}.{layout}").changes)
    return optimizer_config(name, layout, **changes)


def _engine(rank: RankContext, config: RunConfig, layout: str) -> StepEngine:
    made = engine_for(rank, layout, config, task=open_task(config))
    table = {spec.name: spec for spec in run_state_table(config)}
    for local in made.state():
        assert local.global_shape == table[local.name].shape
        assert DTYPES[table[local.name].dtype] == local.tensor.dtype
    return made


def _curve(rank: RankContext, name: str, layout: str) -> dict[str, Any]:
    made = _engine(rank, _config(name, layout, train__precision="fp32"), layout)
    found = curve_of(made, STEPS)
    assert len(set(found["losses"])) == STEPS
    made.close()
    return found


@pytest.mark.parametrize(
    "name", [name if name in QUICK else in_campaign(name) for name in (*OPTIMIZERS, *SHORT)]
)
def test_replicas_change_no_bit(name: str) -> None:
    curves = [
        curve
        for layout in ("one", "dp2", "dp3")
        for curve in rank_values(
            _curve, case(layout).world_size, {"name": name, "layout": f"shallow.{layout}"}
        )
    ]
    assert all(curve == curves[0] for curve in curves)


KILLS = [(name, when) for name in ("sgd", "lion", "adafactor", "muon") for when in POINTS]
KILLS += [(short, when) for short in SHORT for when in ("forward", "voted", "applied")]


@pytest.mark.parametrize(
    ("name", "when"), [kill if kill == ("muon", "voted") else in_campaign(*kill) for kill in KILLS]
)
def test_one_of_three_replicas_is_killed(name: str, when: str) -> None:
    """At a point of a step; the other ranks continue from their own state."""
    found = survivors(f"{name}.dp3", 2, when, f"{name}.dp2", [0, 1])
    assert len(found) == 2
    assert_undisturbed(found, f"{name}.one")


@pytest.mark.slow
@pytest.mark.parametrize("short", SHORT)
def test_state_moves_to_a_replica_that_joins(short: str) -> None:
    """A newcomer gets the state of the survivors, by messages."""
    found = survivors(f"{short}.dp2", 1, "forward", f"{short}.dp2", [0, None])
    (alone,) = undisturbed(f"{short}.one")
    for value in found:
        assert value["digest"] == alone["digest"]


def _trained(rank: RankContext, name: str, layout: str, to: str, start: str) -> list[float]:
    """Six steps, or the last three of them from a state. Write the state after three and after
    six; return the losses of the last three."""
    made = _engine(rank, _config(name, layout), layout)
    if start:
        restore(made, load_complete(start), HALF)
    else:
        curve_of(made, HALF)
    save_pieces(f"{to}-half-{rank.rank}.npz", pieces(made))
    losses: list[float] = curve_of(made, STEPS)["losses"]
    save_pieces(f"{to}-last-{rank.rank}.npz", pieces(made))
    made.close()
    return losses


CUTS = ("zero2.2", "shard2", "pp2", "dp2-shard2")


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        *(("lion", ("zero1.2",)), ("state8bit", ("zero1.2",))),
        *(in_campaign(name, ("zero1.2", "tp2", *CUTS)) for name in ELEMENTWISE),
        *(in_campaign(name, ("pp2", "dp2")) for name in ("adafactor", f"{MODULE}:Scaled")),
        in_campaign("state8bit", ("zero1.3", *CUTS)),
        in_campaign("statebf16", ("zero1.2", "zero1.3", "tp2", *CUTS)),
        in_campaign("state8bit.wide", ("tp2", "dp2-tp2", "pp2-tp2")),  # cut between blocks
    ],
)
def test_each_cut_agrees_with_one_process(
    name: str, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    """From the start, and from the bits of one process in the middle. Short state is rounded where
    it is cut, so its losses are near, and only after a restore."""

    def run(layout: str, start: Path | str = "") -> tuple[list[list[float]], list[list[Path]]]:
        to, size = tmp_path / f"{layout}{bool(start)}", case(layout).world_size
        arguments = {"name": name, "layout": f"shallow.{layout}", "to": str(to)}
        losses = rank_values(_trained, size, {**arguments, "start": str(start)})
        files = [[Path(f"{to}-{at}-{rank}.npz") for rank in range(size)] for at in ("half", "last")]
        return losses, files

    (expected,), ((half,), (last,)) = run("one")
    for layout in layouts:
        losses, (restored, ended) = run(layout, half)
        assert_all_state(load_complete(half), restored, 0.0)
        if name.startswith("state"):
            np.testing.assert_allclose(losses, [expected] * len(losses), rtol=2e-3)
            continue
        for files in (ended, run(layout)[1][1]):
            assert_all_state(load_complete(last), files, 1e-10)
