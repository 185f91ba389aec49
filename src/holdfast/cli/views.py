"""Who looks on while a run trains: the live view or JSON lines, metrics, TensorBoard."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from holdfast.cli.output import say
from holdfast.config.run import RunConfig
from holdfast.events import Record, to_json
from holdfast.plan.hardware import Machine
from holdfast.report.live import View
from holdfast.report.metrics import Metrics
from holdfast.report.tensorboard import Writer
from holdfast.spec.flops import CONVENTIONS, flops_per_token


class Views:
    """The observers of one run, opened and closed together."""

    def __init__(
        self, config: RunConfig, folder: Path, dataset_version: str, machine: Machine, *, json: bool
    ) -> None:
        self.say: Callable[[str], None] = say
        self._stack = ExitStack()  # what has to be closed, newest first
        metrics = metrics_of(config, dataset_version, machine)
        self.render_metrics = metrics.render
        self.observers: list[Callable[[Record], None]] = [metrics.observe]
        if config.tensorboard:
            writer = Writer(folder / "tensorboard")
            self._stack.callback(writer.close)
            self.observers.append(writer.observe)
        if json:
            self.observers.append(print_record)
        else:
            view = self._stack.enter_context(View(config.train.steps))
            self.observers.append(view.observe)
            self.say = view.say

    def __enter__(self) -> Views:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stack.close()


def metrics_of(config: RunConfig, dataset_version: str, machine: Machine) -> Metrics:
    """What `/metrics` shows; utilisation only where the device's peak is known."""
    peak = None
    if config.device == "cuda" and machine.accelerators:
        one = machine.accelerators[0].peak_flops(config.train.precision)
        peak = one * config.layout.workers if one is not None else None
    flops = {
        str(name): flops_per_token(config.model, config.data.sequence_length, name)
        for name in CONVENTIONS
    }
    info = {"model": config.model.preset or config.model.family, "dataset": dataset_version}
    return Metrics(config.name, info, flops_per_token=flops, peak_flops=peak)


def print_record(record: Record) -> None:
    """One line of JSON per record of the journal, for a program that reads along."""
    print(json_format.dumps(to_json(record), separators=(",", ":")), flush=True)
