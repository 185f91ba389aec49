"""What `holdfast init --from FOLDER` reads of another trainer: YAML, or a checkpoint folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.config.other_trainers import axolotl, llama_factory, megatron, torchtitan
from holdfast.config.other_trainers.translation import Translation
from holdfast.errors import ConfigError

YAML = (".yaml", ".yml")
TABLES = "dataset_info.json"


def read_job(source: Path) -> Translation | None:
    """Return the configuration of another trainer; None for a folder with a model of its own.

    Raises ConfigError, and CheckpointError for a broken checkpoint."""
    if source.suffix in YAML and source.is_file():
        return _read_yaml(source)
    from holdfast.checkpoint.interop import megatron as checkpoint
    from holdfast.checkpoint.interop.dcp import is_dcp
    from holdfast.checkpoint.interop.megatron_settings import settings_of

    if (folder := checkpoint.iteration_folder(source)) is not None:
        common = checkpoint.read_common(folder)
        groups = (common.get("optimizer") or {}).get("param_groups") or []
        schedule = common.get("opt_param_scheduler") or {}
        settings = settings_of(groups, schedule, int(common["iteration"]))
        return megatron.translate(common["args"], settings)
    if not is_dcp(source):
        return None
    job = _titan_job(source)
    if job is None:
        raise ConfigError(
            "a DCP folder does not say the shape of its model",
            where=str(source),
            remedy="put next to it the file that torchtitan writes with --debug.save_config_file, "
            "or write the run file with holdfast init and its model by hand",
        )
    return torchtitan.translate(job)


def add_data(job: Translation, dataset: str, data: Mapping[str, Any] | None) -> None:
    """Name the dataset's folder, and the source of `--data` if it is given."""
    job.values["data.folder"] = f"datasets/{dataset}"
    if data is not None:
        job.values["data.sources"] = [dict(data)]
    elif "data.sources" not in job.values:
        job.notes.append("name your data in data.sources")
    if "model.from" not in job.values:
        job.notes.append("name the tokenizer of the model in data.tokenizer.path")


def _read_yaml(path: Path) -> Translation:
    from holdfast.config.loading.load import read_text
    from holdfast.config.loading.yaml_tree import parse_file

    source, _ = parse_file(read_text(path), str(path))
    if axolotl.is_axolotl(source):
        job = axolotl.translate(source)
    elif llama_factory.is_llama_factory(source):
        tables = _dataset_tables(path, str(source.get("dataset_dir") or "data"))
        job = llama_factory.translate(source, tables)
    else:
        raise ConfigError(
            "it has neither base_model, as axolotl's, nor model_name_or_path, as LLaMA-Factory's",
            where=str(path),
            remedy="name a configuration of one of these, or a folder",
        )
    named = str(job.values["model.from"])
    folder = next((f for f in (path.parent / named, Path(named)) if f.is_dir()), None)
    if folder is not None:
        job.values["model.from"] = os.path.abspath(folder)
    else:
        job.notes.append(f"{named}: download it, and name its folder in model.from")
    return job


def _dataset_tables(path: Path, folder: str) -> Mapping[str, Any]:
    """Return `dataset_info.json` of the trainer's data folder, which lies above its file."""
    for base in path.resolve().parents:
        if (base / folder / TABLES).is_file():
            file = base / folder / TABLES
            try:
                found = json.loads(file.read_text("utf-8"))
            except ValueError as error:
                raise ConfigError(
                    f"it is not valid JSON ({error})", where=str(file), remedy="mend the file"
                ) from None
            rows = found.items() if isinstance(found, dict) else ()
            return {name: about for name, about in rows if isinstance(about, dict)}
    return {}


def _titan_job(folder: Path) -> Mapping[str, Any] | None:
    """The newest job file next to a checkpoint: in it, or up to two folders above."""
    for base in (folder, *list(folder.resolve().parents)[:2]):
        for path in sorted(base.glob("*.json")):
            try:
                found = json.loads(path.read_text("utf-8"))
            except ValueError:
                continue
            if isinstance(found, dict) and torchtitan.is_torchtitan(found):
                return found
    return None
