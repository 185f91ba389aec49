"""Asynchronous schedules: the curve that their rules say, and the versions of weights that they
hold.

A second opinion (`tests/support/late_gradients.py`) computes each gradient in one process with the
weights that the rules name. In float64 the pipeline has its curve within 1e-10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.run import RunConfig
from holdfast.options.asynchronous.cost import weight_versions
from holdfast.options.asynchronous.keys import OptionKeys
from holdfast.options.asynchronous.weight_versions import StageDelay
from holdfast.training.engine.engine import StepEngine
from tests.support.late_gradients import LateExecutor
from tests.support.layouts import (
    LENGTH,
    VOCABULARY,
    Case,
    assert_all_state,
    case,
    config_of,
    engine_for,
    engine_of,
    load_complete,
    model_flags,
    of_one_model,
    pieces,
    pieces_of_curve,
    save_pieces,
    topology_of,
)
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import digest, feed


def train_steps(made: StepEngine, steps: int, first: int = 1) -> list[Any]:
    """Loss, norm, versions held after each step. The executor sees all later microbatches."""
    place, shards = made.groups.coordinate, made.groups.degree("dp_shard")
    fed = {
        step: [
            feed(step, leaf, 4, place.dp_shard, shards, VOCABULARY, LENGTH)
            for leaf in made.plan.share(step)
        ]
        for step in range(first, steps + 1)
    }
    executor: Any = made.executor
    found = []
    for step in range(first, steps + 1):
        made.begin(step)
        if executor.is_asynchronous:
            executor.following = [fed[later] for later in range(step + 1, steps + 1)]
        made.compute(fed[step])
        verdict = made.reduce()
        made.apply(verdict)
        versions = executor.weights.count if executor.is_asynchronous else 1
        found.append((verdict.mean_loss, verdict.mean_norm, versions))
    return found


def config_for(of: Case, steps: int, samples: int) -> Any:
    schedule = {"warmup_steps": min(4, steps // 2)}
    changes = {"train__steps": steps, "train__schedule": schedule, "train__batch_size": samples}
    return config_of({**of.changes, **changes})


def body(rank: RankContext, name: str, steps: int, samples: int) -> dict[str, Any]:
    of = case(name)
    config = config_for(of, steps, samples)
    made = engine_for(rank, name, config)
    found = train_steps(made, steps)
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces_of_curve(made))
    out = {"found": found, "digest": digest(made), "stage": made.groups.coordinate.pp}
    made.close()
    return out


def late_body(rank: RankContext, name: str, steps: int, samples: int) -> list[Any]:
    """What one process says of the pipeline `name`."""
    of = case(name)
    config = config_for(of, steps, samples)
    pp = of.replicas[0].pp
    blocks = list(topology_of(of, config).replicas[0].stages)
    of_block = [stage for stage, count in enumerate(blocks) for _ in range(count)]
    alone = case(model_flags(name) + "one")
    made = engine_of(config_for(alone, steps, samples), topology_of(alone, config), 0, rank.store())
    stage_of = {
        found: of_block[int(found.split(".layers.")[1].split(".")[0])]
        if ".layers." in found
        else 0
        if ".embed." in found
        else pp - 1
        for found, _ in made.objective.named_parameters()
    }
    LateExecutor(made, config.layout.schedule, pp, stage_of, len(of.replicas))
    found = train_steps(made, steps)
    save_pieces(rank.folder / "alone.npz", pieces(made))
    made.close()
    return found


QUICK = [("untied.2bw.pp2", 4, 16)]
LONG = [
    ("untied.2bw.pp4", 8, 32),
    ("untied.2bw.pp2-dp2", 8, 32),
    ("untied.2bw.pp2-tp2", 8, 16),
    ("untied.2bw.pp2-zero1.2", 8, 16),
    ("untied.2bw.pp2-cp2", 8, 16),
    ("untied.full.2bw.pp2", 8, 16),
    ("untied.pipedream.pp2", 8, 16),
    ("untied.pipedream.pp2", 8, 24),
    ("untied.pipedream.pp4", 12, 8),
    ("untied.pipedream.pp4", 8, 12),
    ("untied.pipedream.pp2-dp2", 8, 16),
    ("untied.full.pipedream.pp4", 8, 8),
    ("untied.gathered.pipedream.pp2-dp2", 8, 16),
    ("untied.pipemare.pp2", 8, 16),
    ("untied.pipemare.pp4", 8, 32),
    ("untied.pipemare.pp2-dp2", 8, 32),
]
"""Name, steps, samples of a step: 4 are a microbatch."""


@pytest.mark.parametrize(
    ("name", "steps", "samples"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG)],
)
def test_curve_of_a_second_opinion(name: str, steps: int, samples: int, tmp_path: Path) -> None:
    (name,) = of_one_model(name)
    of, given = case(name), {"name": name, "steps": steps, "samples": samples}
    alone = tmp_path / "one"
    alone.mkdir()
    values = rank_values(body, of.world_size, given, folder=tmp_path, deadline=240)
    (expected,) = rank_values(late_body, 1, given, folder=alone, deadline=240)
    whole = load_complete(alone / "alone.npz")
    for value in values:
        for mine, other in zip(value["found"], expected, strict=True):
            np.testing.assert_allclose(mine[:2], other[:2], rtol=1e-10, atol=0)
    assert_all_state(whole, [tmp_path / f"{rank}.npz" for rank in range(of.world_size)], 1e-10)
    share = samples // 4 // len(of.replicas)
    pp = of.replicas[0].pp
    for value in values:
        most = max(versions for _, _, versions in value["found"])
        if "2bw" in name or "pipemare" in name:
            assert most == (2 if "2bw" in name else 1)
        else:
            assert most == weight_versions(pp, value["stage"], share)


def _again_and_from_a_state(rank: RankContext, name: str) -> dict[str, Any]:
    """Digests: after 6 steps; after the last 3 of them from the state between, twice."""
    of = case(name)
    config = config_for(of, 6, 16)
    made = engine_for(rank, name, config)
    train_steps(made, 3)
    held = {each.name: each.tensor.clone() for each in made.state()}
    found = []
    for _ in range(2):
        made.load(lambda box, out: out.copy_(held[box.name]))
        made.set_applied_step(3)
        executor: Any = made.executor
        executor.forget()
        train_steps(made, 6, first=4)
        found.append(digest(made))
    made.close()
    return {"from_state": found}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["2bw.pp2-dp2", "pipedream.pp4", "untied.pipemare.pp2", "bf16.2bw.pp2"]
)
def test_the_curve_of_a_layout_is_its_own(name: str, tmp_path: Path) -> None:
    """Two runs have the same bits, and so have two that begin from one state."""
    (name,) = of_one_model(name)
    ranks, given = case(name).world_size, {"name": name, "steps": 5, "samples": 16}
    folders = [tmp_path / each for each in ("first", "second", "state")]
    for folder in folders:
        folder.mkdir()
    runs = [rank_values(body, ranks, given, folder=each, deadline=240) for each in folders[:2]]
    assert runs[0] == runs[1]
    for value in rank_values(_again_and_from_a_state, ranks, {"name": name}, folder=folders[2]):
        first, second = value["from_state"]
        assert first == second


def test_pipemare_divides_the_learning_rate_of_a_late_stage() -> None:
    """T1: by tau at first and by 1 from step K on, but never for a stage that is late by less than
    a step."""
    first = StageDelay(4, 0, lambda: 2, 10, 0.135)
    assert first.delay(4) == 3.5  # 7 microbatches, of which a replica has 2 in a step
    assert first.rate_factor(0, 4) == pytest.approx(1 / 3.5)
    assert first.rate_factor(5, 4) == pytest.approx(3.5**-0.5)
    assert first.rate_factor(10, 4) == first.rate_factor(50, 4) == 1
    assert first.share_kept(4) == pytest.approx(0.135 ** (1 / 3.5))
    assert StageDelay(4, 3, lambda: 2, 10, 0.135).rate_factor(0, 4) == 1


def test_the_run_says_once_that_its_curve_is_another() -> None:
    late = {"layout": {"pp": 2, "workers": 2, "schedule": "pipedream"}}
    (line,) = OptionKeys().notices(RunConfig.model_validate(late).layout)
    assert line.startswith("layout.schedule pipedream: gradients are of older weights")
    late["layout"]["pp"] = 1
    assert not list(OptionKeys().notices(RunConfig.model_validate(late).layout))


def _mean_of_last_losses(rank: RankContext, name: str, seed: int) -> float:
    of, steps = case(name), 120
    optimizer = {"learning_rate": 2e-3, "clip_norm": 1.0}
    changes = {"train__steps": steps, "train__batch_size": 16, "train__optimizer": optimizer}
    config = config_of({**of.changes, **changes})
    made = engine_for(rank, name, config)
    made.initialise(seed)
    losses = [loss for loss, _, _ in train_steps(made, steps)]
    made.close()
    return sum(losses[-20:]) / 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_is_near_that_of_1f1b_at_equal_tokens(seed: int) -> None:
    names = ["pp2", "pipedream.pp2", "2bw.pp2", "pipemare.pp2"]
    names = [f"shallow.untied.fp32.{name}" for name in names]
    losses = [
        rank_values(_mean_of_last_losses, 2, {"name": name, "seed": seed}, deadline=240)[0]
        for name in names
    ]
    assert losses == pytest.approx([losses[0]] * 4, rel=0.01)
