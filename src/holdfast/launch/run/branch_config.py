"""The run file of a branch: the parent's values, the changed keys, and nothing that cannot change.

It is written into the branch's folder with absolute paths, so it means the same from anywhere.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.config.loading import yaml_tree
from holdfast.config.loading.fields import as_path, change_of, leaves
from holdfast.config.loading.identity import is_place
from holdfast.config.loading.load import LoadedConfig, resolve_config
from holdfast.config.loading.model_from import yaml_word
from holdfast.config.run import RunConfig
from holdfast.config.sections.base import Change
from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.config.sections.task import SCRIPT_TASK
from holdfast.config.sections.train import TrainConfig
from holdfast.core.data.sample_order import BatchSchedule
from holdfast.data.stream.dataset_location import resolve_place
from holdfast.errors import ConfigError
from holdfast.launch.run.runs import RESOLVED_FILE, Run, read_environment
from holdfast.launch.run.task_run import (
    CLIP_NORM,
    GIVEN,
    PLANNED,
    PLANNED_KEYS,
    describe_in,
    describe_named_in,
    refuse_keys_of_the_script,
)
from holdfast.wire.store.location import SEAL_BY_NAME

PATH_KEYS = (
    "data.folder",
    "data.cache",
    "cluster.faults",
    "cluster.notices_account",
    "checkpoint.bucket",
    "checkpoint.seal",
)
OWN_KEYS = {
    "folder": "name it with --to",
    "branch_of": "leave it out",
    "train.epochs": "use train.steps",
}
"""Keys that `holdfast branch` sets -> remedy for one on its command line."""
UNKEPT_ORIGINS = {"device": "planned", "layout.workers": "planned", "cluster.node": "command line"}
"""Keys that a start plans for its machine, or is given for its node -> the origin that shows it."""


def branch_config(parent: Run, step: int, target: Path, overrides: Sequence[str]) -> LoadedConfig:
    """Return the configuration of a branch, read back from the run file that it will have.

    Raises ConfigError for an override that is wrong, or a key that the command sets itself."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in OWN_KEYS:
            raise ConfigError(
                f"holdfast branch sets {key} itself",
                where=f"command line: {override}",
                remedy=OWN_KEYS[key],
            )
    run_id = str(parent.resolved.get("run_id", ""))
    given = [
        f"folder={yaml_word(str(target))}",
        f"branch_of={'.'.join(filter(None, (parent.config.name, run_id)))}@{step}",
    ]
    if not parent.config.has_own_data:
        given.append(f"data.folder={yaml_word(resolve_place(parent.dataset_location))}")
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", target.name):
        given.append(f"name={target.name}")
    values = _stored_values(parent)
    started_in = str(read_environment(parent.folder).get("folder", ""))
    name = str(parent.folder / RESOLVED_FILE)
    changed = resolve_config(yaml_tree.dump(values), name, [*given, *overrides], started_in)
    dumped = _with_absolute_paths(changed)
    where = os.path.abspath(parent.folder)
    text = f"# A branch of {parent.config.name}: holdfast branch {where} --at {step}\n"
    kept = _without_defaults(dumped)
    if parent.config.task.name == SCRIPT_TASK:
        refuse_keys_of_the_script(changed, kinds=("command line",))
        origins = {key: one.get("kind") for key, one in parent.resolved.get("origins", {}).items()}
        kinds = origins.get(CLIP_NORM), changed.origins[CLIP_NORM].kind
        is_given = kinds[0] in GIVEN or kinds[1] == "command line"
        clip_norm = changed.config.train.optimizer.clip_norm if is_given else None
        kept = _without_keys_of_the_script(kept, clip_norm)
    text += yaml_tree.dump(kept)
    loaded = resolve_config(text, str(target / "run.yaml"), base=str(target))
    folder = loaded.config.task.folder
    if loaded.config.task.name:
        loaded = loaded.with_values(describe_in(loaded, folder))
    return loaded.with_values(describe_named_in(loaded, folder)).validated()


