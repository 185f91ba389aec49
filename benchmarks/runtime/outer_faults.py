"""Tokens a second, losses and fates of learners whose workers are killed again and again.

    python -m benchmarks.runtime.outer_faults --minutes 30 --per-hour 85 --mode fixed
    python -m benchmarks.runtime.outer_faults --minutes 30 --per-hour 85 --mode free

Two runs train side by side for so many minutes, so that the machine's load is the same for both.
The workers of one get SIGKILL at random times. Both have three workers and three learners of a
tiny model on this machine. Seconds count from the first round to the end, by the wall clock.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import start, within
from tests.support.followed_run import FollowedRun
from tests.support.nodes import prepared

from benchmarks.runtime.interrupting import run_main
from holdfast.core.data.learner_fates import FATES, USED, LearnerFate, count_fates
from holdfast.core.data.lineage import split_effective
from holdfast.events import GenerationStarted, OuterRound, StepDone, WorkerLost
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

LEARNERS, WORKERS, BATCH = 3, 3, 6
SETTINGS = (
    "train.steps=1000000",
    f"train.batch_size={BATCH}",
    "train.evaluate.every=0",
    "train.schedule.kind=constant",
    "train.schedule.warmup_steps=2",
    f"outer.learners={LEARNERS}",
    "outer.average=token_weighted",
    "checkpoint.every_steps=1000000",
    "checkpoint.memory_every_steps=1",
    "cluster.threads_per_worker=1",
    f"layout.workers={WORKERS}",
)


@dataclass
class _Measured:
    """What the journal of a run says. losses, hashes: by round that counts."""

    seconds: float
    faults: int
    losses: dict[int, float]
    hashes: dict[int, set[str]]
    fates: Counter[str]
    slices: int  # tokens of all slices, by the rounds' ledgers; of mode fixed: of all steps
    lost: int
    generations: int

    @property
    def rate(self) -> float:
        """Tokens that are part of the weights, a second."""
        return (self.fates["used"] + self.fates["used_late"]) / self.seconds


def train(
    run_file: Path, folder: Path, mode: str, every: int, minutes: float, per_hour: float
) -> _Measured:
    """Train for some minutes, with so many faults an hour."""
    more: tuple[str, ...] = (f"outer.mode={mode}", f"outer.every_steps={every}")
    if mode == "free":
        more += "outer.free.grace_seconds=0.5", "outer.free.late=use"
    run = FollowedRun(folder, start("train", run_file, f"folder={folder}", *SETTINGS, *more))
    run.until(lambda record: isinstance(record.event, OuterRound))
    follower = threading.Thread(target=lambda: list(run._rest), daemon=True)
    follower.start()  # keeps `pids` as they are
    chooser, begun, faults = random.Random(1), time.monotonic(), 0
    end = begun + 60 * minutes
    while per_hour:
        due = time.monotonic() + chooser.expovariate(per_hour / 3600)
        if due >= end:
            break
        time.sleep(max(0.0, due - time.monotonic()))
        with suppress(ProcessLookupError, IndexError):
            os.kill(chooser.choice(list(run.pids.values())), signal.SIGKILL)
            faults += 1
    time.sleep(max(0.0, end - time.monotonic()))
    seconds = time.monotonic() - begun
    measured = _read(folder, seconds, faults)
    run.process.send_signal(signal.SIGTERM)
    run.end()
    return measured


def _read(folder: Path, seconds: float, faults: int) -> _Measured:
    records = read_journal(FolderStore(folder))
    effective, _ = split_effective(records)
    losses, hashes = dict[int, float](), dict[int, set[str]]()
    rows, tokens = dict[int, list[LearnerFate]](), dict[int, int]()
    for record in effective:
        event = record.event
        if isinstance(event, StepDone):
            losses[event.step], tokens[event.step] = event.loss, int(event.tokens)
        if isinstance(event, OuterRound):
            hashes.setdefault(event.step, set()).add(event.sha256)
            if event.fates:
                rows[event.step] = [LearnerFate.from_json(row) for row in event.fates]
    fates = Counter[str](dict.fromkeys(FATES, 0))
    for ledger in rows.values():
        fates.update(count_fates(ledger))
    if not rows:  # in mode fixed every token of a round is used
        fates[USED] = sum(tokens.values())
    slices = sum(row.tokens + row.rest for ledger in rows.values() for row in ledger)
    events = [record.event for record in records]
    return _Measured(
        seconds,
        faults,
        losses,
        hashes,
        fates,
        slices or sum(tokens.values()),
        sum(isinstance(event, WorkerLost) for event in events),
        sum(isinstance(event, GenerationStarted) for event in events),
    )


def _print(name: str, folder: Path, found: _Measured) -> None:
    last = max(found.losses)
    print(f"{name}: {found.rate:,.0f} tokens/s, {last:,} rounds in {found.seconds:,.0f} s")
    print(f"  {found.faults} faults, {found.lost} workers lost, {found.generations} generations")
    fates = ", ".join(f"{fate} {found.fates[fate]:,}" for fate in FATES)
    print(f"  tokens: {fates}; sum {found.fates.total():,} of {found.slices:,}")
    audit = within("data", "audit", folder)
    print(f"  {(audit.out + audit.err).strip().splitlines()[-1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of each of the two runs")
    parser.add_argument("--per-hour", type=float, default=85.0, help="faults")
    parser.add_argument("--mode", choices=("fixed", "free"), default="fixed")
    parser.add_argument("--every", type=int, default=30, help="inner steps of a round")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file = prepared(folder)
        runs = {"undisturbed": 0.0, "with-faults": given.per_hour}
        with ThreadPoolExecutor(len(runs)) as threads:
            calm, hit = threads.map(
                lambda label: train(
                    run_file, folder / label, given.mode, given.every, given.minutes, runs[label]
                ),
                runs,
            )
        for label, found in zip(runs, (calm, hit), strict=True):
            _print(label, folder / label, found)
    common = sorted(calm.losses.keys() & hit.losses.keys())
    changed = [step for step in common if calm.hashes[step] != hit.hashes[step]]
    difference = hit.losses[common[-1]] / calm.losses[common[-1]] - 1
    print(f"tokens/s with faults over those without: {100 * hit.rate / calm.rate:.1f} %")
    print(
        f"loss of round {common[-1]:,}: {100 * difference:+.4f} %; "
        f"{len(changed)} of {len(common):,} rounds have other weights"
    )


if __name__ == "__main__":
    run_main(main)
