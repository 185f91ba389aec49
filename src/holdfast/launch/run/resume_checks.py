"""Checks of a run folder before a run resumes in it: nothing is cut, padded or invented."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.fencing import superseded_keys
from holdfast.checkpoint.bucket.recover_folder import recover_folder
from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import find_damage
from holdfast.config.loading.identity import (
    SOURCE_KEYS,
    TASK_SOURCE,
    changed_keys,
    config_differences,
    is_place,
)
from holdfast.config.loading.load import LoadedConfig
from holdfast.config.run import RunConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.core.format.manifest import Commit
from holdfast.core.lr_schedule import last_common_step, learning_rate
from holdfast.core.sharding.optimizer_state import VELOCITY, slot_prefix
from holdfast.core.sharding.run_table import run_state_table
from holdfast.errors import CheckpointError, CorruptError, HoldfastError, RunFolderError
from holdfast.launch.run.branch_config import batches_after
from holdfast.launch.run.bucket_run import begin_again_word
from holdfast.launch.run.runs import drop_unknown_keys, read_resolved
from holdfast.wire.store.location import open_store, second_place
from holdfast.wire.store.run_location import (
    bucket_of_run,
    location_of_run,
    store_of_run,
    where_of_run,
)
from holdfast.wire.store.run_store import MissingKeyError, RunStore

BATCH_KEYS = ("train.batch_size", "train.batch_warmup")
"""A branch changes them from its first step on: the batches before it were dealt."""


def usable_commits(store: RunStore) -> list[str]:
    """Return the keys of the checkpoints that the run has not given up, the newest first."""
    keys = list_commits(store)
    given_up = superseded_keys(store, keys)
    return [key for key in keys if key not in given_up]


def branch_command(folder: Path, stored: Mapping[str, Any], config: RunConfig) -> tuple[str, str]:
    """Return the command that begins a branch of the run in `folder` with the changed keys, and
    what the branch does to the learning rate.

    Both are "" for a run without a checkpoint. Otherwise the command names the newest before the
    last step. If only a wsd schedule gets longer, it names the last before the decay."""
    steps = [step_of(key) for key in usable_commits(store_of_run(folder))]
    if not steps:
        return "", ""
    at, after = steps[0], config.inner_train
    # With learners, a step of the run is a round of many inner steps, which the rate follows.
    every = config.outer.inner_steps if config.outer.is_on else 1
    before: TrainConfig | None = None
    with suppress(ValidationError):
        before = RunConfig.model_validate(drop_unknown_keys(dict(stored))).inner_train
        is_longer = (before.schedule, before.optimizer) == (after.schedule, after.optimizer)
        if is_longer and after.schedule.kind == "wsd":
            same = last_common_step(before, after, at * every) // every
            at = max((step for step in steps if step <= same), default=at)
    at = max((step for step in steps if step <= at and step < config.train.steps), default=at)
    to = Path("runs", folder.name.rpartition("-")[0]) if bucket_of_run(folder) else folder
    words = ["holdfast", "branch", location_of_run(folder), "--at", str(at), "--to", _free(to)]
    found = [d for d in config_differences(stored, config) if not is_place(d.key)]
    typed = [d for d in found if not d.key.startswith((*BATCH_KEYS, TASK_SOURCE, *SOURCE_KEYS))]
    changes = changed_keys(typed, config)
    if before is not None and any(d.key.startswith(BATCH_KEYS) for d in found):
        changes.append(batches_after(before, after, at))
    if at >= config.train.steps:
        changes = [change for change in changes if not change.startswith("train.steps=")]
        changes.append(f"train.steps={2 * at}")
    note = ""
    is_function = after.schedule.is_function or (before and before.schedule.is_function)
    if at and before is not None and not is_function:
        was, becomes = learning_rate(before, at * every), learning_rate(after, at * every + 1)
        if (text := f"{becomes:.3g}") != f"{was:.3g}":
            note = f" (the rate {was:.3g} becomes {text})"
    return " ".join([shlex.join(words), *changes]), note


def _free(folder: Path, ending: str = "-branch") -> str:
    path, number = f"{folder}{ending}", 1
    while Path(path).exists():
        number += 1
        path = f"{folder}{ending}-{number}"
    return path


def refuse_other_shapes(commit: Commit, config: RunConfig, where: str | None = None) -> None:
    """Raises CheckpointError for a checkpoint with other tensors than the run file's model has."""
    wanted = {t.name: (t.dtype, t.shape) for t in run_state_table(config)}
    found = {t.name: (t.dtype, t.shape) for t in commit.table}
    kept = slot_prefix(VELOCITY)
    had, keeps = (any(name.startswith(kept) for name in names) for names in (found, wanted))
    if had != keeps:
        raise CheckpointError(
            f"the checkpoint of step {commit.step} has {'the' if had else 'no'} movement of the "
            f"weights, which layout.schedule pipemare {'alone ' if had else ''}keeps",
            where=where,
            remedy="use layout.schedule " + ("pipemare" if had else "pipedream-2bw"),
        )
    for name in [*found, *wanted]:
        if found.get(name) != wanted.get(name):
            raise CheckpointError(
                f"the checkpoint of step {commit.step} has {_shape(found.get(name))} for {name}, "
                f"and the run file's model has {_shape(wanted.get(name))}",
                where=where,
                remedy="use the model and train.precision of the run that wrote it",
            )


