"""A node of a sharded replica is lost for good, by real kills: an idle one takes its rank (rung 3);
where no other is left, another layout of what is left goes on (rung 4). Nobody holds the lost
part alive, so both go on from memory, the lost part from the copy on another node."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.elastic.faults.armed import Armoury, Order
from holdfast.events import (
    CheckpointRestored,
    GenerationStarted,
    RestorePointFound,
    SnapshotKept,
    StepDone,
)
from tests.cli.support import within
from tests.nodes import Nodes, nodes_of

STEPS, FIRST, SECOND = 24, 8, 16
SETTINGS = (
    f"train.steps={STEPS}", "train.batch_size=6", "train.evaluate.every=0",
    "train.precision=float64", "train.microbatch_size=2", "checkpoint.every_steps=1000",
)  # fmt: skip
SHARDED = (
    "checkpoint.memory_every_steps=1", "layout.workers=2", "layout.dp_shard=2",
    "cluster.min_nodes=1", "cluster.gather_seconds=120",
    "cluster.compare=false",  # who is held up in a step is not to be named for it
)  # fmt: skip


def test_a_spare_node_takes_the_rank_and_then_what_is_left_another_layout(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    gate = Armoury(tmp_path / "gate")
    gate.prepare(FIRST)
    settings = (*SETTINGS, *SHARDED, f"cluster.faults={gate.folder}")
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start("a", "b", "c")
        nodes.wait_step(FIRST)
        (spare,) = {*"abc"} - (first := nodes.nodes(nodes.newest))
        ready = nodes.folder / "logs" / f"standby1.{spare}.log"
        nodes.wait_until(ready.exists, f"{spare} was not taken in")
        stays = nodes.leader if nodes.leader in first else min(first)
        _lose_in_step(nodes, gate, FIRST + 1, {stays, spare})
        gate.open_gate(SECOND)
        nodes.wait_step(SECOND, after=1)
        _lose_in_step(nodes, gate, SECOND + 1, {stays})
        gate.open_gate(STEPS)
        assert nodes.end() == {stays: 0}, nodes.story()

        begun = nodes.events(GenerationStarted)
        story = [(e.rung, e.step, set(e.topology["nodes"]), e.came_from) for e in begun[1:]]
        assert story == [
            (3, FIRST, {stays, spare}, None), (4, SECOND, {stays}, None),
        ], nodes.story()  # fmt: skip
        found = nodes.events(RestorePointFound)
        assert [(e.step, e.durable) for e in found] == [(FIRST, False), (SECOND, False)]
        restored = {(e.step, e.rank): set(e.sources) for e in nodes.events(CheckpointRestored)}
        rank = begun[1].topology["nodes"].index(spare)
        assert restored[FIRST, rank] == {f"peer {stays}"}
        assert restored[FIRST, 1 - rank] == restored[SECOND, 0] == {"memory"}
        done = [event.step for event in nodes.events(StepDone)]
        assert sorted(done) == list(range(1, STEPS + 1)), "only steps in flight were done again"
        losses = nodes.losses()
        assert losses == pytest.approx(undisturbed, rel=1e-10, abs=0.0)
        audit = within("data", "audit", nodes.folder)
        assert audit.code == 0, audit.out
        assert "none missing, none twice" in audit.out


def _lose_in_step(nodes: Nodes, gate: Armoury, step: int, left: set[str]) -> None:
    """Kill the agent of the node that is not `left`, and all of it, while `step` is being computed
    and both halves of the state before it lie on both nodes."""
    topology = nodes.events(GenerationStarted)[-1].topology["nodes"]
    (lost,) = {*topology} - left
    gate.arm(Order(step, "wait", "wait", "forward", step, topology.index(lost)))
    gate.open_gate(step)
    nodes.wait_until(lambda: gate.hit(step), f"step {step} did not begin")
    nodes.wait_until(
        lambda: sum(e.step == step - 1 for e in nodes.events(SnapshotKept)) == 2,
        f"no copies of step {step - 1}",
    )
    before = nodes.newest
    nodes.kill(lost)
    nodes.wait_generation(left, before)
