"""Event files for TensorBoard, written without torch.

One continuous curve over restarts: when a generation begins from the state after step N, a new
file opens with the mark that makes TensorBoard forget everything beyond N in the older ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.events import Evaluated, GenerationStarted, Record, RunStarted, StepDone


class Writer:
    """Observer of records. Raises ConfigError when tensorboardX is not installed.

    Writing is tensorboardX's own thread's work: `observe` only queues.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tensorboardX is not installed", where="tensorboard",
                remedy="pip install 'holdfast[tensorboard]' or set tensorboard=false",
            ) from error  # fmt: skip
        self._open = SummaryWriter
        self._folder = folder
        self._writer: Any = None
        self._fresh = True  # no older session wrote here

    def observe(self, record: Record) -> None:
        event = record.event
        if isinstance(event, RunStarted):
            self._fresh = not event.resumed
        elif isinstance(event, GenerationStarted):
            self._begin(record.generation, event.step)
        elif isinstance(event, StepDone):
            values = {
                "train/loss": event.loss,
                "train/grad_norm": event.grad_norm,
                "train/learning_rate": event.learning_rate,
                "time/step_seconds": event.seconds,
            }
            if event.seconds > 0:
                values["time/tokens_per_second"] = event.tokens / event.seconds
            values |= {f"time/{name}_seconds": s for name, s in event.phases.items()}
            values["run/generation"] = record.generation
            self._add(values, record)
        elif isinstance(event, Evaluated):
            values = {
                "validation/loss": event.loss,
                "validation/bits_per_byte": event.bits_per_byte,
            }
            self._add(values, record)

    def close(self) -> None:
        """Write what is queued; idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin(self, generation: int, step: int) -> None:
        self.close()
        first = self._fresh and step == 0
        self._fresh = False
        self._writer = self._open(
            str(self._folder), purge_step=None if first else step + 1, flush_secs=5,
            filename_suffix=f".g{generation:06d}",
        )  # fmt: skip

    def _add(self, values: dict[str, float], record: Record) -> None:
        if self._writer is None:
            self._begin(record.generation, record.event.step - 1)
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, record.event.step, walltime=record.time)
