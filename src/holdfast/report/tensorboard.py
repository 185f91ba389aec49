"""Curves for TensorBoard, in `tensorboard/` of the run folder; no torch, no other library.

Curves are continuous over restarts. When a generation begins from the state after step N, a new
file opens. It begins with the mark that makes TensorBoard drop everything beyond N in older files.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import RunFolderError
from holdfast.events import Evaluated, GenerationStarted, Record, StepDone
from holdfast.report import tfevents
from holdfast.report.background import BackgroundQueue

_MAX_QUEUED_RECORDS = 10_000  # records that may wait for a slow disk


class TensorBoardWriter:
    """Observer of records; `observe` only queues, a thread of its own writes.

    Raises RunFolderError when the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"event files cannot be written ({error.strerror})",
                where=str(folder),
                remedy="mend its permissions or set tensorboard=false",
            ) from error
        self._folder = folder
        self._file: BinaryIO | None = None
        self._queue: BackgroundQueue[Record] = BackgroundQueue(
            "tensorboard", self._write, _MAX_QUEUED_RECORDS
        )
        self._queue.start()

    def observe(self, record: Record) -> None:
        if isinstance(record.event, GenerationStarted | StepDone | Evaluated):
            self._queue.put(record)

    def close(self) -> None:
        """Write what waits."""
        self._queue.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Record) -> None:
        event = record.event
        if isinstance(event, GenerationStarted):
            self._begin(record, event.step)
            return
        if self._file is None:  # a view that was opened in the middle
            self._begin(record, event.step - 1)
        assert self._file is not None
        values = _step_values(record, event) if isinstance(event, StepDone) else {}
        if isinstance(event, Evaluated):
            values = {
                "validation/loss": event.loss,
                "validation/bits_per_byte": event.bits_per_byte,
            }
        self._file.write(tfevents.scalars_record(record.time, event.step, values))
        self._file.flush()  # what is written survives a kill of the agent

    def _begin(self, record: Record, step: int) -> None:
        """The generation's own file; its name sorts after those of older generations."""
        if self._file is not None:
            self._file.close()
        name = f"events.out.tfevents.{record.time:017.6f}.{socket.gethostname()}"
        self._file = (self._folder / f"{name}.g{record.generation:06d}").open("wb")
        self._file.write(tfevents.version_record(record.time))
        self._file.write(tfevents.restart_record(record.time, step + 1))
        self._file.flush()


def _step_values(record: Record, event: StepDone) -> dict[str, float]:
    values = {
        "train/loss": event.loss,
        "train/grad_norm": event.grad_norm,
        "train/learning_rate": event.learning_rate,
        "time/step_seconds": event.seconds,
        "run/generation": float(record.generation),
    }
    if event.seconds > 0:
        values["time/tokens_per_second"] = event.tokens / event.seconds
    return values | {f"time/{name}_seconds": seconds for name, seconds in event.phases.items()}
