"""A node of a sharded replica is lost for good, by real kills. An idle node takes its rank (rung
3). If no idle node is left, the rest continues with another layout (rung 4). No live process holds
the lost part. So both resume from memory, the lost part from the copy on another node."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from holdfast.elastic.protocol.fault_orders import FaultOrder, FaultOrders
from holdfast.events import (
    CheckpointRestored,
    GenerationStarted,
    RestorePointFound,
    SnapshotKept,
    StepDone,
)
from tests.support.nodes import Nodes, nodes_of
from tests.support.ranks import wait_until

STEPS, FIRST, SECOND = 24, 8, 16
KEPT_SECONDS = 20.0
"""A state that no other node holds by then is held by none."""
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "train.precision=float64",
    "train.microbatch_size=2",
    "checkpoint.every_steps=1000",
)
SHARDED = (
    "checkpoint.memory_every_steps=1",
    "layout.workers=2",
    "layout.dp_shard=2",
    "cluster.min_nodes=1",
    "cluster.gather_seconds=120",
    "cluster.compare=false",  # who is held up in a step is not to be named for it
)


def test_a_spare_node_takes_the_rank_and_then_what_is_left_another_layout(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    gate = FaultOrders(tmp_path / "gate")
    gate.prepare(FIRST)
    settings = (*SETTINGS, *SHARDED, f"cluster.faults={gate.folder}")
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start("a", "b", "c")
        one = _held_on_both(nodes, gate, range(FIRST, SECOND - 1))
        (spare,) = {*"abc"} - (first := nodes.nodes(nodes.newest))
        ready = nodes.local(spare) / "logs" / f"standby1.{spare}.log"
        nodes.wait_until(ready.exists, f"{spare} was not taken in")
        stays = nodes.leader if nodes.leader in first else min(first)
        _lose_in_step(nodes, gate, one + 1, {stays, spare})
        two = _held_on_both(nodes, gate, range(SECOND, STEPS), after=1)
        _lose_in_step(nodes, gate, two + 1, {stays})
        gate.open_gate(STEPS)
        assert nodes.end() == {stays: 0}, nodes.story()
        assert nodes.leader == "", "the run is over, and its term is not closed"

        begun = nodes.events(GenerationStarted)
        story = [(e.rung, e.step, set(e.topology["nodes"]), e.came_from) for e in begun[1:]]
        assert story == [(3, one, {stays, spare}, None), (4, two, {stays}, None)], nodes.story()
        found = nodes.events(RestorePointFound)
        assert [(e.step, e.durable) for e in found] == [(one, False), (two, False)]
        restored = {(e.step, e.rank): set(e.sources) for e in nodes.events(CheckpointRestored)}
        rank = begun[1].topology["nodes"].index(spare)
        assert restored[one, rank] == {f"peer {stays}"}
        assert restored[one, 1 - rank] == restored[two, 0] == {"memory"}
        done = [event.step for event in nodes.events(StepDone)]
        assert sorted(done) == list(range(1, STEPS + 1)), "only steps in flight were done again"
        nodes.assert_same_run(undisturbed, 1e-10)


def _held_on_both(nodes: Nodes, gate: FaultOrders, steps: range, after: int = 0) -> int:
    """Return the first of these steps, done after that generation, whose state is on both nodes. A
    copy is skipped if a busy machine is still sending earlier ones."""
    for step in steps:
        gate.open_gate(step)
        nodes.wait_step(step, after)
        with suppress(TimeoutError):
            wait_until(
                lambda step=step: (  # type: ignore[misc]
                    len({e.peer for e in nodes.events(SnapshotKept) if e.step == step}) == 2
                ),
                KEPT_SECONDS,
                pause_s=0.05,
            )
            return step
    raise AssertionError(f"no copies of any step of {steps}\n{nodes.story()}")


def _lose_in_step(nodes: Nodes, gate: FaultOrders, step: int, left: set[str]) -> None:
    """Kill the agent of the node that is not `left`, and all of it, while `step` is computed."""
    topology = nodes.events(GenerationStarted)[-1].topology["nodes"]
    (lost,) = {*topology} - left
    gate.arm(FaultOrder(step, "wait", "wait", "forward", step, topology.index(lost)))
    gate.open_gate(step)
    nodes.wait_until(lambda: gate.read_hit(step), f"step {step} did not begin")
    before = nodes.newest
    nodes.kill(lost)
    nodes.wait_generation(left, before)
