"""What a run did and has, for scripts: journal, report and checkpoints."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from holdfast.checkpoint.restore.reader import Checkpoint as StoredCheckpoint
    from holdfast.launch.run.runs import Run

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "I64": "int64",
    "U8": "uint8",
}
"""torch's names of the dtypes that state has, by safetensors' names."""


def journal(run: str | Path) -> list[dict[str, Any]]:
    """Return the records of a run's journal, each as a flat dict: `pandas.DataFrame(...)` takes
    them. run: the run folder, or its run file. Raises RunFolderError."""
    from holdfast.wire.journal import read_journal

    return [_flat(record) for record in read_journal(_open(run).store)]


def _open(run: str | Path) -> Run:
    from holdfast.launch.run.runs import named_path, open_run

    return open_run(named_path(run))


def follow(
    run: str | Path, stop: threading.Event | None = None, seconds: float = 0.5, *, wait: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's journal, and new ones as they come, until the run is finished or
    `stop` is set.

    seconds: between two looks. wait: seconds for a run that has not begun. Raises RunFolderError.
    """
    from holdfast.events import RunFinished, RunStarted
    from holdfast.launch.run.runs import named_path
    from holdfast.wire.journal import follow_journal

    ended = stop or threading.Event()
    found, is_finished = _run_once_begun(named_path(run), ended, seconds, wait), False
    if found is None:
        return
    for records in follow_journal(found.store, poll_interval_s=seconds, stop=ended):
        for record in records:
            if isinstance(record.event, RunFinished | RunStarted):  # a longer run starts again
                is_finished = isinstance(record.event, RunFinished)
            yield _flat(record)
        if is_finished and not records:  # what follows the end is there, too
            return


def _run_once_begun(path: Path, stop: threading.Event, seconds: float, wait: float) -> Run | None:
    """Open a run, which another process or thread may be about to begin. Return None if `stop` was
    set meanwhile. Raises RunFolderError."""
    from holdfast.errors import RunFolderError
    from holdfast.launch.run.runs import open_run

    deadline = time.monotonic() + wait
    while True:
        try:
            return open_run(path)
        except RunFolderError:
            if time.monotonic() >= deadline:
                raise
            if stop.wait(seconds):
                return None


def summary(run: str | Path, *, curve: bool = False) -> dict[str, Any]:
    """Return what `holdfast report RUN --json` prints; with `curve` every step too."""
    from holdfast.report.history.history import read_history
    from holdfast.report.history.summary import summary as summarise

    found = _open(run)
    return summarise(read_history(found.store), found.resolved, curve=curve)


def batches(run: str | Path, step: int) -> list[dict[str, Tensor]]:
    """Return the logical microbatches of a step, as the run's workers are fed them. Raises
    UserError."""
    from holdfast.tasks.choose import open_task

    found = _open(run)
    before = sys.modules["__main__"], sys.argv
    try:
        return open_task(found.config).read_step(found.dataset_location, step)
    finally:  # a script takes their place
        sys.modules["__main__"], sys.argv = before


class Checkpoint:
    """A checkpoint's tensors by name, read when asked for: parameters as "model.NAME", AdamW's
    moments as "optimizer.exp_avg.NAME" and "optimizer.exp_avg_sq.NAME". Another optimizer's state
    has names of its own (docs/guide/optimizers.md)."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored

    @property
    def step(self) -> int:
        """The step that this is the state after."""
        return self._stored.step

    @property
    def names(self) -> Sequence[str]:
        return [spec.name for spec in self._stored.tensors]

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor. Raises KeyError."""
        import torch

        from holdfast.core.sharding.boxes import Box

        if name not in self.names:
            raise KeyError(name)
        spec = self._stored.spec(name)
        out = torch.empty(spec.shape, dtype=getattr(torch, _TORCH_NAMES[spec.dtype]))
        box = Box(name, (0,) * len(spec.shape), spec.shape)
        self._stored.read(box, out.reshape(-1).view(torch.uint8).numpy().data)
        return out

    def parameters(self) -> dict[str, Tensor]:
        """Read all parameters by their own names, for `module.load_state_dict`. A name that is tied
        to another has no tensor of its own: load with strict=False."""
        prefix = "model."
        names = [name for name in self.names if name.startswith(prefix)]
        return {name.removeprefix(prefix): self[name] for name in names}


def open_checkpoint(run: str | Path, step: int | None = None) -> Checkpoint:
    """Open the checkpoint of `step`, or the newest intact one. Raises CheckpointError."""
    from holdfast.export.weights import choose_checkpoint

    return Checkpoint(choose_checkpoint(_open(run), step, lambda line: None))


def _flat(record: Any) -> dict[str, Any]:
    from holdfast.events import to_json

    value = to_json(record)
    event: dict[str, Any] = value.pop("event")
    return value | event
