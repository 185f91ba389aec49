"""The tracker `tensorboard`: event files in `tensorboard/` of the run folder, written directly.

Neither torch nor another library is needed. A process opens a new file. The file begins with the
mark that makes TensorBoard drop, from older files, all steps that will be logged again.
"""

from __future__ import annotations

import os
import socket
import time as clock
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from holdfast.report.trackers import tfevents
from holdfast.report.trackers.tracker import RunInfo, Tracker

FOLDER = "tensorboard"
_PREFIX = "events.out.tfevents."


class TensorBoardTracker(Tracker):
    can_rewind = True
    option_names = ("folder",)

    def start(self, info: RunInfo) -> None:
        self._folder = Path(info.options.get("folder") or info.run_folder / FOLDER)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = None
        self._kept_step = max(info.delivered.values(), default=0)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        if self._file is None:
            self._file = self._open(time)
        self._file.write(tfevents.scalars_record(time, step, values))

    def rewind(self, step: int) -> None:
        self._close()
        self._kept_step = step

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self, reason: str) -> None:
        self._close()

    def _open(self, time: float) -> BinaryIO:
        """Open the next file. TensorBoard reads files in the order of their names."""
        names = sorted(path.name for path in self._folder.glob(f"{_PREFIX}*"))
        now = clock.time()
        if names and (stamp := _stamp_of(names[-1])) >= now:  # the clock was set back
            now = stamp + 1e-3
        file = (self._folder / f"{_PREFIX}{now:017.6f}.{socket.gethostname()}").open("xb")
        file.write(tfevents.version_record(time))
        file.write(tfevents.restart_record(time, self._kept_step + 1))
        return file

    def _close(self) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None


def _stamp_of(name: str) -> float:
    """Return the time in a file's name; 0 for a name that another program made."""
    try:
        return float(".".join(name.removeprefix(_PREFIX).split(".")[:2]))
    except ValueError:
        return 0.0
