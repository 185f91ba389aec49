"""A worker that is slow gets fewer microbatches, and the curve stays that of an undisturbed run.
The processes are real, and one of them takes longer for each microbatch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import BatchFed, GenerationStarted, WorkerLost, WorkerPaced, WorkerStarted
from tests.support.commands import within
from tests.support.nodes import losses_of_one_worker, nodes_of, prepared

STEPS = 120  # five times what it takes to be sure of it, as one is compared at each step
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=1000",
)


@pytest.mark.slow
def test_a_slow_worker_gets_fewer_microbatches_of_the_same_steps(tmp_path: Path) -> None:
    run_file = prepared(tmp_path / "run-file")
    undisturbed = losses_of_one_worker(run_file, *SETTINGS)
    faults = FaultOrders(tmp_path / "faults")
    faults.prepare()
    faults.set_slow_ranks({1: 0.1})
    settings = (*SETTINGS, "layout.workers=2", f"cluster.faults={faults.folder}")
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
