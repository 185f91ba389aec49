"""A hung worker is named and replaced, and the other workers continue live. A worker that only gets
little CPU time is not named. Nothing here waits for `cluster.progress_seconds`, which are 300. A
worker that is slow gets fewer microbatches, and the curve stays that of an undisturbed run. The
processes are real, and one of them takes longer for each microbatch."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.elastic.protocol.fault_orders import FaultOrder, FaultOrders
from holdfast.events import (
    BatchFed,
    GenerationStarted,
    StateDiffers,
    StepDone,
    WorkerLost,
    WorkerPaced,
    WorkerStarted,
)
from tests.support.commands import start, within
from tests.support.nodes import Nodes, losses_of_one_worker, nodes_of, prepared

STEPS = 90
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=8",
    "train.evaluate.every=25",
    "checkpoint.every_steps=25",
    "layout.workers=4",
)
FIVE = 5
"""A deadline that is behaviour is tested at so many times its limit."""


@contextmanager
def _busy_cores() -> Iterator[None]:
    """Run two busy loops meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _live(run: Nodes) -> bool:
    """Return True if every generation but the first continued with the state of live processes."""
    return all(e.came_from is not None for e in run.events(GenerationStarted)[1:])


def _in_time(run: Nodes, begun: float, rank: int) -> None:
    """The generation without `rank` began soon after it was stopped: within three normal steps and
    a second. Here it may take five times as long, because other tests run on the same cores."""
    records = run.records()
    before = [r.time for r in records if isinstance(r.event, StepDone) and r.time < begun]
    normal = statistics.median(b - a for a, b in pairwise(before))
    started, event = next(
        (r.time, r.event)
        for r in records
        if isinstance(r.event, GenerationStarted) and r.time >= begun
    )
    assert event.came_from is not None
    assert rank not in event.came_from
    assert started - begun <= FIVE * (3 * normal + 1.0), run.story()


@pytest.mark.slow
def test_nobody_is_named_while_two_loops_keep_both_cores_busy(
    run_file: Path, undisturbed: dict[int, float]
) -> None:
    folder = run_file.parent / "busy"
    with nodes_of(run_file, folder) as run:
        run.agents["busy"] = start("train", run_file, f"folder={run.outside}", *SETTINGS)
        run.wait_step(1)
        with _busy_cores():
            assert run.end() == {"busy": 0}, run.story()
        assert run.events(WorkerLost) == []
        assert len(run.events(GenerationStarted)) == 1
        assert run.losses() == undisturbed, run.story()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["ab", "a"])
def test_a_worker_that_is_stopped_is_named_and_killed(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path, nodes: str
) -> None:
    with nodes_of(run_file, tmp_path / "run", *SETTINGS) as run:
        run.start(*nodes, settings=[f"cluster.places={4 // len(nodes)}"])
        run.wait_step(20, nodes=set(nodes))
        stopped = next(e for e in run.events(WorkerStarted) if e.rank == 2)
        begun = time.time()
        os.kill(stopped.pid, signal.SIGSTOP)
        assert set(run.end().values()) == {0}, run.story()
        _in_time(run, begun, 2)
        (lost,) = run.events(WorkerLost)
        assert (lost.rank, lost.pid, lost.node) == (2, stopped.pid, stopped.node)
        assert lost.noticed_by == "stopped"
        assert lost.cause.startswith("its process was stopped for ")
        assert not Path(f"/proc/{stopped.pid}").exists()
        assert _live(run)
        assert run.losses() == undisturbed, run.story()


