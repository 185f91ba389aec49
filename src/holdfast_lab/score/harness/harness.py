"""Runs a scenario at level 1: real processes, real signals, on one clock."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast_lab.score.harness.trainer import (
    NodeNetwork,
    ParkingRun,
    Trainer,
    TrainerRun,
    Workplace,
    needs_network,
)
from holdfast_lab.score.record import Commit, RunRecord
from holdfast_lab.score.scenarios import ScenarioRun, interruptions
from holdfast_lab.traces.events import TraceEvent

MICROBATCHES = 12
START_TIMEOUT_S = 120.0
_STEADY_STEPS = 3
_POLL_S = 0.05
_PULSE_S = 0.06  # period in which the processes of a slow node are stopped and continued


class RunFailedError(HoldfastError):
    """A run did not begin to train."""


@dataclass(frozen=True)
class RunOptions:
    """k: compression of time. python: of the trainer. keeps_folder: leave logs and state."""

    k: float
    python: str = sys.executable
    keeps_folder: bool = False


@dataclass
class _Deeds:
    """What was really done, in seconds of the run: the nodes that are there, and losses."""

    alive: set[str]
    capacity: list[tuple[float, int]]
    faults: list[float] = field(default_factory=list)
    corrupted: int = -1

    def note_damage(self, is_damaged: bool) -> None:
        self.corrupted = int(is_damaged)

    def note(self, at: float) -> None:
        if self.capacity[-1][1] != len(self.alive):
            self.capacity.append((at, len(self.alive)))


def run_scenario(
    trainer: Trainer,
    run: ScenarioRun,
    folder: Path,
    options: RunOptions,
    *,
    is_resilient: bool = True,
) -> RunRecord:
    """Run a scenario to its end. Time 0 is a commit of all nodes, after the first steps.

    Raises RunFailedError if the run does not get that far."""
    short = run.compressed(options.k)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    workplace = Workplace(
        folder.absolute(),
        run.nodes,
        short.step_s * run.nodes / MICROBATCHES,
        short.between_s,
        options.k,
        is_resilient,
        options.python,
    )
    try:
        with ExitStack() as stack:
            network = stack.enter_context(NodeNetwork(short)) if needs_network(short) else None
            job = trainer.open(replace(workplace, network=network))
            stack.callback(job.stop)
            return _run(job, short, network)
    finally:
        if not options.keeps_folder:
            shutil.rmtree(folder, ignore_errors=True)


def _run(job: TrainerRun, run: ScenarioRun, network: NodeNetwork | None) -> RunRecord:
    """run: with compressed times."""
    first = [e.node for e in run.events if e.kind == "join" and e.t_s == 0]
    if is_parked := isinstance(job, ParkingRun):
        # The nodes that join or are repaired after time 0, in order. A node that was slow and is
        # repaired does not join.
        found, gone = list[str](), set[str]()
        for event in run.events:
            if event.kind in ("preempt", "fail"):
                gone.add(event.node)
            elif event.t_s > 0 and (
                event.kind == "join" or (event.kind == "recover" and event.node in gone)
            ):
                gone.discard(event.node)
                found.append(event.node)
        _park(job, [*first, *found])
    job.start(first)
    began = _wait_until_steady(job, len(first))
    deeds = _play(job, run, began, first, network)
    time.sleep(0.3)  # until the journal has been written
    commits = [c for c in job.commits() if c.t_s <= began + run.seconds]
    return replace(_record(run, began, commits, deeds), is_parked=is_parked)


def _park(job: ParkingRun, nodes: Sequence[str]) -> None:
    """Start the processes of nodes, and wait until all have loaded what they need."""
    job.park(nodes)
    deadline = time.monotonic() + START_TIMEOUT_S
    while (ready := job.ready_nodes()) < len(nodes):
        if time.monotonic() > deadline:
            raise RunFailedError(
                f"{ready} of {len(nodes)} nodes were ready within {START_TIMEOUT_S:.0f} s"
            )
        time.sleep(_POLL_S)


def _wait_until_steady(job: TrainerRun, nodes: int) -> float:
    """Return the time of a commit that all nodes have made, after some earlier ones."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        with suppress(OSError):
            full = [c for c in job.commits() if c.workers == nodes]
            if len(full) >= _STEADY_STEPS:
                return full[-1].t_s
    raise RunFailedError(f"no step of {nodes} nodes within {START_TIMEOUT_S:.0f} s")