def _stored_values(parent: Run) -> dict[str, Any]:
    """The parent's values, without those of its last start's machine or node. Paths of the data
    start where they did."""
    values = parent.config.model_dump(mode="json")
    origins = parent.resolved.get("origins", {})
    default = RunConfig().model_dump(mode="json")
    for key in PLANNED_KEYS:
        _set(values, f"task.{key}", _get(default, f"task.{key}"))
    for key, kind in UNKEPT_ORIGINS.items():
        if origins.get(key, {}).get("kind") == kind:
            _set(values, key, _get(default, key))
    for key, value in list(leaves(values)):
        if is_place(key) and isinstance(value, str):
            # It starts at the run file that named it, or at the folder of the command.
            origin = origins.get(key, {})
            base = str(read_environment(parent.folder).get("folder", ""))
            if origin.get("kind") == "file":
                file = origin.get("place", "").rpartition(":")[0]
                base = os.path.join(base, os.path.dirname(file))
            found = os.path.abspath(os.path.join(base, os.path.expanduser(value)))
            _set(values, key, found if os.path.exists(found) else value)
    return values


def _with_absolute_paths(changed: LoadedConfig) -> dict[str, Any]:
    """The values, with each path that the command line gave as an absolute one."""
    values, default = changed.config.model_dump(mode="json"), RunConfig().model_dump(mode="json")
    for key in PATH_KEYS:
        path = _get(values, key)
        is_word = key == "checkpoint.seal" and path == SEAL_BY_NAME
        if path and "://" not in path and path != _get(default, key) and not is_word:
            _set(values, key, os.path.abspath(path))
    return values


def refuse_bad_changes(parent: Run, loaded: LoadedConfig, step: int) -> None:
    """Raises ConfigError for a changed key that no branch can change, or that would change the
    steps before the branch."""
    here = dict(leaves(loaded.config.model_dump(mode="json")))
    there = dict(leaves(parent.config.model_dump(mode="json")))
    for key in sorted(here.keys() | there.keys()):
        same = here.get(key) == there.get(key) or is_place(key)
        same = same or key in OWN_KEYS or key.startswith(PLANNED)
        if not same and change_of(key) is Change.NEVER:
            raise ConfigError(
                f"{key} cannot change in a branch: no checkpoint of {parent.folder} fits another "
                "value",
                where="command line",
                remedy="leave it out, or begin another run: holdfast train RUN.yaml folder=NEW",
            )
    if loaded.config.train.steps <= step:
        raise ConfigError(
            f"train.steps {loaded.config.train.steps} leaves no step after step {step}",
            where="command line",
            remedy=f"add train.steps={2 * step or 1000}, or branch at an earlier step",
        )
    _refuse_other_batches(parent.config.train, loaded.config.train, step)
    _refuse_other_mix(parent.config.data, loaded.config.data, step)
    bucket = parent.config.checkpoint.bucket
    if bucket and loaded.config.checkpoint.bucket == bucket:
        raise ConfigError(
            f"checkpoint.bucket {bucket} holds the checkpoints of {parent.folder}",
            where=str(parent.folder),
            remedy="give the branch a prefix of its own, or none: "
            f"{shlex.quote(f'checkpoint.bucket={_other_prefix(bucket)}')} or checkpoint.bucket=''",
        )


def _other_prefix(bucket: str) -> str:
    address, mark, options = bucket.partition("?")
    return f"{address.rstrip('/')}-branch{mark}{options}"


def _refuse_other_batches(before: TrainConfig, after: TrainConfig, step: int) -> None:
    """Raises ConfigError if a step up to `step` would have another batch. The position in the data
    would change, so samples would be repeated or left out."""
    old, new = batch_schedule(before), batch_schedule(after)
    starts = {1, *(s.from_step for t in (before, after) for s in t.batch_warmup)}
    if not step or all(old.size(s) == new.size(s) for s in starts if s <= step):
        return
    raise ConfigError(
        f"the samples of the steps up to {step} were dealt in other batches (step {step}: "
        f"{old.size(step)} samples)",
        where="command line",
        remedy=f"use train.batch_size={before.batch_size} {batches_after(before, after, step)}",
    )


