"""Observers of a run while it trains: the live view or JSON lines, and metrics."""

from __future__ import annotations

import json as json_format
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from holdfast.api.journal_follower import JournalFollower
from holdfast.api.progress import say
from holdfast.checkpoint.restore.catalog import origin_of_weights
from holdfast.config.run import RunConfig
from holdfast.core.devices import is_accelerator
from holdfast.core.flops import run_flops_per_token
from holdfast.events import Record, to_json
from holdfast.launch.run.lora_run import describe_first_weights
from holdfast.machine.hardware import HardwareInfo
from holdfast.report.live.device_metrics import DeviceMetrics
from holdfast.report.live.live import LiveView
from holdfast.report.live.metrics import RunMetrics
from holdfast.wire import journal
from holdfast.wire.store.run_location import store_of_run

CLOSE_TIMEOUT_S = 5.0


class RunViews:
    """The observers of one run, opened and closed together."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        dataset_version: str,
        machine: HardwareInfo,
        *,
        json: bool,
    ) -> None:
        self.say: Callable[[str], None] = say
        self._last_lines: list[str] = []
        self._is_following = bool(config.cluster.node)
        self._stack = ExitStack()  # what has to be closed, newest first
        self.observers: list[Callable[[Record], None]] = []
        """What the agent calls with each record of this node."""
        shown: list[Callable[[Record], None]] = []
        metrics = metrics_of(config, dataset_version, machine)
        replays: list[Callable[[list[Record]], None]] = [metrics.replay]
        self.render_metrics = metrics.render
        if is_accelerator(config.device):
            devices = DeviceMetrics(config.name)
            self.render_metrics = lambda: metrics.render() + devices.render()
        shown.append(metrics.observe)
        if json:
            lines = JsonLinePrinter()
            self._stack.callback(lines.close)
            shown.append(lines.observe)
        else:
            origin = origin_of_weights(store_of_run(folder))
            view = LiveView(
                config.train.steps,
                imported_from=origin,
                first_weights=describe_first_weights(config),
            )
            replays.append(view.replay)
            self._stack.enter_context(view)
            shown.append(view.observe)
            self.say = view.say
        if not config.cluster.node:
            self.observers += shown
            contents = journal.read_contents(store_of_run(folder))
            self._replay(contents.records, replays)
            if unreadable := contents.unreadable_sentence():
                self.say(unreadable)
            return
        follower = JournalFollower(store_of_run(folder), shown)
        self._replay(follower.read_all(), replays)
        self.observers.append(follower.observe)
        self._stack.callback(self._print_last_lines)  # once the follower is closed
        follower.start()
        self._stack.callback(follower.close)

    def say_last(self, line: str) -> None:
        """Print the run's result. The views of one node of several show all records before it."""
        if self._is_following:
            self._last_lines.append(line)
        else:
            self.say(line)

    def _print_last_lines(self) -> None:
        self._is_following = False
        for line in self._last_lines:
            self.say(line)

    def _replay(self, before: list[Record], replays: list[Callable[[list[Record]], None]]) -> None:
        """Complete the views with the records of older sessions of the same run."""
        for replay in replays:
            replay(before)

    def __enter__(self) -> RunViews:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stack.close()


def metrics_of(config: RunConfig, dataset_version: str, machine: HardwareInfo) -> RunMetrics:
    """Return what `/metrics` shows; it has utilisation only if the device's peak is known."""
    peak = None
    if is_accelerator(config.device) and machine.accelerators:
        one = machine.accelerators[0].peak_flops(config.train.precision)
        peak = one * config.layout.workers if one is not None else None
    model = config.task.name or config.model.preset or config.model.family
    info = {"model": model, "dataset": dataset_version}
    flops = run_flops_per_token(config)
    return RunMetrics(config.name, info, flops_per_token=flops, peak_flops=peak)


class JsonLinePrinter:
    """Prints one line of JSON per record, for a program that reads along.

    A thread of its own prints: the agent, which answers requests and heartbeats, never waits for
    a slow reader. More than a million unread lines lose the oldest, and that is said.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self._lines: deque[str] = deque(maxlen=limit)
        self._changed = threading.Condition()
        self._closing = False
        self._dropped_lines = 0
        self._thread = threading.Thread(target=self._run, name="json lines", daemon=True)
        self._thread.start()

    def observe(self, record: Record) -> None:
        line = record_line(record)
        with self._changed:
            self._dropped_lines += len(self._lines) == self._lines.maxlen
            self._lines.append(line)
            self._changed.notify()

    def close(self) -> None:
        """Print what waits; give up on a reader that takes nothing for some seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        waiting = -1
        while self._thread.is_alive() and waiting != len(self._lines):
            waiting = len(self._lines)
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._dropped_lines:
            say(f"{self._dropped_lines} lines were not read in time and are only in the journal")

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._closing:
                    self._changed.wait()
                if not self._lines:
                    return
                lines = [self._lines.popleft() for _ in range(min(100, len(self._lines)))]
            try:
                print("\n".join(lines), flush=True)
            except (OSError, ValueError):
                return  # the reader has closed: that is no reason to stop training


def record_line(record: Record) -> str:
    return json_format.dumps(to_json(record), separators=(",", ":"))
