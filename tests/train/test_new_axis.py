"""A new axis needs one file: context parallelism, which the package does not have, trains.

The file is `tests/support/context_parallel.py`. `with_context_axis` changes the lines that
docs/axes.md names, in the rank's own process. All else follows from Topology and tables: gradients,
vote, clipping, optimizer, products with other axes, replicas of unlike shapes, checkpoints,
rebuilds.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.model import ModelConfig
from holdfast.core.sharding.boxes import coverage_problem
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.reshard_plan import plan_reshard
from holdfast.core.sharding.state_table import local_boxes, state_table
from holdfast.layout import Layout, place_replicas
from holdfast.parallel import process_groups
from holdfast.train import engine, executors, task, vote
from tests.support.context_parallel import apply_context_parallel
from tests.support.layouts import (
    Case,
    assert_all_state,
    config_of,
    engine_of,
    load_pieces,
    one_step,
    pieces,
    save_pieces,
    topology_of,
)
from tests.support.ranks import RankContext, rank_values

STEPS = 3
ONE = Layout()

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "cp2": (Layout(cp=2),),
    "shard2-cp2": (Layout(dp_shard=2, cp=2),),
    "cp2-tp2": (Layout(cp=2, tp=2),),
    "pp2-cp2": (Layout(pp=2, cp=2),),
    "cp3+tp2+one": (Layout(cp=3), Layout(tp=2), ONE),
}


def case_of(name: str) -> Case:
    return Case(name, LAYOUTS.get(name, (ONE,)))


def with_context_axis(degree: int) -> None:
    """The lines outside of the new file, in this process; `degree`: of cp in my replica."""
    decoder: Any = task.DecoderTask
    deciding: Any = vote
    stepping: Any = engine
    pipelined: Any = executors.PipelinedExecutor
    connecting: Any = process_groups
    cut_model, speaks, boundary = decoder.objective, deciding.reports_losses, pipelined.boundary

    def with_context(self: Any, connected: process_groups.ProcessGroups) -> Any:
        objective = cut_model(self, connected)
        if degree > 1:
            apply_context_parallel(objective, connected.axis("cp"))
        return objective

    def of_my_tokens(self: Any, batch: Any) -> Any:
        mine = batch.inputs[:, : batch.inputs.shape[1] // degree]
        return boundary(self, replace(batch, inputs=mine))

    connecting._check = lambda *_: None  # which refuses cp
    decoder.objective = with_context
    stepping.reports_losses = deciding.reports_losses = lambda replica, at: (
        at.cp == 0 and speaks(replica, at)
    )
    pipelined.boundary = of_my_tokens


def body(rank: RankContext, name: str) -> dict[str, Any]:
    """Train; what remains goes into the folder."""
    config = config_of({})
    topology = topology_of(case_of(name), config)
    with_context_axis(topology.replica_of(rank.rank).degree("cp"))
    made = engine_of(config, topology, rank.rank, rank.store())
    verdicts = [one_step(made, step) for step in range(1, STEPS + 1)]
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces(made))
    made.close()
    return {
        "losses": [v.mean_loss for v in verdicts],
        "norms": [v.mean_norm for v in verdicts],
        "tokens": [v.tokens for v in verdicts],
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    (value,) = rank_values(body, 1, {"name": "one"}, folder=folder)
    return value, {name: values for name, _, values in load_pieces(folder / "0.npz")}


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_curve(
    name: str, alone: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    expected, whole = alone
    world = case_of(name).world_size
    for value in rank_values(body, world, {"name": name}, folder=tmp_path, deadline=120):
        np.testing.assert_allclose(value["losses"], expected["losses"], rtol=1e-10, atol=0)
        np.testing.assert_allclose(value["norms"], expected["norms"], rtol=1e-10, atol=0)
        assert value["tokens"] == expected["tokens"]
    assert_all_state(whole, [tmp_path / f"{rank}.npz" for rank in range(world)], 1e-10)


def model() -> ModelConfig:
    return config_of({}).model


@pytest.mark.parametrize("name", LAYOUTS)
def test_checkpoints(name: str) -> None:
    """Ranks along the axis hold the same boxes and share out who saves them: each byte once."""
    topology, table = topology_of(case_of(name), config_of({})), state_table(model())
    saved = [owned_boxes(topology, table, rank) for rank in range(topology.world_size)]
    for spec in table:
        boxes = [box for owned in saved for box in owned if box.name == spec.name]
        assert coverage_problem(spec.shape, boxes) is None
        assert sum(box.size for box in boxes) == prod(spec.shape)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("back", [False, True])
def test_rebuilds(name: str, back: bool) -> None:
    """From and to a layout without it, every rank gets all that it needs."""
    there = topology_of(case_of(name), config_of({}))
    world = there.world_size
    without = place_replicas([Layout(dp_shard=world)], 1, ("n",) * world)
    old, new = (there, without) if back else (without, there)
    table = state_table(model())
    for rank in range(world):
        moves = plan_reshard(old, new, table, range(world), rank)
        got = [*moves.copies, *(transfer.box for transfer in moves.receives)]
        for box in local_boxes(new, table, rank):
            assert sum(one.size for one in got if one.name == box.name) == box.size
