"""A checkpoint out of a folder of `torch.distributed.checkpoint`, or of any flat state.

Weights alone become the state after step 0. With the optimizer's moments, the state is that after
the optimizer's last step, since AdamW's step count is the step. The run continues from there, with
its own data and its own schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from holdfast.checkpoint.format.blob import Bytes
from holdfast.checkpoint.interop.huggingface import ZEROS
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.save.single_writer import TensorSource, write_single
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.core.format.flat_names import (
    MOMENTS,
    OPTIMIZER_PREFIXES,
    SCHEMES,
    FlatName,
    recognise_scheme,
)
from holdfast.core.format.manifest import Commit
from holdfast.core.json_parsing import JsonObject
from holdfast.core.sharding.state_table import LOSS_SCALE_ROW, MODEL_PREFIX, TensorSpec, state_table
from holdfast.errors import CheckpointError
from holdfast.wire.store.run_store import RunStore


class FlatTensor(Protocol):
    """A tensor's description. dtype: by safetensors' name."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class FlatState(Protocol):
    """Tensors by flat names, and the names of what is no tensor; `DcpFolder` is one."""

    @property
    def tensors(self) -> Mapping[str, FlatTensor]: ...
    @property
    def non_tensors(self) -> Sequence[str]: ...
    def iterate_rows(self, name: str, dtype: str, unit: int = 1) -> Iterator[Any]: ...


@dataclass(frozen=True)
class ImportResult:
    """The imported parts. `naming_scheme` names the parameters. `has_moments`: the optimizer's
    state was there too. `unused_names`: unused entries."""

    commit: Commit
    naming_scheme: str
    has_moments: bool
    unused_names: tuple[str, ...]


def import_flat(
    store: RunStore,
    found: FlatState,
    folder: Path,
    model: ModelConfig,
    precision: str = "fp32",
    *,
    position_of_step: Callable[[int], int] = lambda step: 0,
    weights_only: bool = False,
    optimizer: OptimizerConfig | None = None,
    config_hash: str = "",
    dataset_version: str = "",
) -> ImportResult:
    """Commit a state under flat names; `folder` is where it lies. `position_of_step(step)` is the
    number of samples before a step. optimizer: the run's; None: AdamW.

    Raises CheckpointError when the run has checkpoints already, or the state does not hold this
    complete model, or has the moments of another optimizer.
    """
    if taken := list_commits(store):
        raise CheckpointError(
            f"the run has checkpoints already ({taken[0]})",
            remedy="import into a new run folder, with folder=<path>",
        )
    rows_here = state_table(model, precision, optimizer)
    table = tuple(spec for spec in rows_here if spec != LOSS_SCALE_ROW)
    choice = recognise_scheme(model, found.tensors)
    if isinstance(choice, str):
        raise CheckpointError(
            f"tensor {choice} is missing, so this is not the run's model",
            where=str(folder),
            remedy="name a checkpoint of the model in the run file",
        )
    scheme, prefix = choice
    rows = {row.ours: row for row in SCHEMES[scheme](model)}
    state = None if weights_only else _find_optimizer_prefix(found, rows)
    if state is None and not weights_only:
        _refuse_part(found, rows, folder)
    name = "adamw" if optimizer is None else optimizer.name_with_state
    if state is not None and name != "adamw":
        raise CheckpointError(
            f"it holds AdamW's moments, and the run's train.optimizer.name is {name}",
            where=str(folder),
            remedy="import the weights alone, with --weights-only",
        )
    step = 0 if state is None else _read_step(folder, found, rows, state)
    # ours -> (row, their name or none)
    names = {spec.name: _find_source(spec, rows, prefix, state) for spec in table}
    for spec in table:
        _check_source(folder, found, spec, *names[spec.name])
    chunks = {spec.name: _tensor_chunks(found, spec, *names[spec.name]) for spec in table}
    for spec in rows_here[len(table) :]:  # zeros: the scale that a run begins with
        chunks[spec.name] = iter([bytes(spec.nbytes)])
    sources = [TensorSource(s.name, s.dtype, s.shape, chunks[s.name]) for s in rows_here]
    meta: JsonObject = {
        "position": position_of_step(step + 1) if step else 0,
        "imported_from": folder.name,
    }
    commit = write_single(
        store, 0, step, sources, meta, config_hash=config_hash, dataset_version=dataset_version
    )
    used = {theirs for _, theirs in names.values()}
    used |= {row.state_name("step", state) for row in rows.values() if state is not None}
    left = tuple(name for name in (*found.tensors, *found.non_tensors) if name not in used)
    return ImportResult(commit, scheme, state is not None, left)