def _refuse_other_mix(before: DataConfig, after: DataConfig, step: int) -> None:
    """Raises ConfigError if a step up to `step` would have samples of other sources."""
    old, new = ([stage for stage in d.mix if stage.from_step <= step] for d in (before, after))
    if old != new:
        given = ", ".join(
            f"{{from_step: {stage.from_step}, weights: {{"
            + ", ".join(f"{name}: {weight:g}" for name, weight in stage.weights.items())
            + "}}"
            for stage in old
        )
        raise ConfigError(
            f"the samples of the steps up to {step} were dealt with other weights of sources",
            where="command line",
            remedy=f"begin data.mix with [{given}], and give new items a from_step above {step}",
        )


def batches_after(before: TrainConfig, after: TrainConfig, step: int) -> str:
    """Return the `train.batch_warmup=...` to type: the batches of `before` up to `step`, and those
    of `after` from then on. It needs `train.batch_size` of `before`."""
    new = batch_schedule(after)
    stages = [(s.from_step, s.batch_size) for s in before.batch_warmup if s.from_step <= step]
    stages.append((step + 1, new.size(step + 1)))
    stages += [(s.from_step, s.batch_size) for s in after.batch_warmup if s.from_step > step + 1]
    listed = ", ".join(f"{{from_step: {s}, batch_size: {n}}}" for s, n in stages)
    return shlex.quote(f"train.batch_warmup=[{listed}]")


def batch_schedule(train: TrainConfig) -> BatchSchedule:
    return BatchSchedule(
        train.batch_size, [(stage.from_step, stage.batch_size) for stage in train.batch_warmup]
    )


def _without_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The values that a run file has to give: those that are not a default or the preset's. A model
    without a preset is written in full."""
    default = RunConfig().model_dump(mode="json")
    kept = _changed(values, default) or {}
    optimizer = values["train"]["optimizer"]
    if optimizer["name"] != default["train"]["optimizer"]["name"]:  # it has defaults of its own
        unused = OptimizerConfig.model_validate(optimizer).unused_keys
        kept.setdefault("train", {})["optimizer"] = {
            key: value
            for key, value in optimizer.items()
            if value is not None and key not in unused
        }
    for key in PLANNED:  # a start of the branch finds them out
        _, section, name = key.split(".")
        kept.get("train", {}).get(section, {}).pop(name, None)
    model, preset = values["model"], values["model"]["preset"]
    if preset is not None:
        shape = ModelConfig.model_validate({"preset": preset}).model_dump(mode="json")
        model = {"preset": preset, **{k: v for k, v in model.items() if v != shape[k]}}
    return {**kept, "model": model}


def _without_keys_of_the_script(kept: dict[str, Any], clip_norm: float | None) -> dict[str, Any]:
    """Leave out what the script decides, which a start would refuse. clip_norm: one that was given
    for the run."""
    train = {k: v for k, v in kept.get("train", {}).items() if k not in ("optimizer", "schedule")}
    if clip_norm is not None:
        train["optimizer"] = {"clip_norm": clip_norm}
    rest = {key: value for key, value in kept.items() if key not in ("model", "data", "train")}
    return {**rest, "train": train} if train else rest


def _changed(value: Any, default: Any) -> Any:
    """The part of a value that differs from the default; None for none."""
    if isinstance(value, dict) and isinstance(default, dict):
        found = {key: _changed(inner, default.get(key)) for key, inner in value.items()}
        return {key: inner for key, inner in found.items() if inner not in (None, {})}
    return None if value == default else value


def _get(values: dict[str, Any], key: str) -> Any:
    found: Any = values
    for part in as_path(key):
        found = found[part]
    return found


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = as_path(key)
    holder: Any = values
    for part in parents:
        holder = holder[part]
    holder[last] = value