def _shape(found: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{found[0]} {list(found[1])}" if found else "nothing"


def refuse_unfit_state(folder: Path, config: RunConfig) -> None:
    """Raises UserError if the newest checkpoint in a run folder has other tensors than the model,
    or lies after the last step."""
    store, steps = store_of_run(folder), config.train.steps
    if not folder.is_dir():
        return
    for key in usable_commits(store):
        with suppress(MissingKeyError, CorruptError):  # a restore takes the next one
            commit = Checkpoint.open(store, key).commit
            refuse_other_shapes(commit, config, where_of_run(folder))
            if commit.step > steps:
                raise _cut_error(folder, commit.step, steps)
            return


def refuse_cut(folder: Path, steps: int) -> None:
    """Raises RunFolderError if the newest checkpoint lies after the last step."""
    done = [step_of(key) for key in usable_commits(store_of_run(folder))]
    if done and done[0] > steps:
        raise _cut_error(folder, done[0], steps)


def _cut_error(folder: Path, done: int, steps: int) -> RunFolderError:
    return RunFolderError(
        f"this run has done step {done}, and train.steps {steps} would cut it",
        where=where_of_run(folder),
        remedy=f"use train.steps={done} or more",
    )


def refuse_branch_without_state(folder: Path, loaded: LoadedConfig, fresh: bool) -> None:
    """Raises RunFolderError if a branch would begin at step 0."""
    config = loaded.config
    elsewhere = config.checkpoint.bucket or config.checkpoint.peers
    if not config.branch_of or not (fresh or (read_resolved(folder) is None and not elsewhere)):
        return
    moved = Path(loaded.base).absolute()
    stored = {} if fresh or moved == folder.absolute() else read_resolved(moved) or {}
    if stored.get("config", {}).get("branch_of") == config.branch_of:
        raise RunFolderError(
            f"this branch lies in {moved} now, and its run file names the folder where it was made",
            where=where_of_run(folder),
            remedy=f"add {shlex.quote(f'folder={moved}')}",
        )
    raise RunFolderError(
        f"this run continues {config.branch_of}, and "
        + ("--fresh would begin it at step 0" if fresh else "its first checkpoint is not here"),
        where=where_of_run(folder),
        remedy="make another branch: holdfast branch RUN --at STEP --to NEW",
    )


def bring_back_fallback(
    store: RunStore, config: RunConfig, config_hash: str, is_fresh: bool, say: Callable[[str], None]
) -> None:
    """Copy a last state from the second place into the run folder. Raises as `recover_folder`."""
    place = second_place(store, config.checkpoint.fallback)
    if not place or ("://" not in place and not os.path.isdir(place)):
        return
    try:
        recover_folder(
            store, place, config_hash, is_fresh, lambda line: say(line.replace("the bucket", place))
        )
    except CheckpointError as error:
        raise CheckpointError(error.message, where=place, remedy=error.remedy) from None


def ensure_end_is_intact(folder: Path, step: int, bucket: str, say: Callable[[str], None]) -> None:
    """Read the last checkpoint of a finished run. If it is damaged, bring it back from the bucket.

    Raises RunFolderError, with the newest intact checkpoint, if the bucket does not have it."""
    store = store_of_run(folder)
    keys = usable_commits(store)
    if not keys or step_of(keys[0]) != step or (problem := find_damage(store, keys[0])) is None:
        return
    if bucket and _bring_back(store, keys[0], bucket):
        say(f"the last checkpoint was damaged ({problem}); it was brought back from the bucket")
        return
    intact = next((step_of(key) for key in keys[1:] if find_damage(store, key) is None), None)
    if intact is None:
        remedy = f"no older one is intact either: {begin_again_word(folder)}"
    else:
        command = ["holdfast", "branch", location_of_run(folder), "--at", str(intact), "--to"]
        remedy = (
            f"the newest intact one is of step {intact}; do the {step - intact} steps after it "
            f"again in a run of its own: {shlex.join([*command, _free(folder, '-again')])}"
        )
    raise RunFolderError(
        f"this run did all {step} steps, but its last checkpoint is damaged: {problem}",
        where=where_of_run(folder),
        remedy=remedy,
    )


def _bring_back(folder: RunStore, key: str, bucket: str) -> bool:
    """Replace what is damaged of a checkpoint; return True if it is intact now."""
    try:
        copy_checkpoint(open_store(bucket), key, folder)
    except (HoldfastError, MissingKeyError):
        return False
    return find_damage(folder, key) is None
