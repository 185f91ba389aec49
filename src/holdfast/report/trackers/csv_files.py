"""The tracker `csv`: `train.csv`, `validation.csv` and a file for each task, one row a step."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from holdfast.report.trackers.curve import TASKS, TRAIN, VALIDATION
from holdfast.report.trackers.tracker import RunInfo, Tracker, folder_problems

_FIXED = ["step", "time"]


class CsvTracker(Tracker):
    """Rows are appended. If steps are done again, their rows are removed first."""

    can_rewind = True
    option_names = ("folder",)

    @classmethod
    def problems(
        cls, options: Mapping[str, str], environment: Mapping[str, str]
    ) -> Iterator[tuple[str, str, str]]:
        return folder_problems(options)

    def start(self, info: RunInfo) -> None:
        """Remove the rows that were written after the stored position."""
        self._folder = Path(info.options.get("folder") or info.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tables: dict[str, _Table] = {}
        prefix = TASKS.replace("/", "-")
        there = (path.stem for path in self._folder.glob(f"{prefix}*.csv"))
        for group in (TRAIN, VALIDATION, *(name.replace(prefix, TASKS, 1) for name in there)):
            self._table(group).cut(info.delivered.get(group, 0))

    def _table(self, group: str) -> _Table:
        path = self._folder / f"{group.replace('/', '-')}.csv"
        return self._tables.setdefault(group, _Table(path))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        first, group = next(iter(values), ""), TRAIN
        if first.startswith(TASKS):
            group = "/".join(first.split("/")[:2])
        elif any(name.startswith("validation/") for name in values):
            group = VALIDATION
        self._table(group).append({"step": step, "time": time, **values})

    def rewind(self, step: int) -> None:
        for table in self._tables.values():
            table.cut(step)

    def flush(self) -> None:
        for table in self._tables.values():
            table.flush()

    def finish(self, reason: str) -> None:
        for table in self._tables.values():
            table.close()


class _Table:
    """One file. Its first row has the names of the columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def append(self, row: Mapping[str, float]) -> None:
        if self._file is None:
            self._columns = self._read_columns() if self._path.exists() else []
            self._file = self._path.open("a", encoding="utf-8", newline="")
        if new := [name for name in row if name not in self._columns]:
            self._rewrite([*(self._columns or _FIXED), *(n for n in new if n not in _FIXED)], None)
        assert self._file is not None
        csv.DictWriter(self._file, self._columns, lineterminator="\n").writerow(row)

    def cut(self, step: int) -> None:
        """Remove the rows of all steps after `step`, and a row that a crash cut short."""
        self.close()
        if self._path.exists():
            columns = self._read_columns()
            self._rewrite(columns, step)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def _read_columns(self) -> list[str]:
        with self._path.open(encoding="utf-8", newline="") as file:
            return next(csv.reader(file), [])

    def _rewrite(self, columns: list[str], last_step: int | None) -> None:
        """Write the file again with other columns, or without the steps after `last_step`."""
        self.close()
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            if columns:
                writer.writeheader()
            if self._path.exists():
                with self._path.open(encoding="utf-8", newline="") as old:
                    writer.writerows(
                        row
                        for row in csv.DictReader(line for line in old if line.endswith("\n"))
                        if last_step is None or int(row["step"]) <= last_step
                    )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        self._columns = columns
        self._file = self._path.open("a", encoding="utf-8", newline="")
