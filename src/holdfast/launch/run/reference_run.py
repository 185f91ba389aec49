"""A run with a preference loss: its rows, its reference model, and where the reference's
log-probabilities lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.config.huggingface.folder import read_folder_model
from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.config.loading.model_from import refuse_other_shape
from holdfast.config.run import RunConfig
from holdfast.core.format.hf_names import huggingface_map
from holdfast.core.format.stored_weights import check_weights
from holdfast.data.read.files import canonical_json, checksum
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.reference import (
    MANIFEST,
    REMEDY,
    ReferenceOrigin,
    check_reference,
    reference_folder,
)
from holdfast.errors import ConfigError, DataError
from holdfast.launch.run.lora_run import IMPORTED, folder_values
from holdfast.wire.store.run_location import store_of_run

KEY = "objective.reference"


def refuse_other_rows(loaded: LoadedConfig) -> None:
    """Raises ConfigError for rows that the objective does not learn from."""
    config = loaded.config
    kind, facts = config.objective.kind, config.objective.facts
    forms = sorted({source.rows for source in config.data.sources})
    wanted = "preference" if facts.is_of_pairs else ""
    wanted = "unpaired_preference" if kind == "kto" else wanted
    if forms == [wanted] or not (wanted or config.data.has_preferences):
        return
    if wanted:
        what = (
            f"objective.kind {kind} learns from rows: {wanted}, and a source has rows: {forms[0]}"
        )
        remedy = "set rows of each source in data.sources (docs/guide/preference-data.md)"
    else:
        what = f"rows: {forms[0]} are for preference losses, and objective.kind is {kind}"
        remedy = f"set objective.kind={'dpo' if forms == ['preference'] else 'kto'}"
    raise ConfigError(what, where=loaded.where("objective.kind"), remedy=remedy)


def check_reference_model(
    loaded: LoadedConfig, stored: Mapping[str, Any], dataset: Dataset, run_folder: Path
) -> PlannedValues:
    """Return the place of the reference's log-probabilities, and its weights' checksum.

    stored: values of the run that continues; none for a new one. Raises UserError."""
    config = loaded.config
    if not config.objective.facts.needs_reference or config.lora.rank:
        return {}
    before = stored.get("objective", {}).get("reference", {})
    values: PlannedValues = {}
    weights = config.model.weights_checksum
    if named := config.objective.reference.model:
        values = _named_values(loaded, Path(named), before.get("checksum", ""))
        weights = str(values[f"{KEY}.checksum"][0])
    elif not weights:
        model = config.model.model_dump(mode="json")
        weights = checksum(canonical_json({"seed": config.seed, "model": model}))
    elif weights == IMPORTED and not before.get("key"):
        weights = _first_commit(run_folder)
    key, why = before.get("key", ""), "the run's"
    if not key:
        data, why = config.data, "dataset, weights, precision and device"
        key = ReferenceOrigin(
            dataset.version,
            weights,
            config.train.precision,
            config.device,
            data.sequence_length,
            data.chat.long_rows,
        ).key
    if config.objective.reference.key not in ("", key):
        raise ConfigError(
            f"this run's reference log-probabilities are {key}",
            where=loaded.where(f"{KEY}.key"),
            remedy="leave the key out",
        )
    return {**values, f"{KEY}.key": (key, why)}


def _named_values(loaded: LoadedConfig, folder: Path, stored: str) -> PlannedValues:
    """Those of `objective.reference.model`."""
    config, key = loaded.config, f"{KEY}.model"
    folder = Path(os.path.abspath(folder))
    refuse_other_shape(config.model, read_folder_model(folder), folder, loaded.where(key))
    names = huggingface_map(config.model)
    expected = config.objective.reference.checksum or stored
    return folder_values(folder, key, expected, lambda: check_weights(folder, names))


def _first_commit(run_folder: Path) -> str:
    """What imported weights are told apart by."""
    store = store_of_run(str(run_folder))
    return checksum(store.get(list_commits(store)[-1]))


def describe_reference(config: RunConfig, dataset: Dataset, has_begun: bool) -> list[str]:
    """A line about stored log-probabilities. has_begun: the run has started before. Raises
    DataError for damaged ones."""
    key = config.objective.reference.key
    if not key:
        return []
    folder = reference_folder(dataset, key)
    if problems := check_reference(folder):
        raise DataError(problems[0], where=str(folder), remedy=REMEDY)
    if (folder / MANIFEST).exists():
        return [f"reference log-probabilities are stored: {folder}"]
    if has_begun:
        return [f"reference log-probabilities are not complete and are computed first: {folder}"]
    return [f"reference log-probabilities are computed before the first step: {folder}"]
