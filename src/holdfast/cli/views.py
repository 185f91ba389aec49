"""Who looks on while a run trains: the live view or JSON lines, metrics, TensorBoard."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from holdfast.cli.output import say
from holdfast.config.run import RunConfig
from holdfast.data.dataset import Dataset
from holdfast.events import Record, to_json
from holdfast.plan.hardware import Machine


class Views:
    """The observers of one run, opened and closed together."""

    def __init__(
        self, config: RunConfig, folder: Path, dataset: Dataset, machine: Machine, *, json: bool
    ) -> None:
        self.observers: list[Callable[[Record], None]] = []
        self.say: Callable[[str], None] = say
        self.render_metrics: Callable[[], bytes] = lambda: b""
        if json:
            self.observers.append(print_record)

    def __enter__(self) -> Views:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        return None


def print_record(record: Record) -> None:
    """One line of JSON per record of the journal, for a program that reads along."""
    print(json_format.dumps(to_json(record), separators=(",", ":")), flush=True)