def _play(
    job: TrainerRun,
    run: ScenarioRun,
    began: float,
    first: Sequence[str],
    network: NodeNetwork | None,
) -> _Deeds:
    """Do what the events say, each when it is due, until the scenario's end."""
    deeds = _Deeds(set(first), [(0.0, len(first))])
    slow: dict[str, _SlowNode] = {}
    due: list[tuple[float, Callable[[float], None]]] = []
    losses = set(interruptions(run.events))
    for event in run.events:
        if event.kind == "net" and network is not None:
            due.append((event.t_s, _degrading(network, event)))
        elif event.t_s > 0 or event.kind != "join":
            due.append((event.t_s, _deed(job, event, deeds, slow)))
    if run.corrupt_s >= 0:
        due.append((run.corrupt_s, lambda now: deeds.note_damage(job.corrupt_checkpoint())))
    for at in losses:  # counted once for each instant
        due.append((at, lambda now: deeds.faults.append(now)))
    try:
        for at, deed in sorted(due, key=lambda each: each[0]):
            _sleep_until(began + at)
            deed(time.time() - began)
        _sleep_until(began + run.seconds)
    finally:
        for node in slow.values():
            node.stop()
    return deeds


def _deed(
    job: TrainerRun, event: TraceEvent, deeds: _Deeds, slow: dict[str, _SlowNode]
) -> Callable[[float], None]:
    """What one event does. It notes the time at which it was really done."""

    def do(now: float) -> None:
        node = event.node
        if event.kind in ("preempt", "fail"):
            job.kill(node)
            deeds.alive.discard(node)
            deeds.note(now)
        elif event.kind == "join" or (event.kind == "recover" and node not in deeds.alive):
            job.start([node])
            deeds.alive.add(node)
            deeds.note(now)
        elif event.kind == "recover" and node in slow:
            slow.pop(node).stop()
        elif event.kind == "notice":
            job.warn(node, event.value)
        elif event.kind == "slow":
            slow[node] = _SlowNode(job, node, event.value)

    return do


def _degrading(network: NodeNetwork, event: TraceEvent) -> Callable[[float], None]:
    return lambda now: network.degrade(event)


def _sleep_until(when: float) -> None:
    if (left := when - time.time()) > 0:
        time.sleep(left)


class _SlowNode:
    """Stops and continues a node's workers, so that they run for 1/factor of the time."""

    def __init__(self, job: TrainerRun, node: str, factor: float) -> None:
        self._job, self._node, self._factor = job, node, factor
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._pulse, daemon=True)
        self._thread.start()

    def _pulse(self) -> None:
        awake = _PULSE_S / self._factor
        pids, looked = list[int](), 0.0
        while not self._ended.is_set():
            if time.monotonic() - looked > 1.0:
                pids, looked = self._job.worker_pids(self._node), time.monotonic()
            _signal_all(pids, signal.SIGSTOP)
            self._ended.wait(_PULSE_S - awake)
            _signal_all(pids, signal.SIGCONT)
            self._ended.wait(awake)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _record(run: ScenarioRun, began: float, commits: Sequence[Commit], deeds: _Deeds) -> RunRecord:
    before = max((c.step for c in commits if c.t_s <= began), default=0)
    later = tuple(replace(c, t_s=c.t_s - began) for c in commits if c.t_s > began)
    return RunRecord(
        run.scenario,
        run.seed,
        run.seconds,
        tuple(deeds.capacity),
        tuple(deeds.faults),
        later,
        run.step_s,
        run.between_s,
        before,
        corrupted=deeds.corrupted,
    )
