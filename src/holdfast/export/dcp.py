"""A run's checkpoint as a folder of `torch.distributed.checkpoint`, for `holdfast export`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.checkpoint.restore.read_ahead import ReadAhead
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.sections.lora import refuse_lora
from holdfast.config.sections.task import refuse_task
from holdfast.core.format.flat_names import MOMENTS, OPTIMIZER_PREFIXES, SCHEMES, FlatName
from holdfast.core.lr_schedule import learning_rate
from holdfast.core.sharding.optimizer_state import parameter_settings
from holdfast.core.sharding.run_table import run_parameters
from holdfast.core.sharding.state_table import MODEL_PREFIX
from holdfast.errors import ConfigError
from holdfast.launch.run.runs import Run

OWN_SCHEME = "holdfast"

if TYPE_CHECKING:
    from holdfast.model.dcp_export import ExportedObject, ExportedTensor


def write_dcp_folder(to: Path, run: Run, checkpoint: Checkpoint, scheme: str) -> None:
    """Write the folder, which appears as `new_folder` says.

    Raises ModelFolderError for a folder that has things in it, OutOfSpaceError on a full disk,
    ConfigError for a run whose optimizer is not AdamW. It does so for one that has learners, too.
    """
    from holdfast.model.dcp_export import write_dcp
    from holdfast.model.new_folder import new_folder

    name = run.config.train.optimizer.name_with_state
    if name != "adamw":
        raise ConfigError(
            f"the format dcp holds AdamW's state, and train.optimizer.name of this run is {name}",
            where=str(run.folder),
            remedy="export the weights with --format hf, or read its tensors with "
            "holdfast.open_checkpoint (docs/guide/python.md)",
        )
    run.config.outer.refuse_one_state(
        "the format dcp", str(run.folder), "export the weights with --format hf"
    )
    if scheme != OWN_SCHEME:
        refuse_task(run.config.task, f"--names {scheme}")
        refuse_lora(run.config.lora, f"--names {scheme}", "use --format hf, or --names holdfast")
    parameters = run_parameters(run.config)
    rows = (
        tuple(FlatName(p.name, p.name, p.shape) for p in parameters)
        if scheme == OWN_SCHEME
        else SCHEMES[scheme](run.config.model)
    )
    tensors = list(_tensors(rows, checkpoint))
    with new_folder(to) as partial:
        write_dcp(
            partial,
            tensors,
            _objects(rows, run, checkpoint.step),
            ReadAhead(checkpoint, [tensor.source for tensor in tensors]).read,
        )


def _tensors(rows: tuple[FlatName, ...], checkpoint: Checkpoint) -> Iterator[ExportedTensor]:
    """Parameters under their own names, moments below the optimizer."""
    from holdfast.model.dcp_export import ExportedTensor

    for slot in ("", *MOMENTS):
        for row in rows:
            source = f"optimizer.{slot}.{row.ours}" if slot else MODEL_PREFIX + row.ours
            dtype = checkpoint.spec(source).dtype
            path: tuple[str, ...] = (row.theirs,)
            if slot:
                path = (OPTIMIZER_PREFIXES[0].rstrip("."), row.state_name(slot, ""))
            yield ExportedTensor(".".join(path), path, source, dtype, row.shape, row.pairs)


def _objects(rows: tuple[FlatName, ...], run: Run, step: int) -> Iterator[ExportedObject]:
    """Yield what a trainer's optimizer has apart from moments: the step, and each group's
    settings."""
    from holdfast.model.dcp_export import ExportedObject, optimizer_settings
    from holdfast.tasks.named.named import load_schedule

    train = run.config.train
    function = load_schedule(run.config) if train.schedule.is_function else None
    rate = learning_rate(train, max(step, 1), function)
    settings = {p.name: parameter_settings(train.optimizer, p) for p in run_parameters(run.config)}
    root = OPTIMIZER_PREFIXES[0].rstrip(".")
    groups = {
        each: optimizer_settings(
            rate * each.rate_scale,
            train.optimizer.learning_rate * each.rate_scale,
            train.optimizer.betas,
            train.optimizer.eps,
            each.weight_decay,
        )
        for each in set(settings.values())
    }
    for row in rows:
        inside = row.state_name("step", "")
        yield ExportedObject(f"{root}.{inside}", (root, inside), float(step), tensor=True)
        for key, value in groups[settings[row.ours]].items():
            inside = f"param_groups.{row.theirs}.{key}"
            yield ExportedObject(f"{root}.{inside}", (root, inside), value)
