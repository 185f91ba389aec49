"""Observers of a run while it trains: the live view or JSON lines, and metrics."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from holdfast.api.journal_follower import JournalFollower
from holdfast.api.progress import say
from holdfast.checkpoint.restore.catalog import origin_of_weights
from holdfast.config.run import RunConfig
from holdfast.core.devices import is_accelerator
from holdfast.core.flops import run_flops_per_token
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.errors import UserError
from holdfast.events import Record, to_json
from holdfast.launch.run.lora_run import describe_first_weights
from holdfast.machine.hardware import HardwareInfo
from holdfast.report.live.background import BackgroundQueue
from holdfast.report.live.live import LiveView
from holdfast.report.live.metrics import DeviceMetrics, RunFacts, RunMetrics
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
        # What `/metrics` shows; it has utilisation only if the device's peak is known.
        peak = None
        if is_accelerator(config.device) and machine.accelerators:
            one = machine.accelerators[0].peak_flops(config.train.precision)
            peak = one * config.layout.workers if one is not None else None
        model = config.task.name or config.model.preset or config.model.family
        info = {"model": model, "dataset": dataset_version}
        flops = run_flops_per_token(config)
        facts = replace(RunFacts.of(config), epoch_samples=_samples_of_pass(config))
        metrics = RunMetrics(config.name, info, flops_per_token=flops, peak_flops=peak, facts=facts)
        replays: list[Callable[[list[Record]], None]] = [metrics.replay]
        self.render_metrics, self.seen_progress = metrics.render, metrics.newest_steps
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
            for replay in replays:  # the records of older sessions of the same run
                replay(contents.records)
            if unreadable := contents.unreadable_sentence():
                self.say(unreadable)
            return
        follower = JournalFollower(store_of_run(folder), shown)
        before = follower.read_all()
        for replay in replays:
            replay(before)
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

    def __enter__(self) -> RunViews:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _samples_of_pass(config: RunConfig) -> int:
    """Return the samples of one pass over the data; 0 if they are not known here."""
    if config.has_own_data:
        return config.task.samples
    with suppress(UserError):  # a node that has not the dataset here
        dataset = open_dataset(config.data.folder, config.data)
        return sum(Batches(dataset, config.data, config.train, config.seed).order.sizes)
    return 0


class JsonLinePrinter:
    """Prints one line of JSON per record, for a program that reads along.

    A thread of its own prints: the agent, which answers requests and heartbeats, never waits for
    a slow reader. More than a million unread lines lose the oldest, and that is said.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self._lines: BackgroundQueue[str] = BackgroundQueue(
            "json lines", lambda lines: print("\n".join(lines), flush=True), limit
        )
        self._lines.start()

    def observe(self, record: Record) -> None:
        self._lines.put(record_line(record))

    def close(self) -> None:
        """Print what waits; give up on a reader that takes nothing for some seconds."""
        self._lines.close(CLOSE_TIMEOUT_S, while_it_works=True)
        if self._lines.dropped:
            say(f"{self._lines.dropped} lines were not read in time and are only in the journal")


def record_line(record: Record) -> str:
    return json_format.dumps(to_json(record), separators=(",", ":"))
