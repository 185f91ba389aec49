"""A step-0 checkpoint out of another trainer's weights.

Generation 0 is before any membership. So a run that starts in this folder (generation 1) finds the
checkpoint and begins from it, with fresh optimizer state.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.checkpoint.format.blob import Bytes
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.save.single_writer import TensorSource, write_single
from holdfast.config.huggingface.convert import shape_differences
from holdfast.config.loading.model_from import as_overrides, describe_differences
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.core.format.manifest import Commit
from holdfast.core.json_parsing import JsonObject
from holdfast.core.sharding.state_table import MODEL_PREFIX, TensorSpec, state_table
from holdfast.errors import CheckpointError
from holdfast.wire.store.run_store import RunStore

if TYPE_CHECKING:
    from holdfast.model.huggingface import FolderTensors

ZEROS = bytes(2**20)


def import_huggingface(
    store: RunStore,
    folder: Path,
    model: ModelConfig,
    precision: str = "fp32",
    *,
    optimizer: OptimizerConfig | None = None,
    config_hash: str = "",
    dataset_version: str = "",
) -> Commit:
    """Commit the weights of a Hugging Face folder as the state after step 0 of a run.

    `model` is the run's, with its vocab_size resolved. `optimizer` is the run's too; None: AdamW.
    Weights are cast to the dtype that parameters have in `precision`. Raises CheckpointError when
    the run has checkpoints already or its model has another shape, ModelFolderError when the folder
    is not what it should be.
    """
    # Torch comes with the model room, and this module must import without it.
    from holdfast.model.huggingface import import_folder

    if taken := list_commits(store):
        raise CheckpointError(
            f"the run has checkpoints already ({taken[0]})",
            remedy="import into a new run folder, with folder=<path>",
        )
    found, tensors = import_folder(folder, model.vocab_multiple)
    if differences := shape_differences(model, found):
        raise CheckpointError(
            describe_differences(differences, str(folder)),
            remedy=f"use {as_overrides(differences)}, or {shlex.quote(f'model.from={folder}')} in "
            "place of these keys",
        )
    sources = (
        TensorSource(spec.name, spec.dtype, spec.shape, _tensor_chunks(spec, tensors))
        for spec in state_table(model, precision, optimizer)
    )
    meta: JsonObject = {"position": 0, "imported_from": folder.name}
    return write_single(
        store, 0, 0, sources, meta, config_hash=config_hash, dataset_version=dataset_version
    )


def _tensor_chunks(spec: TensorSpec, tensors: FolderTensors) -> Iterator[Bytes]:
    """The bytes of one state tensor: a weight, cast; or zeros, for the optimizer's."""
    prefix = MODEL_PREFIX
    if not spec.name.startswith(prefix):
        for start in range(0, spec.nbytes, len(ZEROS)):
            yield ZEROS[: spec.nbytes - start]
        return
    value = tensors[spec.name.removeprefix(prefix)]
    cast = value.double() if spec.dtype == "F64" else value.float()
    yield cast.contiguous().numpy().reshape(-1).view("uint8").data
