"""Progress lines of a run: a problem that lasts is said once."""

from __future__ import annotations

from holdfast.events import CheckpointCommitted, CheckpointSkipped, Event, Record, ShardAwaited
from holdfast.report.history.progress import RunProgress


def lines_of(*events: Event) -> list[str]:
    progress = RunProgress(total_steps=10)
    return [
        line.text
        for number, event in enumerate(events)
        for line in progress.observe(Record(1, "a", number, float(number), event))
    ]


def test_snapshots_that_are_not_taken_are_said_once_until_a_checkpoint_is_committed() -> None:
    away = [
        CheckpointSkipped(rank, "the bucket is away", step=n) for n in (2, 4) for rank in (0, 1)
    ]
    committed = CheckpointCommitted("commits/6", 10, 0.1, step=6)
    said = lines_of(*away, committed, committed, *away)
    assert said[0] == "rank 0 took no snapshot of step 2: the bucket is away"
    assert said[1].startswith("checkpoints can be saved again: checkpoint of step 6 committed")
    assert said[2].startswith("checkpoint of step 6 committed")
    assert said[3:] == said[:1]


def test_a_shard_that_several_ranks_wait_for_is_said_once() -> None:
    waits = [ShardAwaited(rank, "a/0.bin", "503") for rank in (0, 1)]
    ends = [ShardAwaited(rank, "a/0.bin") for rank in (0, 1)]
    assert lines_of(*waits, *ends) == [
        "rank 0 waits for a/0.bin of the dataset: 503",
        "a/0.bin of the dataset, which rank 0 waited for, is here",
    ]
