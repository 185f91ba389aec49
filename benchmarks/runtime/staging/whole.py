"""Runs the complete Holdfast at the comparison's cadence: `holdfast train` of a run file that saves
by the clock, with a real `holdfast stage`. The time for which training was blocked is read from the
journal.

Its network storage is the run folder, which is not throttled: no part of training waits for it.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_bytes
from typing import Any

import psutil
import yaml

from benchmarks.runtime.children import ROOT, environment
from benchmarks.runtime.staging.processes import ENDING, stage
from benchmarks.runtime.staging.trainer import cpu_of
from holdfast.events import (
    CheckpointCaptured,
    CheckpointCommitted,
    Event,
    Record,
    RunStopped,
    SnapshotKept,
    StepDone,
)
from holdfast.wire.journal import follow_journal, read_journal
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore
from holdfast_lab.chaos.sample_run import write_texts

MOVER = "holdfast.checkpoint.mover.main"


def run_file(
    folder: Path, model: dict[str, Any], address: str, every: float, link: float
) -> dict[str, Any]:
    """model: preset, vocabulary, sequence and batch, as the other trainer has them."""
    texts = write_texts(folder / "texts", 40, 400)
    return {
        "name": "staging",
        "folder": str(folder / "run"),
        "device": "cpu",
        "data": {
            "folder": str(folder / "dataset"),
            "sources": [{"kind": "text", "path": str(texts)}],
            "tokenizer": {"vocab_size": 300},
            "sequence_length": model["sequence"],
            "processes": 1,
        },
        "model": {
            "preset": model["preset"],
            "vocab_size": model["vocabulary"],
            "tied_embeddings": False,
        },
        "train": {
            "steps": 1_000_000,
            "batch_size": model["batch"],
            "microbatch_size": model["batch"],
            "evaluate": {"every": 0},
        },
        "layout": {"workers": 1},
        "cluster": {"threads_per_worker": 1},
        "checkpoint": {
            "every_steps": 0,
            "every_seconds": every,
            "slots": 3,
            "keep_last": 1,
            "machine": {"name": "trainer", "pool": "spot"},
            "peers": [{"name": "stage", "address": address, "stable": True}],
            "peer_mbps": 8e-6 * link,
        },
    }


@contextmanager
def training(path: Path, secret: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`holdfast train`, in a process group of its own that ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", "train", str(path)],
        cwd=ROOT,
        env=environment() | {"HOLDFAST_SECRET_FILE": str(secret)},
        stdin=subprocess.DEVNULL,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(ENDING)


def measure(
    model: dict[str, Any],
    nbytes: int,
    link: float,
    folder: Path,
    saves: int,
    every: float,
    deadline: float,
) -> dict[str, Any]:
    """A run of `saves` saves, one every `every` seconds; what its journal says of them."""
    secret = Secret(token_bytes(32))
    with stage(folder, secret, 2.2 * nbytes + 1e8) as (stage_pid, address):
        path, log = folder / "run.yaml", folder / "run.log"
        path.write_text(yaml.safe_dump(run_file(folder, model, address, every, link)))
        with training(path, folder / "secret", log) as process:
            cpu = _until(process, folder / "run", stage_pid, saves, deadline)
            if cpu is None:
                said = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
                return {"error": f"the run did not get so far; it said: {said[-1][:300]}"}
            process.send_signal(signal.SIGINT)
            process.wait(deadline)
    return summary(read_journal(FolderStore(folder / "run"))) | {"every": every, "helpers": cpu}


def _until(
    process: subprocess.Popen[bytes], run: Path, stage_pid: int, saves: int, deadline: float
) -> dict[str, float] | None:
    """Wait for `saves` saves that are both kept by the stage and durable. Return the CPU seconds a
    save, from the first to the last, of the processes apart from the trainer. None if the run ended
    or took too long."""
    stop = threading.Event()
    timer = threading.Timer(deadline, stop.set)
    timer.start()
    kept: set[int] = set()
    durable: set[int] = set()
    before: dict[str, float] = {}
    try:
        for records in follow_journal(FolderStore(run), stop=stop):
            for record in records:
                kinds = ((SnapshotKept, kept), (CheckpointCommitted, durable))
                for kind, steps in kinds:
                    if isinstance(record.event, kind):
                        steps.add(record.event.step)
            if process.poll() is not None:
                return None
            if kept & durable and not before:
                first, before = len(kept & durable), _cpu(process.pid, stage_pid)
            if len(kept & durable) >= saves:
                after = _cpu(process.pid, stage_pid)
                counted = max(1, len(kept & durable) - first)
                return {name: (after[name] - before[name]) / counted for name in after}
    finally:
        timer.cancel()
    return None


def _cpu(agent: int, stage_pid: int) -> dict[str, float]:
    found = {"mover": 0.0, "stage": cpu_of(stage_pid), "training": cpu_of(agent)}
    for child in psutil.Process(agent).children(recursive=True):
        name = "mover" if MOVER in child.cmdline() else "training"
        found[name] += cpu_of(child.pid)
    return found


def summary(records: list[Record]) -> dict[str, Any]:
    """The saves made while training; the one on leaving, after which nothing is computed, apart."""
    left = max((r.event.step for r in records if isinstance(r.event, RunStopped)), default=-1)
    steps = [r for r in records if isinstance(r.event, StepDone)]
    wall = steps[-1].time - steps[0].time
    made = _events(records, CheckpointCaptured)
    while_training = [event for event in made if event.step != left]
    blocked = [event.seconds for event in while_training]
    return {
        "bytes": made[0].bytes,
        "saves": len(while_training),
        "wall": wall,
        "step": statistics.median(event.seconds for event in _events(records, StepDone)),
        "steps": len(steps),
        "blocked": sum(blocked),
        "longest": max(blocked),
        "share": sum(blocked) / wall,
        "leaving": [e.seconds for e in made if e.step == left],
        "kept": statistics.median(event.seconds for event in _events(records, SnapshotKept)),
        "durable": statistics.median(e.seconds for e in _events(records, CheckpointCommitted)),
    }


def _events(records: list[Record], kind: type[Event]) -> list[Any]:
    return [record.event for record in records if isinstance(record.event, kind)]
