"""A replica is lost and the other replicas are complete. They continue at once without it (rung 0),
and its replacement joins at a later step boundary. From outside, with real kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.events import GenerationStarted, WorkerStarted
from tests.support.nodes import nodes_of

STEPS = 400
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "train.precision=float64",
    "train.microbatch_size=2",
    "checkpoint.every_steps=1000",
    "cluster.threads_per_worker=1",
)


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "rel"), [(1, 0.0), (2, 1e-10)])
def test_the_others_go_on_at_once_and_are_joined_later(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path, shards: int, rel: float
) -> None:
    """Three replicas of one worker, or two of two: then the remaining worker of the broken one
    waits."""
    workers = 3 if shards == 1 else 4
    with nodes_of(
        run_file,
        tmp_path / "run",
        *SETTINGS,
        f"layout.workers={workers}",
        f"layout.dp_shard={shards}",
    ) as nodes:
        nodes.start("a", settings=[f"cluster.places={workers}"])
        nodes.wait_step(10)
        first = {event.rank: event.pid for event in nodes.events(WorkerStarted)}
        os.kill(first[1], signal.SIGKILL)
        nodes.wait_step(20, after=2)
        nodes.signal("a", signal.SIGINT)
        assert set(nodes.end().values()) == {0}, nodes.story()

        begun = nodes.events(GenerationStarted)
        story = [
            (event.rung, event.reason, len(event.topology["nodes"]), event.came_from)
            for event in begun
        ]
        left = [0, 2] if shards == 1 else [2, 3]
        grown = [0, 1, None] if shards == 1 else [0, 1, None, None]
        assert story[:3] == [
            (-1, "start", workers, None),
            (0, "worker_lost", workers - shards, left),
            (5, "worker_joined", workers, grown),
        ], nodes.story()
        assert len(begun) == 3, "one pause for one newcomer"
        started = {event.pid for event in nodes.events(WorkerStarted)}
        assert len(started) == workers + 1, "whoever was not hit keeps its process"
        last = max(nodes.losses())
        nodes.assert_same_run({step: undisturbed[step] for step in range(1, last + 1)}, rel)
