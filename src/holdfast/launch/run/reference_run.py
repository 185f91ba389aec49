"""A run with a preference loss: its rows, its reference model, and where the reference's
log-probabilities lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.config.huggingface.folder import read_folder_model
from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.config.loading.model_from import refuse_other_shape
from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.format.hf_names import NameMap, huggingface_map
from holdfast.core.format.stored_weights import check_weights
from holdfast.core.sharding.parameters import count_parameters
from holdfast.data.read.files import canonical_json, checksum
from holdfast.data.read.vocabulary import describe_difference, tokenizer_file
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
from holdfast.rollout.roles.texts import TOKENIZER_PLACE
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
    if config.objective.kind == "distill":
        return teacher_values(loaded, dataset, before)
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
        origin = _origin(config, dataset, weights)
        key, why = origin.key, "dataset, weights, precision and device"
    if config.objective.reference.key not in ("", key):
        raise ConfigError(
            f"this run's reference log-probabilities are {key}",
            where=loaded.where(f"{KEY}.key"),
            remedy="leave the key out",
        )
    return {**values, f"{KEY}.key": (key, why)}


def check_rollout_reference(loaded: LoadedConfig, stored: Mapping[str, Any]) -> PlannedValues:
    """Return the checksum of the reference that actors read completions with. Raises UserError.

    stored: values of the run that continues; none for a new one."""
    config = loaded.config
    if not config.has_read_reference or config.lora.rank:
        return {}
    if named := config.objective.reference.model:
        before = stored.get("objective", {}).get("reference", {})
        theirs, ours = (
            Path(named, "tokenizer.json"),
            tokenizer_file(str(config.data.tokenizer.place)),
        )
        if theirs.is_file() and (difference := describe_difference(theirs, ours)):
            raise ConfigError(
                f"the reference has another tokenizer than the prompts: {difference}",
                where=loaded.where(f"{KEY}.model"),
                remedy="use a reference that was trained with data.tokenizer.path",
            )
        return _named_values(loaded, Path(named), before.get("checksum", ""))
    if config.model.weights_checksum == IMPORTED:
        raise ConfigError(
            f"objective.beta {config.objective.beta} pulls to the weights that the run begins "
            "with, and those of an imported checkpoint lie in no folder",
            where=loaded.where("objective.beta"),
            remedy=f"set {KEY}.model to a folder in Hugging Face form",
        )
    return {}


def _origin(config: RunConfig, dataset: Dataset, weights: str) -> ReferenceOrigin:
    data, precision = config.data, config.train.precision
    where = config.device, data.sequence_length, data.chat.long_rows, data.curriculum.suffix
    return ReferenceOrigin(dataset.version, weights, precision, *where)


def teacher_values(
    loaded: LoadedConfig, dataset: Dataset, before: Mapping[str, Any]
) -> PlannedValues:
    """Return the teacher's checksum, and the place of its tokens. Raises UserError.

    before: values of the run that continues. The place depends on no device, as one process
    computes all."""
    config, objective = loaded.config, loaded.config.objective
    values, _ = _teacher_weights(loaded, dataset.vocab_size, "dataset", before)
    weights = str(values[f"{KEY}.checksum"][0])
    origin = replace(_origin(config, dataset, weights), precision="fp32", device="any")
    place = origin.teacher_key(int(objective.number("top_k")), objective.number("temperature"))
    return {**values, f"{KEY}.key": (before.get("key") or place, "dataset and teacher")}


def completions_teacher_values(
    loaded: LoadedConfig, stored: Mapping[str, Any] | None
) -> PlannedValues:
    """Return what follows from the teacher of a run that generates: its place, checksum and size,
    and that the run's own completions are no answers. Raises UserError.

    stored: values of the run that continues, empty for a new one; None: no weights are read."""
    config = loaded.config
    if config.objective.kind != "distill":
        return {}
    before = None if stored is None else stored.get("objective", {}).get("reference", {})
    values, found = _teacher_weights(loaded, config.model.vocab_size, "student", before)
    theirs = Path(config.objective.reference.model).absolute() / "tokenizer.json"
    ours = Path(config.rollout.places[TOKENIZER_PLACE])
    if theirs.is_file() and (difference := describe_difference(theirs, ours)):
        raise ConfigError(
            f"teacher and prompts have different tokenizers: {difference}",
            where=loaded.where(f"{KEY}.model"),
            remedy=f"use the teacher's: data.tokenizer.path={theirs}",
        )
    return {
        **values,
        f"{KEY}.parameters": (count_parameters(found), "the folder's"),
        "objective.alpha": (0.0, "completions are the student's own"),
    }


def _teacher_weights(
    loaded: LoadedConfig, vocabulary: int, who: str, before: Mapping[str, Any] | None
) -> tuple[PlannedValues, ModelConfig]:
    """Return the teacher's place and checksum, and its shape. vocabulary: tokens that it has to
    know, of which `who` speaks. before: None: its weights are not read. Raises UserError."""
    key = f"{KEY}.model"
    folder = Path(os.path.abspath(loaded.config.objective.reference.model))
    found, length = read_folder_model(folder), loaded.config.data.sequence_length
    if found.vocab_size != vocabulary:
        raise ConfigError(
            f"the teacher knows {found.vocab_size} tokens, and the {who} has {vocabulary}",
            where=loaded.where(key),
            remedy=(
                f"use model.vocab_size={found.vocab_size}, or a teacher of {vocabulary} tokens"
                if who == "student"
                else "prepare the data with the teacher's tokenizer: "
                f"data.tokenizer.path={folder / 'tokenizer.json'}"
            ),
        )
    if found.max_position < length:
        raise ConfigError(
            f"the teacher reads {found.max_position} tokens, and a sample has {length}",
            where=loaded.where(key),
            remedy=f"use data.sequence_length={found.max_position}, or another teacher",
        )
    if before is None:
        return {}, found
    expected, names = before.get("checksum", ""), huggingface_map(found)
    return _folder_values(folder, expected, names), found


def _named_values(loaded: LoadedConfig, folder: Path, stored: str) -> PlannedValues:
    """Those of `objective.reference.model`."""
    config, key = loaded.config, f"{KEY}.model"
    folder = Path(os.path.abspath(folder))
    refuse_other_shape(config.model, read_folder_model(folder), folder, loaded.where(key))
    names = huggingface_map(config.model)
    expected = config.objective.reference.checksum or stored
    return _folder_values(folder, expected, names)


def _folder_values(folder: Path, expected: str, names: NameMap) -> PlannedValues:
    """The place of a reference and its checksum, which must be `expected` if that is known."""
    key = f"{KEY}.model"
    values = folder_values(folder, key, expected, lambda: check_weights(folder, names))
    return {key: values[key], f"{KEY}.checksum": values[f"{key}_checksum"]}


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
    is_teacher = config.objective.kind == "distill"
    if is_teacher and not (folder / MANIFEST).exists():
        raise DataError(
            "the teacher's tokens of this dataset are not stored",
            where=str(folder),
            remedy="compute them: holdfast data teach RUN.yaml",
        )
    if is_teacher:
        return [f"the teacher's tokens are stored: {folder}"]
    if (folder / MANIFEST).exists():
        return [f"reference log-probabilities are stored: {folder}"]
    if has_begun:
        return [f"reference log-probabilities are not complete and are computed first: {folder}"]
    return [f"reference log-probabilities are computed before the first step: {folder}"]
