"""The table of `holdfast status` for several runs: how far each is, and the keys that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config.loading.fields import leaves
from holdfast.core.json_parsing import JsonObject
from holdfast.launch.run.runs import Run
from holdfast.report.formatting import format_si, format_validation
from holdfast.report.history.progress import RunProgress
from holdfast.show.output import print_table, say

_NAMES = ("name", "folder", "data.folder", "task.folder")  # differ in any two runs
_MAX_KEYS = 6  # columns of keys; more do not fit a terminal
_MAX_VALUE_CHARS = 24


@dataclass(frozen=True)
class RunRow:
    """One run, and how far it is."""

    argument: Path  # as the user named it
    run: Run
    progress: RunProgress

    @property
    def validation(self) -> str:
        found = self.progress.validation
        return "" if found is None else format_validation(found.loss, found.bits_per_byte)

    def cells(self, keys: Sequence[str], values: dict[str, Any]) -> list[str]:
        now = self.progress
        found = [str(self.argument), now.state, f"{now.step:,} of {now.total_steps:,}"]
        if now.step:
            found += [f"{now.loss:.4f}", self.validation]
            found += [f"{format_si(now.tokens_per_second)} {now.unit}/s"]
        else:
            found += ["", "", ""]
        return found + [_shortened(values.get(key, "")) for key in keys]


def differing_keys(rows: Sequence[RunRow]) -> dict[str, list[Any]]:
    """Return the keys whose values are not the same in all runs, with the value of each run."""
    configs = [dict(leaves(row.run.resolved["config"])) for row in rows]
    keys = dict.fromkeys(key for config in configs for key in config if key not in _NAMES)
    found = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in found.items() if any(v != values[0] for v in values)}


def print_runs(rows: Sequence[RunRow]) -> None:
    """Print one line for each run."""
    different = differing_keys(rows)
    keys = list(different)[:_MAX_KEYS]
    head = ("run", "state", "step", "loss", "validation", "speed", *keys)
    print_table(
        [
            row.cells(keys, {key: different[key][index] for key in keys})
            for index, row in enumerate(rows)
        ],
        head,
    )
    if len(different) > len(keys):
        say(f"{len(different) - len(keys)} more keys differ: --json has them")


def runs_json(rows: Sequence[RunRow], figures: Sequence[JsonObject]) -> list[JsonObject]:
    """Return what `print_runs` shows, with all keys. figures: of each run's progress."""
    different = differing_keys(rows)
    return [
        {
            "run": str(row.argument),
            **figures[index],
            "validation": None if (found := row.progress.validation) is None else found.loss,
            "keys": {key: values[index] for key, values in different.items()},
        }
        for index, row in enumerate(rows)
    ]


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
