"""Is a run file ready for production? Trains a small copy of its run, and disturbs it for real.

    OUT/NUMBER/run        the copy: as many workers as the run file says, few steps
    OUT/NUMBER/orders     the gate that holds the copy at a step while it is disturbed
    OUT/NUMBER/train.log  what its commands printed
    OUT/record/           one line for each check-up (`governance.record`), which can be signed

A worker is killed with SIGKILL, and the copy is stopped and started again. The ledger of its
samples is audited, each byte of its checkpoints is verified, and an alert is posted. The run
itself, its folder, bucket, peers and trackers are not touched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.config.loading.load import LoadedConfig
from holdfast.doctor.checks import Check
from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.errors import HoldfastError
from holdfast.events import (
    CheckpointCommitted,
    CheckpointRestored,
    Event,
    GenerationStarted,
    Record,
    RunFinished,
    RunStopped,
    StepDone,
    StopRequested,
    WorkerLost,
    WorkerStarted,
)
from holdfast.launch.node.fleet import die_with_parent, forked_workers
from holdfast.report.formatting import format_bytes, format_plural
from holdfast.report.ledger.incidents import describe_rung
from holdfast.wire.child_command import module_command
from holdfast.wire.journal import JournalTail
from holdfast.wire.store.run_location import store_of_run
from holdfast_platform.observe.runs import CHECK_UP_MARK

HOLDFAST = "holdfast.cli.main"
LEAST_STEPS = 6
_POLL_S = 0.05
_NO_LIMIT = 10**9


class CheckUpError(HoldfastError):
    """The copy did not get further."""


@dataclass(frozen=True)
class CheckUp:
    """What one check-up found. began: seconds since 1970."""

    run_file: str
    name: str
    began: float
    seconds: float
    checks: tuple[Check, ...]

    @property
    def is_ready(self) -> bool:
        return not any(check.state == "fails" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ready": self.is_ready}


@dataclass
class Copy:
    """The copy of a run: its command, and its journal as it grows."""

    folder: Path
    loaded: LoadedConfig
    steps: int
    patience_s: float  # without a new record
    records: list[Record] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.run = self.folder / "run"
        self.orders = FaultOrders(self.folder / "orders")
        self._tail: JournalTail | None = None

    @property
    def overrides(self) -> list[str]:
        every = max(1, self.steps // 4)
        return [
            *self.loaded.overrides,
            f"folder={self.run}",
            *(f"train.steps={self.steps}", "train.epochs=0", "train.stop=[]"),
            *(f"checkpoint.every_steps={every}", "checkpoint.every_seconds=0"),
            *("checkpoint.bucket=''", "checkpoint.fallback=''", "checkpoint.peers=[]"),
            *(
                "cluster.node=''",
                "cluster.left_exit_code=0",
                f"cluster.faults={self.orders.folder}",
            ),
            *(
                "tensorboard=false",
                "logging.trackers=[]",
                "observe.webhook=''",
                "evaluate.tasks=[]",
            ),
        ]

    def start(self) -> None:
        """Start or resume training. It does not outlive this process."""
        (self.folder / CHECK_UP_MARK).touch()
        words = module_command(HOLDFAST, "train", self.loaded.name, "--yes", *self.overrides)
        with (self.folder / "train.log").open("ab") as log:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _read(self) -> list[Record]:
        if self._tail is None:
            if not (self.run / "resolved.json").exists():
                return []
            self._tail = JournalTail(store_of_run(self.run))
        found = self._tail.read_new()
        self.records += found
        return found

    def until(self, what: str, matches: Callable[[Event], bool], since: int = 0) -> int:
        """Wait for a record from number `since` on. Return the number after it. Raises
        CheckUpError if the command ends before that, or nothing new is heard for long."""
        heard = time.monotonic()
        while True:
            for number in range(since, len(self.records)):
                if matches(self.records[number].event):
                    return number + 1
            since = len(self.records)
            ended = self.process is None or self.process.poll() is not None
            if self._read():
                heard = time.monotonic()
            elif ended:
                raise CheckUpError(f"the copy ended before {what}: {self.last_line()}")
            elif time.monotonic() - heard > self.patience_s:
                raise CheckUpError(
                    f"nothing was heard of the copy for {self.patience_s:g} s before {what}"
                )
            else:
                time.sleep(_POLL_S)

    def until_generation(self, what: str, since: int) -> tuple[int, GenerationStarted]:
        """As `until`, for the next generation; return it too."""
        mark = self.until(what, lambda event: isinstance(event, GenerationStarted), since)
        event = self.records[mark - 1].event
        assert isinstance(event, GenerationStarted)
        return mark, event

    def wait(self) -> int:
        """Return the exit code of the command. Raises CheckUpError."""
        assert self.process is not None
        try:
            code = self.process.wait(self.patience_s)
        except subprocess.TimeoutExpired:
            raise CheckUpError(f"the copy did not end within {self.patience_s:g} s") from None
        self._read()
        return code

    def last_line(self) -> str:
        """Return what the copy printed last."""
        lines = (self.folder / "train.log").read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


def check_up(
    loaded: LoadedConfig,
    folder: Path,
    steps: int,
    patience_s: float,
    alert: Callable[[list[Check]], Check],
    say: Callable[[str], None],
) -> CheckUp:
    """Train a copy of a run in `folder`, and disturb it.

    Args:
        steps: of the copy, LEAST_STEPS at least.
        patience_s: seconds without a new record of the copy, after which it counts as stuck.
        alert: posts what the checks found, and returns how that went.
        say: gets a line when a check begins.
    """
    began, checks = time.time(), list[Check]()
    folder.mkdir(parents=True)
    copy = Copy(folder, loaded, steps, patience_s)
    copy.orders.prepare(gate=steps // 3)
    try:
        for name, part in _PARTS:
            say(f"{name} ...")
            checks.append(_carry_out(name, part, copy))
            if checks[-1].state == "fails":
                break
    finally:
        copy.close()
    checks.append(alert(checks))
    seconds = round(time.time() - began, 1)
    return CheckUp(loaded.name, loaded.config.name, began, seconds, tuple(checks))


def _carry_out(name: str, part: Callable[[Copy], str], copy: Copy) -> Check:
    try:
        return Check(name, "good", part(copy))
    except HoldfastError as error:
        remedy = "see what the copy printed, and mend the cause"
        return Check(name, "fails", str(error), remedy, str(copy.folder / "train.log"))


def _start(copy: Copy) -> str:
    copy.start()
    copy.until("its first checkpoint", lambda e: isinstance(e, CheckpointCommitted))
    workers = {r.event.rank for r in copy.records if isinstance(r.event, WorkerStarted)}
    at = copy.steps // 3
    copy.until(f"step {at}", lambda e: isinstance(e, StepDone) and e.step >= at)
    return f"{format_plural(len(workers), 'worker')}, step {at} of {copy.steps}"


def _kill(copy: Copy) -> str:
    """Kill the worker of the highest rank, and let the run continue for a third of its steps."""
    assert copy.process is not None
    started = [r.event for r in copy.records if isinstance(r.event, WorkerStarted)]
    victim = max(started, key=lambda event: event.rank)
    if victim.pid not in forked_workers(copy.process.pid):
        raise CheckUpError(f"process {victim.pid} is no worker of the copy")
    mark, at = len(copy.records), copy.steps // 3
    os.kill(victim.pid, signal.SIGKILL)
    begun = time.monotonic()
    mark = copy.until("the loss was noticed", lambda e: isinstance(e, WorkerLost), mark)
    mark, generation = copy.until_generation("a new generation", mark)
    copy.orders.open_gate(2 * copy.steps // 3)
    copy.until(f"step {at + 1}", lambda e: isinstance(e, StepDone) and e.step == at + 1, mark)
    seconds = time.monotonic() - begun
    return (
        f"rank {victim.rank} was killed; step {at + 1} was done {seconds:.1f} s later, "
        f"{format_plural(max(0, at - generation.step), 'step')} repeated: "
        f"{describe_rung(generation.rung)}"
    )


def _resume(copy: Copy) -> str:
    """Stop the run as a scheduler does, and start it again."""
    assert copy.process is not None
    at = 2 * copy.steps // 3
    copy.until(f"step {at}", lambda e: isinstance(e, StepDone) and e.step >= at)
    mark = len(copy.records)
    copy.process.send_signal(signal.SIGTERM)
    copy.until("it took the signal", lambda e: isinstance(e, StopRequested), mark)
    copy.orders.open_gate(_NO_LIMIT)
    if code := copy.wait():
        raise CheckUpError(f"SIGTERM ended the copy with exit code {code}: {copy.last_line()}")
    stopped = next(r.event for r in copy.records[mark:] if isinstance(r.event, RunStopped)).step
    mark = len(copy.records)
    copy.start()
    mark, generation = copy.until_generation("it resumed", mark)
    if generation.step != stopped or generation.restored_from is None:
        raise CheckUpError(
            f"it stopped after step {stopped}, and began again after step {generation.step}"
        )
    following = stopped + 1
    copy.until(f"step {following}", lambda e: isinstance(e, StepDone) and e.step == following, mark)
    restored = [r.event for r in copy.records[mark:] if isinstance(r.event, CheckpointRestored)]
    if not restored:
        raise CheckUpError("no rank has restored a checkpoint")
    size, seconds = sum(e.bytes for e in restored), max(e.seconds for e in restored)
    return (
        f"SIGTERM stopped it after step {stopped}; the checkpoint was restored "
        f"({format_bytes(size)} in {seconds:.2f} s), and step {following} followed"
    )


def _finish(copy: Copy) -> str:
    if code := copy.wait():
        raise CheckUpError(f"the copy ended with exit code {code}: {copy.last_line()}")
    if not any(isinstance(record.event, RunFinished) for record in copy.records):
        raise CheckUpError("the journal of the copy has no end of the run")
    return f"all {copy.steps} steps are done and committed"


def _ask(copy: Copy, *words: str) -> str:
    """Return the first line of a command about the copy. Raises CheckUpError if it finds a
    fault."""
    words = (*words, str(copy.run))
    done = subprocess.run(
        module_command(HOLDFAST, *words),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C ends the canary only after this check-up
        preexec_fn=die_with_parent(),
    )
    lines = f"{done.stdout}{done.stderr}".strip().splitlines() or ["it printed nothing"]
    if done.returncode:
        raise CheckUpError(f"holdfast {' '.join(words)}: {lines[-1]}")
    return lines[0]


_PARTS: tuple[tuple[str, Callable[[Copy], str]], ...] = (
    ("training", _start),
    ("killed worker", _kill),
    ("resume", _resume),
    ("end", _finish),
    ("samples", lambda copy: _ask(copy, "data", "audit")),
    ("checkpoints", lambda copy: _ask(copy, "checkpoint", "verify")),
)
"""The checks in their order; one that fails ends the copy."""
