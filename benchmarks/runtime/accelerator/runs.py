"""Rows about real runs: `holdfast train` on the device, undisturbed, killed, noticed, resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from benchmarks.runtime.accelerator.journal import read_events, show_speed, speed
from benchmarks.runtime.accelerator.settings import RowResult, Settings
from holdfast.config.loading.load import load_config
from holdfast.errors import HoldfastError
from holdfast.events import (
    CheckpointCaptured,
    CheckpointCommitted,
    CheckpointRestored,
    Event,
    GenerationStarted,
    MemoryUsed,
    StepDone,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
)
from holdfast.wire.journal import follow_journal
from holdfast.wire.store.run_store import FolderStore
from holdfast_lab.chaos.compare import compare_runs
from holdfast_lab.chaos.sample_run import write_texts

ROOT = Path(__file__).resolve().parents[3]
SHAPE = ROOT / "examples/llama3.2-1b/run.yaml"
GRACE_S = 30
KEYS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "bf16-state": {"optimizer": {"learning_rate": 1e-3, "state_dtype": "bf16"}},
    "8bit-state": {"optimizer": {"learning_rate": 1e-3, "state_dtype": "8bit"}},
    "recompute": {"recompute": "full"},
    "host": {"memory": {"optimizer": "host", "activations": "host"}},
}
"""Keys of `train` that change how state is stored, by name."""
_LOG_BYTES = 3000  # of each log of a run that failed


def run_file(settings: Settings, name: str, **train: Any) -> Path:
    """A small run file of its own folder; all share a dataset. train: keys of its section."""
    quick = settings.quick
    model = {"preset": "tiny"} if quick else {"preset": "small"}
    value = {
        "name": "gpu",
        "folder": str(settings.scratch / name),
        "device": settings.device,
        "data": data_section(settings) | {"sequence_length": 32 if quick else 512},
        "model": model,
        "train": {
            "steps": 16 if quick else 60,
            "batch_size": 8,
            "microbatch_size": 2,
            "optimizer": {"learning_rate": 1e-3},
            "schedule": {"warmup_steps": 5},
            "evaluate": {"every": 0, "samples": 4},
            **train,
        },
        "layout": {"workers": 1},
        "checkpoint": {"every_steps": 5 if quick else 10},
        "cluster": {"grace_seconds": GRACE_S, "threads_per_worker": 2, "standbys": 0},
    }
    path = settings.scratch / f"{name}.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def data_section(settings: Settings) -> dict[str, Any]:
    return {
        "folder": str(settings.scratch / "dataset"),
        "sources": [{"kind": "text", "path": str(settings.scratch / "texts")}],
        "tokenizer": {"vocab_size": 512},
        "validation_fraction": 0.1,
    }


def data(settings: Settings) -> RowResult:
    """Texts and the dataset that the runs share."""
    documents, words = (12, 200) if settings.quick else (200, 2000)
    write_texts(settings.scratch / "texts", documents, words)
    path, begun = run_file(settings, "prepared"), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "data", "prepare", str(path)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return RowResult(f"prepared in {time.monotonic() - begun:.0f} s")


def doctor(settings: Settings) -> RowResult:
    """`holdfast doctor` on this machine."""
    command = [sys.executable, "-m", "holdfast.cli.main", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    fails = [line for line in lines if line.startswith("FAIL")]
    said = fails[0] if fails else next((x for x in lines if "accelerators" in x), "")
    return RowResult(" ".join(said.split()), {"output": done.stdout}, not fails)


class Running:
    """A `holdfast` command that trains in a folder, with its output in a log."""

    def __init__(self, folder: Path, *arguments: str | Path) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        command = [sys.executable, "-m", "holdfast.cli.main", *map(str, arguments)]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)

    def finish(self, seconds: float) -> None:
        """Wait for its end. Raises RuntimeError, with its logs, unless it ended well."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            code = None
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        if code != 0:
            what = (
                f"after {seconds:.0f} s it had not ended" if code is None else f"exit code {code}"
            )
            raise RuntimeError(f"{self.folder.name}: {what}\n{self._logs()}")

    def at_step(self, step: int, act: Callable[[int], None], seconds: float) -> None:
        """Call `act` with the worker's process when the step is done. Raises RuntimeError."""
        ended, pid, end = threading.Event(), 0, time.monotonic() + seconds
        for records in follow_journal(FolderStore(self.folder), poll_interval_s=0.02, stop=ended):
            for event in (record.event for record in records):
                if isinstance(event, WorkerStarted):
                    pid = event.pid
                if isinstance(event, StepDone) and event.step >= step:
                    act(pid)
                    return
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{self.folder.name} came to no step {step}\n{self._logs()}")

    def _logs(self) -> str:
        paths = [self.log, *sorted(self.folder.glob("logs/**/*.log"))]
        texts = [f"--- {p.name}\n{p.read_text(errors='replace')[-_LOG_BYTES:]}" for p in paths]
        return "\n".join(texts[:1] + texts[1:][-3:])


