"""Mode free of learners, from outside: one process computes each round again from the ledger.

Workers are slow, killed or stopped meanwhile. A seed draws the number of workers, the codec, the
fate of late learners and the faults. `HOLDFAST_FREE_LEDGERS` says how many are tried.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from holdfast.core.data.learner_fates import LearnerFate, count_fates
from holdfast.core.data.lineage import split_effective
from holdfast.events import OuterRound, Record, WorkerLost
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import start, within
from tests.support.followed_run import FollowedRun

ROUNDS, INNER_STEPS = 12, 6
SETTINGS = (
    f"train.steps={ROUNDS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "train.schedule.warmup_steps=2",
    "outer.learners=3",
    f"outer.every_steps={INNER_STEPS}",
    "outer.average=token_weighted",
    "outer.mode=free",
    "checkpoint.every_steps=1000",
    "checkpoint.memory_every_steps=1",
    "cluster.threads_per_worker=1",
)
LEDGERS = int(os.environ.get("HOLDFAST_FREE_LEDGERS", "3"))


def _train(run_file: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    return start("train", run_file, f"folder={folder}", *SETTINGS, *more)


@contextmanager
def _slow(pid: int) -> Iterator[None]:
    """Let a process run for a fifth of the time."""
    over = threading.Event()

    def pulse() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(0.08)
                os.kill(pid, signal.SIGCONT)
                over.wait(0.02)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_round(record: Record, number: int) -> bool:
    return isinstance(record.event, OuterRound) and record.event.step >= number


def _ledgers(folder: Path) -> dict[int, list[LearnerFate]]:
    """The ledger of each round that counts."""
    found: dict[int, list[LearnerFate]] = {}
    for record in split_effective(read_journal(FolderStore(folder)))[0]:
        event = record.event
        if isinstance(event, OuterRound) and event.fates:
            found[event.step] = [LearnerFate.from_json(row) for row in event.fates]
    return found


def _check(folder: Path) -> Counter[str]:
    """Every round is computed again to the same bits, and its fates add up. Returns tokens by
    fate."""
    ledgers = _ledgers(folder)
    assert sorted(ledgers) == list(range(1, ROUNDS + 1))
    rounds = [word for number in ledgers for word in ("--round", str(number))]
    said = within("audit", "replay", folder, *rounds).succeeds().out
    assert f"{ROUNDS} of {ROUNDS} hashes of the weights are equal" in said
    fates: Counter[str] = Counter()
    for rows in ledgers.values():
        fates.update(count_fates(rows))
    assert fates.total() == sum(row.tokens + row.rest for rows in ledgers.values() for row in rows)
    return fates


def test_a_round_closes_without_slow_and_lost_workers_and_is_computed_again(
    run_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "free"
    more = "layout.workers=3", "outer.free.quorum=2", "outer.free.grace_seconds=0"
    run = FollowedRun(folder, _train(run_file, folder, *more))
    run.until(lambda record: _is_round(record, 1))
    with _slow(run.pids[2]):
        run.until(lambda record: _is_round(record, 4))
    os.kill(run.pids[1], signal.SIGKILL)
    run.finish()
    assert len(run.events(WorkerLost)) == 1
    fates = _check(folder)
    assert fates["used"] > 0
    assert fates["dropped"] + fates["not_computed"] > 0, "a round closed without the slow one"
    said = json.loads(within("report", folder, "--json").succeeds().out)
    assert said["outer"] == {"mode": "free", "tokens_by_fate": dict(fates)}
    _edit(folder, 6)
    found = within("audit", "replay", folder, "--round", "9")
    assert found.code == 1
    assert "the first: step 6" in found.out


def _edit(folder: Path, number: int) -> None:
    """Let the ledger of a round say that each learner did one inner step less."""
    for segment in (folder / "journal").glob("*/*.jsonl"):
        lines = [json.loads(line) for line in segment.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "outer_round" and line["event"]["step"] == number:
                for row in line["event"].get("fates", ()):
                    row["steps"] = max(0, row["steps"] - 1)
        segment.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(LEDGERS))
def test_any_ledger_is_computed_again(run_file: Path, tmp_path: Path, seed: int) -> None:
    chooser, folder = random.Random(seed), tmp_path / "free"
    more = (
        f"layout.workers={chooser.choice((2, 3))}",
        f"outer.codec.name={chooser.choice(('none', 'int8', 'topk'))}",
        f"outer.free.late={chooser.choice(('drop', 'use'))}",
        f"outer.free.quorum={chooser.choice((1, 2))}",
        f"outer.free.grace_seconds={chooser.choice((0.0, 0.05))}",
    )
    points = sorted(chooser.sample(range(1, ROUNDS - 1), 3))
    run = FollowedRun(folder, _train(run_file, folder, *more))
    for number in points:
        run.until(lambda record, number=number: _is_round(record, number))  # type: ignore[misc]
        pid = run.pids[chooser.choice(sorted(run.pids))]
        fault = chooser.choice(("slow", "slow", "kill", "stop"))
        with suppress(ProcessLookupError):
            if fault == "slow":
                with _slow(pid):
                    run.until(lambda record, number=number: _is_round(record, number + 1))  # type: ignore[misc]
            else:
                os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    run.finish()
    _check(folder)
