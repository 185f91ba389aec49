"""A checkpoint out of a folder of `torch.distributed.checkpoint`.

Weights alone become the state after step 0. With the optimizer's moments, the state is that after
the optimizer's last step, since AdamW's step count is the step. The run continues from there, with
its own data and its own schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint.format.blob import Bytes
from holdfast.checkpoint.interop.dcp import DcpFolder
from holdfast.checkpoint.interop.huggingface import ZEROS
from holdfast.checkpoint.restore.catalog import listing
from holdfast.checkpoint.save.single_writer import Source, write_single
from holdfast.config.model import ModelConfig
from holdfast.core.format.flat_names import MOMENTS, OPTIMIZERS, SCHEMES, FlatName, recognise
from holdfast.core.format.manifest import Commit
from holdfast.core.sharding.state_table import PREFIXES, TensorSpec, state_table
from holdfast.errors import CheckpointError
from holdfast.wire.store.run_store import RunStore


@dataclass(frozen=True)
class Imported:
    """The imported parts. `scheme` names the parameters. `moments`: the optimizer's state was there
    too. `left`: unused entries."""

    commit: Commit
    scheme: str
    moments: bool
    left: tuple[str, ...]


def import_dcp(
    store: RunStore,
    folder: Path,
    model: ModelConfig,
    precision: str = "fp32",
    *,
    position: Callable[[int], int] = lambda step: 0,
    weights_only: bool = False,
    config_hash: str = "",
    dataset_version: str = "",
) -> Imported:
    """Commit the folder's state. `position(step)` is the number of samples before a step.

    Raises CheckpointError when the run has checkpoints already, or the folder does not hold this
    complete model.
    """
    if taken := listing(store):
        raise CheckpointError(
            f"the run has checkpoints already ({taken[0]})",
            remedy="import into a new run folder, with folder=<path>",
        )
    found = DcpFolder.open(folder)
    table = state_table(model, precision)
    choice = recognise(model, found.tensors)
    if isinstance(choice, str):
        raise CheckpointError(
            f"tensor {choice} is missing, so this is not the run's model", where=str(folder),
            remedy="name a checkpoint of the model in the run file",
        )  # fmt: skip
    scheme, prefix = choice
    rows = {row.ours: row for row in SCHEMES[scheme](model)}
    optimizer = None if weights_only else _optimizer(found, rows)
    step = 0 if optimizer is None else _step(folder, found, rows, optimizer)
    names = {
        spec.name: _theirs(spec, rows, prefix, optimizer) for spec in table
    }  # ours -> (row, their name or none)
    for spec in table:
        _check(folder, found, spec, *names[spec.name])
    sources = (
        Source(spec.name, spec.dtype, spec.shape, _chunks(found, spec, *names[spec.name]))
        for spec in table
    )
    meta = {"position": position(step + 1) if step else 0, "imported_from": folder.name}
    commit = write_single(
        store, 0, step, sources, meta, config_hash=config_hash, dataset_version=dataset_version
    )
    used = {theirs for _, theirs in names.values()}
    used |= {row.state("step", optimizer) for row in rows.values() if optimizer is not None}
    left = tuple(name for name in (*found.tensors, *found.others) if name not in used)
    return Imported(commit, scheme, optimizer is not None, left)


def _optimizer(found: DcpFolder, rows: dict[str, FlatName]) -> str | None:
    """What stands before the optimizer's names; None where not every moment is there."""
    for before in OPTIMIZERS:
        needed = (row.state(moment, before) for row in rows.values() for moment in MOMENTS)
        if all(name in found.tensors for name in needed):
            return before
    return None


def _step(folder: Path, found: DcpFolder, rows: dict[str, FlatName], optimizer: str) -> int:
    """Return how often the parameters were updated; it is the same for all of them."""
    steps = set()
    for row in rows.values():
        name = row.state("step", optimizer)
        if name not in found.tensors:
            raise _no_step(folder, f"{name} is missing")
        if found.tensors[name].shape not in ((), (1,)):
            raise _no_step(folder, f"{name} is not one number")
        (block,) = found.rows(name, "F64")
        steps.add(float(block.reshape(-1).view("<f8")[0]))
    if len(steps) != 1 or not next(iter(steps)).is_integer() or min(steps) < 0:
        raise _no_step(folder, f"the parameters' step counts are {sorted(steps)[:3]}")
    return int(steps.pop())


def _no_step(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer's state has no single step: {what}", where=str(folder),
        remedy="import the weights alone, with --weights-only",
    )  # fmt: skip


def _theirs(
    spec: TensorSpec, rows: dict[str, FlatName], prefix: str, optimizer: str | None
) -> tuple[FlatName, str | None]:
    """The row of a state tensor, and its name in the folder; None: it starts at zero."""
    for number, ours in enumerate(PREFIXES):
        name = spec.name.removeprefix(ours)
        if spec.name.startswith(ours) and name in rows:
            row = rows[name]
            if number == 0:
                return row, prefix + row.theirs
            return row, None if optimizer is None else row.state(MOMENTS[number - 1], optimizer)
    raise AssertionError(f"{spec.name} belongs to no parameter")


def _check(
    folder: Path, found: DcpFolder, spec: TensorSpec, row: FlatName, theirs: str | None
) -> None:
    if theirs is None:
        return
    there = found.tensors[theirs]
    if there.shape not in (row.shape, spec.shape):
        raise CheckpointError(
            f"{theirs} has the shape {list(there.shape)}, the run's model needs "
            f"{list(row.shape)}", where=str(folder),
            remedy="name a checkpoint of the model in the run file",
        )  # fmt: skip
    if there.dtype not in ("F64", "F32", "BF16", "F16"):
        raise CheckpointError(f"{theirs} holds {there.dtype}, not numbers", where=str(folder))


def _chunks(
    found: DcpFolder, spec: TensorSpec, row: FlatName, theirs: str | None
) -> Iterator[Bytes]:
    """The bytes of one state tensor; zeros where there is nothing of it, and in padding rows."""
    written = 0
    if theirs is not None:
        head = spec.shape[0] // row.pairs if row.pairs else 1
        for block in found.rows(theirs, spec.dtype, head):
            value = from_pairs(block, head) if row.pairs else block
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            written += data.nbytes
            yield data
    while written < spec.nbytes:
        piece = ZEROS[: spec.nbytes - written]
        written += len(piece)
        yield piece


def from_pairs(rows: Any, head: int) -> Any:
    """rows: [n*head, ...], each head in pairs -> each head two halves (a copy)."""
    parts = rows.reshape(-1, head // 2, 2, *rows.shape[1:])
    return parts.swapaxes(1, 2).reshape(rows.shape)
