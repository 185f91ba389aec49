"""An adaptive interval in the loop: rank 0 decides, all save alike, the journal says why.

The clock is the test's own: every look at it is a second later.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from holdfast.config.checkpoint import CheckpointConfig
from holdfast.config.run import RunConfig
from holdfast.policy.hazard import Hazard
from holdfast.train.cadence import Cadence
from holdfast.train.runner import run
from holdfast.train.vote import Wishes
from tests.ranks import RankContext, rank_values
from tests.train.test_runner import STEPS, World, _config, _session

RULES = CheckpointConfig(interval="adaptive", min_seconds=1, max_seconds=100)


def _steps(cadence: Cadence, steps: int, cost: float = 0.0) -> list[float]:
    """Steps of a second, of which each third saves and takes `cost` longer; seconds, by step."""
    now, out = 0.0, []
    for step in range(steps):
        saved = step % 3 == 2
        now += 1.0 + cost * saved
        cadence.tick(now, cost if saved else None, usual=True)
        out.append(cadence.seconds)
    return out


def test_a_fixed_interval_is_the_run_files() -> None:
    fixed = Cadence(CheckpointConfig(every_seconds=7), None, 1, 0.0)
    assert _steps(fixed, 5) == [7] * 5
    assert CheckpointConfig(every_steps=9).by_steps == 9
    assert RULES.by_steps == 0


def test_dear_saves_and_quiet_runs_are_saved_more_rarely_and_each_change_has_a_reason() -> None:
    cheap, dear = (Cadence(RULES, None, 1, 0.0) for _ in range(2))
    assert _steps(dear, 200, 0.8)[-1] > 2 * _steps(cheap, 200, 0.01)[-1]
    broken = Hazard.prior().after(600, failures=12)
    often = Cadence(RULES, broken, 1, 0.0)
    assert _steps(often, 30, 0.01)[-1] < _steps(Cadence(RULES, None, 1, 0.0), 30, 0.01)[-1]
    told = Cadence(RULES, broken, 1, 0.0).tick(1.0, None, usual=True)
    assert told is not None
    assert told.tier == 2
    assert "(12 failures in 10 min on 1 node)" in told.reason


def test_a_decision_is_told_once_and_a_validation_is_no_cost() -> None:
    cadence = Cadence(RULES, None, 1, 0.0)
    assert cadence.tick(1.0, None, usual=True) is not None
    assert cadence.tick(2.0, None, usual=True) is None
    calm = _steps(Cadence(RULES, None, 1, 0.0), 60, 0.01)[-1]
    now, disturbed = 0.0, Cadence(RULES, None, 1, 0.0)
    for step in range(60):
        saved, validated = step % 3 == 2, step % 5 == 4
        now += 1.0 + 0.01 * saved + 20.0 * validated
        disturbed.tick(now, 0.01 if saved else None, usual=not validated)
    assert disturbed.seconds < 2.5 * calm


def _run(rank: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    session = _session(rank, RunConfig.model_validate(config), "adaptive")
    session.engine.initialise(session.config.seed)
    world, ticks = World(), count()
    with session.loader(0) as loader:
        run(
            session.engine, loader, world, world, world, session.evaluator, session.config,
            rank=rank.rank, start_step=0, clock=lambda: float(next(ticks)),
            hazard=Hazard.prior().after(3600, failures=2),
        )  # fmt: skip
    session.close()
    told = [[e.step, e.tier, e.seconds, e.reason] for e in world.events("save_interval")]
    return {"saved": sorted(world.saved), "told": told}


@pytest.mark.parametrize("seconds", [1.0, 1e6])
def test_rank_0_decides_and_all_save_alike(tmp_path: Any, seconds: float) -> None:
    made = _config(tmp_path, interval="adaptive", min_seconds=seconds, max_seconds=seconds,
                   every_steps=1)  # fmt: skip
    first, second = rank_values(_run, 2, {"config": json.loads(made.model_dump_json())})
    # every_steps is not used: with an endless interval only the end is saved.
    assert (
        first["saved"]
        == second["saved"]
        == (list(range(1, STEPS + 1)) if seconds == 1 else [STEPS])
    )
    assert second["told"] == []
    [[step, tier, told, reason]] = first["told"]
    assert (step, tier, told) == (1, 2, seconds)
    assert "2 failures in" in reason


class _Full(World):
    """A world whose steps take a second and where one rank has no room at some of them."""

    def __init__(self, full: set[int]):
        super().__init__()
        self.now, self._full = 0, full

    def wishes(self, step: int) -> Wishes:
        self.now = step
        return super().wishes(step)

    def ready(self) -> bool:
        return self.now not in self._full


def _owed(rank: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    session = _session(rank, RunConfig.model_validate(config), "owed")
    session.engine.initialise(session.config.seed)
    world = _Full({3, 4} if rank.rank == 1 else set())
    with session.loader(0) as loader:
        run(
            session.engine, loader, world, world, world, session.evaluator, session.config,
            rank=rank.rank, start_step=0, clock=lambda: float(world.now),
        )  # fmt: skip
    session.close()
    skipped = [event.step for event in world.events("checkpoint_skipped")]
    return {"saved": sorted(world.saved), "skipped": skipped}


def test_a_save_by_the_clock_that_found_no_slot_is_owed_at_the_next_step(tmp_path: Any) -> None:
    """Due after three seconds; a rank has no room then, nor a step later: the fifth is saved."""
    made = _config(tmp_path, every_steps=0, every_seconds=3)
    first, second = rank_values(_owed, 2, {"config": json.loads(made.model_dump_json())})
    assert first == {"saved": [5, STEPS], "skipped": [3]}
    assert second == {"saved": [5, STEPS], "skipped": []}