@pytest.mark.slow
def test_a_node_that_is_stopped_is_done_without_and_joins_again_when_it_wakes(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    """Its agent with its worker: when they wake up, they are fenced."""
    settings = [
        *SETTINGS,
        "layout.workers=3",
        "cluster.min_nodes=2",
        "cluster.gather_seconds=120",
        f"cluster.faults={tmp_path}",
    ]
    gate = FaultOrders(tmp_path)
    gate.prepare(20)
    with nodes_of(run_file, tmp_path / "run", *settings) as run:
        run.start("a", "b", "c")
        run.wait_step(20, nodes={"a", "b", "c"})
        stopped = next(e for e in run.events(WorkerStarted) if e.node != run.leader)
        gate.open_gate(60)
        begun = time.time()
        run.signal(stopped.node, signal.SIGSTOP)
        os.kill(stopped.pid, signal.SIGSTOP)
        run.wait_step(21, nodes={"a", "b", "c"} - {stopped.node})
        _in_time(run, begun, stopped.rank)
        (lost,) = run.events(WorkerLost)
        assert (lost.rank, lost.node, lost.noticed_by) == (stopped.rank, stopped.node, "heartbeat")
        run.signal(stopped.node, signal.SIGCONT)
        os.kill(stopped.pid, signal.SIGCONT)
        before = run.newest
        gate.open_gate(10 * STEPS)
        run.wait_step(22, after=before, nodes={"a", "b", "c"})
        assert set(run.end().values()) == {0}, run.story()
        assert run.losses() == undisturbed, run.story()


def test_a_worker_that_hangs_is_named_wherever_it_does(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    """In turn, the worker never comes to the reduction, holds the complete gradient and never
    votes, and holds the interpreter. In the last case it reports nothing at all. No system call or
    signal shows that."""
    armoury = FaultOrders(tmp_path)
    armoury.prepare()
    deeds = (
        ("hang", "forward", "behind"),
        ("hang", "reduced", "behind"),
        ("hold the GIL", "backward", "silent"),
    )
    for number, (deed, point, _) in enumerate(deeds, 1):
        armoury.arm(FaultOrder(number, deed, deed, point, 20 * number, number))
    settings = [*SETTINGS, f"cluster.faults={tmp_path}"]
    with nodes_of(run_file, tmp_path / "run", *settings) as run:
        run.start("a", "b", settings=["cluster.places=2"])
        assert set(run.end().values()) == {0}, run.story()
        lost = run.events(WorkerLost)
        assert [e.noticed_by for e in lost] == [sign for *_, sign in deeds], run.story()
        hits = [armoury.read_hit(number) for number in range(1, 4)]
        assert [e.pid for e in lost] == [hit.pid for hit in hits if hit is not None]
        assert all("while others wait for it" in e.cause for e in lost)
        assert _live(run)
        assert run.losses() == undisturbed, run.story()


@pytest.mark.slow
def test_a_worker_that_hangs_inside_a_replica_is_named_and_not_its_partner(
    run_file: Path, tmp_path: Path
) -> None:
    """Its partner waits at the same point, in an exchange with it; both are behind the other
    workers."""
    armoury = FaultOrders(tmp_path)
    armoury.prepare()
    for number, point in enumerate(("forward", "backward"), 1):
        armoury.arm(FaultOrder(number, "hang", "hang", point, 10 * number, number))
    settings = [*SETTINGS, "layout.tp=2", "train.steps=30", f"cluster.faults={tmp_path}"]
    with nodes_of(run_file, tmp_path / "run", *settings) as run:
        run.start("a", settings=["cluster.places=4"])
        assert set(run.end().values()) == {0}, run.story()
        lost = run.events(WorkerLost)
        hits = [armoury.read_hit(number) for number in (1, 2)]
        assert [e.pid for e in lost] == [hit.pid for hit in hits if hit is not None], run.story()
        assert [e.noticed_by for e in lost] == ["behind", "behind"]


@pytest.mark.slow
def test_a_worker_that_hangs_while_all_are_to_end_their_step_is_named(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    """A node is to leave: its going waits for the end of a step, which does not come."""
    armoury = FaultOrders(tmp_path)
    armoury.prepare()
    armoury.arm(FaultOrder(1, "hang", "hang", "reduced", 20, 2))
    settings = [*SETTINGS, f"cluster.faults={tmp_path}", "cluster.min_nodes=1"]
    with nodes_of(run_file, tmp_path / "run", *settings) as run:
        run.start("a", "b", settings=["cluster.places=2"])
        run.wait_until(lambda: armoury.read_hit(1), "no hang")
        hit = armoury.read_hit(1)
        assert hit is not None
        (leaves,) = {"a", "b"} - {hit.node}
        run.signal(leaves, signal.SIGTERM)
        assert set(run.end().values()) == {0}, run.story()
        (lost,) = run.events(WorkerLost)
        assert (lost.pid, lost.noticed_by) == (hit.pid, "behind"), run.story()
        assert run.losses() == undisturbed, run.story()


@pytest.mark.slow
def test_a_worker_whose_state_is_not_that_of_the_others_takes_theirs(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    armoury = FaultOrders(tmp_path)
    armoury.prepare()
    armoury.arm(FaultOrder(1, "corrupt", "corrupt state", "applied", 30, 2))
    settings = [*SETTINGS, "cluster.check_every_steps=10", f"cluster.faults={tmp_path}"]
    with nodes_of(run_file, tmp_path / "run", *settings) as run:
        run.start("a", settings=["cluster.places=4"])
        assert set(run.end().values()) == {0}, run.story()
        (found,) = run.events(StateDiffers)
        assert (found.step, found.ranks, found.sure) == (30, [2], True)
        assert found.tensors == ["model.embed.weight"]
        assert _live(run)
        assert len(run.events(GenerationStarted)[-1].topology["nodes"]) == 4
        assert run.losses() == undisturbed, run.story()


@pytest.mark.slow
def test_nobody_is_named_in_two_thousand_undisturbed_steps(run_file: Path, tmp_path: Path) -> None:
    """In the second half both cores are busy. `benchmarks.runtime.noticing undisturbed` tells the
    pace."""
    steps = 2000
    settings = (
        *SETTINGS,
        f"train.steps={steps}",
        "checkpoint.every_steps=100",
        "cluster.min_nodes=4",
    )
    with nodes_of(run_file, tmp_path / "run", *settings) as run:
        run.start(*"abcd")
        for step in range(100, steps // 2 + 1, 100):  # each has a deadline of its own
            run.wait_step(step, nodes={*"abcd"})
        with _busy_cores():
            for step in range(steps // 2 + 100, steps + 1, 100):
                run.wait_step(step)
        assert set(run.end().values()) == {0}, run.story()
        assert [*run.events(WorkerLost), *run.events(WorkerPaced)] == []
        assert len(run.events(GenerationStarted)) == 1
        assert sorted(run.losses()) == list(range(1, steps + 1))


SLOW_STEPS = 120  # five times what it takes to be sure of it, as one is compared at each step
SLOW = (
    f"train.steps={SLOW_STEPS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=1000",
)


@pytest.mark.slow
def test_a_slow_worker_gets_fewer_microbatches_of_the_same_steps(tmp_path: Path) -> None:
    run_file = prepared(tmp_path / "run-file")
    undisturbed = losses_of_one_worker(run_file, *SLOW)
    faults = FaultOrders(tmp_path / "faults")
    faults.prepare()
    faults.set_slow_ranks({1: 0.1})
    settings = (*SLOW, "layout.workers=2", f"cluster.faults={faults.folder}")
    with nodes_of(run_file, tmp_path / "run", *settings) as run:
        # Compared at each heartbeat; with one node, no other node can miss its heartbeats.
        run.start("a", settings=["cluster.places=2", "cluster.beat_seconds=0.2"])
        run.wait_step(1)
        begun = run.newest
        run.wait_step(1, after=begun)
        slow = next(e for e in run.events(WorkerStarted) if e.rank == 1)
        paced = run.events(WorkerPaced)[0]
        assert (paced.pid, paced.pace) == (slow.pid, "slow"), run.story()
        assert paced.slower >= 2
        first, then = run.events(GenerationStarted)[:2]
        assert (then.reason, then.came_from) == ("slow_worker", [0, 1]), run.story()
        assert [r.get("weight", 1) for r in first.topology["replicas"]] == [1, 1]
        quick, less = (r.get("weight", 1) for r in then.topology["replicas"])
        assert quick >= 2 * less
        assert _share(run.events(BatchFed), 1) == 3
        assert _share(run.events(BatchFed), then.step + 1) < 3
        faults.set_slow_ranks({})
        assert set(run.end().values()) == {0}, run.story()
        assert run.events(WorkerLost) == [], "nobody is lost by it"
        assert run.losses() == undisturbed, run.story()
        within("data", "audit", run.outside).succeeds()


def _share(fed: list[BatchFed], step: int) -> int:
    """Of a step, the microbatches of rank 1."""
    said = Counter({(e.rank, e.step): len({x["microbatch"] for x in e.entries}) for e in fed})
    return said[1, step]