def _find_optimizer_prefix(dcp_folder: FlatState, rows: dict[str, FlatName]) -> str | None:
    """What stands before the optimizer's names; None where not every moment is there."""
    for before in OPTIMIZER_PREFIXES:
        needed = (row.state_name(moment, before) for row in rows.values() for moment in MOMENTS)
        if all(name in dcp_folder.tensors for name in needed):
            return before
    return None


def _refuse_part(found: FlatState, rows: dict[str, FlatName], folder: Path) -> None:
    """Raises CheckpointError if moments of some parameters are there, and not of all."""
    for before in OPTIMIZER_PREFIXES:
        names = [row.state_name(moment, before) for row in rows.values() for moment in MOMENTS]
        lacks = [name for name in names if name not in found.tensors]
        if len(lacks) < len(names):
            raise CheckpointError(
                f"the optimizer's state is not complete: {lacks[0]} is missing",
                where=str(folder),
                remedy="import the weights alone, with --weights-only",
            )


def _read_step(
    folder: Path, dcp_folder: FlatState, rows: dict[str, FlatName], optimizer: str
) -> int:
    """Return how often the parameters were updated; it is the same for all of them."""
    steps = set()
    for row in rows.values():
        name = row.state_name("step", optimizer)
        if name not in dcp_folder.tensors:
            raise _no_step_error(folder, f"{name} is missing")
        if dcp_folder.tensors[name].shape not in ((), (1,)):
            raise _no_step_error(folder, f"{name} is not one number")
        (block,) = dcp_folder.iterate_rows(name, "F64")
        steps.add(float(block.reshape(-1).view("<f8")[0]))
    if len(steps) != 1 or not next(iter(steps)).is_integer() or min(steps) < 0:
        raise _no_step_error(folder, f"the parameters' step counts are {sorted(steps)[:3]}")
    return int(steps.pop())


def _no_step_error(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer's state has no single step: {what}",
        where=str(folder),
        remedy="import the weights alone, with --weights-only",
    )


def _find_source(
    spec: TensorSpec, rows: dict[str, FlatName], prefix: str, optimizer: str | None
) -> tuple[FlatName, str | None]:
    """The row of a state tensor, and its name in the folder; None: it starts at zero."""
    name = spec.name.removeprefix(MODEL_PREFIX)
    if name != spec.name:
        return rows[name], prefix + rows[name].theirs
    _, moment, name = spec.name.split(".", 2)  # optimizer.exp_avg.norm.weight
    if name in rows:
        return rows[name], None if optimizer is None else rows[name].state_name(moment, optimizer)
    raise AssertionError(f"{spec.name} belongs to no parameter")


def _check_source(
    folder: Path, dcp_folder: FlatState, spec: TensorSpec, row: FlatName, theirs: str | None
) -> None:
    if theirs is None:
        return
    there = dcp_folder.tensors[theirs]
    if there.shape not in (row.shape, spec.shape):
        raise CheckpointError(
            f"{theirs} has the shape {list(there.shape)}, the run's model needs {list(row.shape)}",
            where=str(folder),
            remedy="name a checkpoint of the model in the run file",
        )
    if there.dtype not in ("F64", "F32", "BF16", "F16"):
        raise CheckpointError(
            f"{theirs} holds {there.dtype}, not numbers",
            where=str(folder),
            remedy="name a checkpoint of the model in the run file",
        )


def _tensor_chunks(
    dcp_folder: FlatState, spec: TensorSpec, row: FlatName, theirs: str | None
) -> Iterator[Bytes]:
    """The bytes of one state tensor; zeros where there is nothing of it, and in padding rows."""
    written = 0
    if theirs is not None:
        head = spec.shape[0] // row.pairs if row.pairs else 1
        for block in dcp_folder.iterate_rows(theirs, spec.dtype, head):
            value = pairs_to_halves(block, head) if row.pairs else block
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            written += data.nbytes
            yield data
    while written < spec.nbytes:
        piece = ZEROS[: spec.nbytes - written]
        written += len(piece)
        yield piece


def pairs_to_halves(rows: Any, head: int) -> Any:
    """rows: [n*head, ...], each head in pairs -> each head two halves (a copy)."""
    parts = rows.reshape(-1, head // 2, 2, *rows.shape[1:])
    return parts.swapaxes(1, 2).reshape(rows.shape)