Command = Callable[[Path], tuple[str | Path, ...]]
"""The arguments that train in a folder."""


def disturbed(make: Command, folder: Path, how: str, step: int, limit: float) -> None:
    """Train in a folder to the end, disturbed when `step` is done.

    killed, stopped: the worker, by SIGKILL or SIGSTOP. noticed: the agent, by SIGTERM. lost: the
    agent, by SIGKILL. After the last two the same command continues.
    """
    run = Running(folder, *make(folder))
    match how:
        case "alone":
            pass
        case "killed" | "standby":
            run.at_step(step, lambda pid: os.kill(pid, signal.SIGKILL), limit)
        case "stopped":
            run.at_step(step, lambda pid: os.kill(pid, signal.SIGSTOP), limit)
        case "noticed" | "lost":
            number = signal.SIGTERM if how == "noticed" else signal.SIGKILL
            run.at_step(step, lambda pid: run.process.send_signal(number), limit)
            if how == "noticed":
                run.finish(limit)
            else:
                run.process.wait(limit)
            run = Running(folder, *make(folder))
    run.finish(limit)


def compared(
    settings: Settings, name: str, make: Command, ways: Sequence[str], steps: int
) -> tuple[dict[str, Any], list[str], bool]:
    """Train side by side, undisturbed and in each way. All end with the same bits, losses and
    ledger: figures by way, sentences, and whether that holds."""
    folders = {way: settings.scratch / f"{name}-{way}" for way in ("alone", *ways)}
    with ThreadPoolExecutor(1 if settings.quick else len(folders)) as pool:
        jobs = [
            pool.submit(disturbed, make, folder, way, steps // 2 + 2, 200.0)
            for way, folder in folders.items()
        ]
        for job in jobs:
            job.result()
    figures: dict[str, Any] = {}
    sentences = []
    for way in ways:
        found = compare_runs(folders[way], folders["alone"], steps, 0.0)
        wrong = found.curve or found.ledger or found.tensors
        figures[way] = {"equal": found.is_equal, "differs": wrong, **recovery(folders[way])}
        source = "+".join(figures[way]["restored_from"]) or "nowhere"
        after = figures[way]["again_after_s"]
        sentences.append(f"{way}: {wrong or 'same bits'} (from {source}, {after:.1f} s)")
    return figures, sentences, all(found["equal"] for found in figures.values())


def same_bits(
    settings: Settings, name: str, ways: Sequence[str] = ("killed", "noticed"), **train: Any
) -> RowResult:
    """The small run, undisturbed and in each way."""
    path = run_file(settings, name, **train)
    steps = load_config(path).config.train.steps

    def make(folder: Path) -> tuple[str | Path, ...]:
        standbys = ("cluster.standbys=auto",) if folder.name.endswith("standby") else ()
        return ("train", path, f"folder={folder}", *standbys)

    figures, sentences, passed = compared(settings, name, make, ways, steps)
    return RowResult("; ".join(sentences), figures, passed)


def with_keys(settings: Settings) -> RowResult:
    """The small run with each of `KEYS`, undisturbed and with its worker killed."""
    figures: dict[str, Any] = {}
    for name, train in KEYS.items():
        try:
            found = same_bits(settings, f"keys-{name}", ("killed",), **train)
        except (RuntimeError, HoldfastError, OSError) as error:
            found = RowResult(str(error).splitlines()[0], {"error": str(error)}, False)
        figures[name] = {"passed": found.passed, "line": found.line, **found.figures}
    line = "; ".join(f"{name} {found['line']}" for name, found in figures.items())
    return RowResult(line, figures, all(found["passed"] for found in figures.values()))


def own_code(settings: Settings) -> RowResult:
    """The examples of a user's model, loop and Trainer, each undisturbed and with a worker
    killed."""
    device, steps = f"device={settings.device}", 60 if settings.quick else 400
    examples = ROOT / "examples"
    threads = "cluster.threads_per_worker=2"
    model = ("train", examples / "own_model/run.yaml", device, threads, "layout.workers=1")
    settings_of_loop = ("--workers", "1", "--set", device, "--set", threads)
    loop = ("run", examples / "own_loop/train.py", *settings_of_loop)
    trainer = ("run", examples / "hf_trainer/train.py", *settings_of_loop)
    commands: dict[str, tuple[int, Command]] = {
        "own-model": (steps, lambda to: (*model, f"folder={to}", f"train.steps={steps}")),
        "own-loop": (steps, lambda to: (*loop, "--folder", to, "--", "--steps", str(steps))),
    }
    if find_spec("accelerate") is not None and find_spec("transformers") is not None:
        commands["trainer"] = (60, lambda to: (*trainer, "--folder", to))
    figures: dict[str, Any] = {}
    sentences = []
    passed = True
    for name, (count, make) in commands.items():
        try:
            found, said, equal = compared(settings, name, make, ("killed",), count)
        except (RuntimeError, HoldfastError, OSError) as error:
            found, said, equal = {"error": str(error)}, [str(error).splitlines()[0]], False
        figures[name] = found
        sentences.append(f"{name} {said[0]}")
        passed = passed and equal
    return RowResult("; ".join(sentences), figures, passed)


def recovery(folder: Path) -> dict[str, Any]:
    """The source of the state at the newest restart. Seconds from the last step before it to the
    first one after it, and to what happened between them."""
    records = read_events(folder)
    restored = [e for _, e in records if isinstance(e, CheckpointRestored)]
    begins = [at for at, e in records if isinstance(e, GenerationStarted)]
    done = [at for at, e in records if isinstance(e, StepDone)]
    before = max((at for at in done if at < begins[-1]), default=begins[-1])
    again = min((at for at in done if at > begins[-1]), default=before)
    kinds = WorkerLost | GenerationStarted | WorkerStarted | CheckpointRestored | WorkerReady
    between = [
        (e.kind, round(at - before, 2))
        for at, e in sorted(records, key=lambda record: record[0])
        if before <= at <= again and isinstance(e, kinds)
    ]
    return {
        "restored_from": list(restored[-1].sources) if restored else [],
        "restore_s": restored[-1].seconds if restored else None,
        "again_after_s": again - before,
        "between": between,
    }


def train_1b(settings: Settings) -> RowResult:
    """`holdfast train` of the shape with agent, loader and ledger, and checkpoints of 15 GB."""
    folder = settings.scratch / "train-1b"
    changes = [f"folder={folder}", f"device={settings.device}", "train.steps=14"]
    changes += ["checkpoint.every_steps=7", "checkpoint.keep_last=1", "train.evaluate.samples=4"]
    value = yaml.safe_load(SHAPE.read_text())
    value["data"] = data_section(settings) | {"sequence_length": 4096}
    if settings.quick:
        value["model"], value["data"]["sequence_length"] = {"preset": "tiny"}, 64
        changes += ["train.compile=false"]
    path = settings.scratch / "train-1b.yaml"
    path.write_text(yaml.safe_dump(value))
    config = load_config(path, changes).config
    begun = time.monotonic()
    Running(folder, "train", path, *changes).finish(300.0)
    events: list[Event] = [event for _, event in read_events(folder)]
    found = speed(events, config.data.sequence_length, skip=3)
    figures: dict[str, Any] = {
        "tokens_per_second": found.tokens_per_second.median,
        "phases": found.phases,
        "whole_s": time.monotonic() - begun,
        "peak_gib": max((e.device_bytes for e in events if isinstance(e, MemoryUsed)), default=0)
        / 2**30,
        "captures": [
            {"step": e.step, "blocked_s": e.seconds, "copy_s": e.copy_seconds, "bytes": e.bytes}
            for e in events
            if isinstance(e, CheckpointCaptured)
        ],
        "durable_s": [e.seconds for e in events if isinstance(e, CheckpointCommitted)],
    }
    return RowResult(show_speed(found, figures["captures"], figures["durable_s"]), figures)
