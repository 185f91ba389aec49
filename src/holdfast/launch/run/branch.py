"""Makes a run that continues another one from one of its checkpoints.

The branch is a run folder of its own. Its first checkpoint is a copy of the parent's, every byte
of it checked: weights, optimizer state and position in the data. Its journal begins with a
`RunBranched` event, which names the parent. The parent is only read, so it may be training.

The folder is made under a name with a dot and renamed at the end. A branch that was cut short is
therefore no run folder, and the same command resumes it.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.bucket.copy import CopyResult, copy_checkpoint
from holdfast.checkpoint.restore.catalog import step_of
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.loading.fields import as_path, value_at
from holdfast.config.loading.identity import SOURCE_KEYS, TASK_SOURCE, config_hash
from holdfast.config.loading.load import LoadedConfig
from holdfast.core.format.manifest import Commit
from holdfast.elastic.protocol.generation_record import GenerationRecord, record_of
from holdfast.errors import (
    CheckpointError,
    CorruptError,
    HoldfastError,
    RunFolderError,
    StoreError,
    UserError,
)
from holdfast.events import RunBranched
from holdfast.launch.run.branch_config import branch_config, refuse_bad_changes
from holdfast.launch.run.resume_checks import refuse_other_shapes, usable_commits
from holdfast.launch.run.run_folder import write_description
from holdfast.launch.run.runs import IMPORTED_FOLDER, Run, read_resolved
from holdfast.machine.hardware import HardwareInfo
from holdfast.wire.journal import JournalWriter, segment_key
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_location import bucket_of_run, store_of_run
from holdfast.wire.store.run_store import MissingKeyError, RunStore
from holdfast.wire.term import create_generation, newest_generation

NEWEST = "newest"
WRITER = "branch"  # Writer of the journal's first segment

OTHER_FOLDER = "name another folder with --to"

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Branch:
    """A run folder that was made. loaded: its configuration, as its run file gives it."""

    folder: Path
    loaded: LoadedConfig
    copied: CopyResult
    event: RunBranched

    @property
    def run_file(self) -> Path:
        return self.folder / "run.yaml"


def make_branch(
    parent: Run,
    at: str,
    target: Path,
    overrides: Sequence[str],
    machine: HardwareInfo,
    on_progress: OnProgress = lambda done, total: None,
) -> Branch:
    """Make the run folder `target`, which continues `parent` from the state after step `at`.

    at: a number, or "newest". overrides: key=value, the changed keys of the run file.
    Raises UserError for a target that exists, a step without an intact checkpoint, and a key that
    must not change. A CheckpointError names no place: it is of the parent.
    """
    target = Path(os.path.abspath(target))
    if target.is_relative_to(os.path.abspath(parent.folder)):
        raise RunFolderError(
            f"this lies in the run that it continues, {parent.folder}",
            where=str(target),
            remedy="name a folder outside of it with --to",
        )
    if "{name}" in str(target):
        raise RunFolderError(
            "{name} stands for the run's name in the key folder, so no branch may be called so",
            where=str(target),
            remedy=OTHER_FOLDER,
        )
    if os.path.lexists(target):
        raise RunFolderError(
            "this exists, and a branch begins in a folder of its own",
            where=str(target),
            remedy=OTHER_FOLDER,
        )
    problem: HoldfastError | None = None
    step = 0
    for source, commit in _find_origins(parent, at):
        step = commit.step
        loaded = branch_config(parent, step, target, overrides)
        refuse_bad_changes(parent, loaded, step)
        refuse_other_shapes(commit, loaded.config)
        try:
            origin = source, commit
            return _make_folder(parent, origin, target, loaded, overrides, machine, on_progress)
        except (CheckpointError, CorruptError, MissingKeyError) as error:
            problem = problem or error
    assert problem is not None, "there is an origin at least"
    what = problem.message if isinstance(problem, UserError) else str(problem)
    raise CheckpointError(
        f"the checkpoint of step {step} cannot be copied: {what}",
        remedy="see which are intact with: "
        + shlex.join(["holdfast", "checkpoint", "verify", parent.place]),
    ) from problem


def _find_origins(parent: Run, at: str) -> Iterator[tuple[RunStore, Commit]]:
    """Yield the checkpoint of a step: as the run folder has it, then as the bucket does.

    A checkpoint that the run has given up is no state of it. Raises CheckpointError for none."""
    found, steps = False, set()
    problem = ""
    for store in _stores(parent):
        usable = usable_commits(store)
        steps |= {step_of(key) for key in usable}
        wanted = step_of(usable[0]) if at == NEWEST and usable else at
        for key in usable:
            if str(step_of(key)) != str(wanted):
                continue
            try:
                commit = Checkpoint.open(store, key).commit
            except (CorruptError, MissingKeyError) as error:
                problem = problem or f" that can be read ({error})"
                continue
            found = True
            yield store, commit
    if not found:
        listed = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointError(
            f"there is no checkpoint of step {at}{problem}; there are those of: {listed}",
            remedy="name one of these steps with --at, or newest",
        )


def _stores(parent: Run) -> Iterator[RunStore]:
    yield parent.store
    if bucket := parent.config.checkpoint.bucket:
        yield open_store(bucket)


def _make_folder(
    parent: Run,
    origin: tuple[RunStore, Commit],
    target: Path,
    loaded: LoadedConfig,
    overrides: Sequence[str],
    machine: HardwareInfo,
    on_progress: OnProgress,
) -> Branch:
    """Make the folder under another name, and rename it. After an error it is removed."""
    source, commit = origin
    part = target.with_name(f".{target.name}.branch")
    hash_ = config_hash(loaded.config)
    if part.exists() and (read_resolved(part) or {}).get("config_hash") != hash_:
        shutil.rmtree(part)  # left by another command
    event = RunBranched(
        parent.config.name,
        str(parent.resolved.get("run_id", "")),
        parent.place if bucket_of_run(parent.folder) else os.path.abspath(parent.folder),
        commit.key,
        [*overrides, *_other_source(parent, loaded)],
        step=commit.step,
    )
    try:
        has_own = loaded.config.has_own_data
        dataset = parent.dataset_location if has_own else loaded.config.data.folder
        try:
            write_description(part, loaded, machine, dataset, parent.dataset_version)
        except StoreError:  # there is no key
            raise
        except RunFolderError as error:
            raise RunFolderError(error.message, where=str(target), remedy=OTHER_FOLDER) from None
        store = store_of_run(part)
        _create_generation(store, commit.generation, parent.store)
        copied = copy_checkpoint(source, commit.key, store, on_progress, config_hash=hash_)
        with suppress(MissingKeyError):
            # of the same command, cut short
            store.delete(segment_key(commit.generation, WRITER))
        writer = JournalWriter(store, WRITER, commit.generation)
        writer.emit(event)
        writer.flush(sync=True)
        if (settings := parent.folder / IMPORTED_FOLDER).is_dir():
            shutil.copytree(settings, part / IMPORTED_FOLDER, dirs_exist_ok=True)
        _publish(part, target)
    except HoldfastError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Branch(target, loaded, copied, event)


def _other_source(parent: Run, loaded: LoadedConfig) -> list[str]:
    """The digests of files that are no longer the parent's, as changed keys."""
    pairs = [(key, as_path(key)) for key in (TASK_SOURCE, *SOURCE_KEYS)]
    return [
        f"{key}={here}"
        for key, path in pairs
        if (here := value_at(loaded.config, path)) != value_at(parent.config, path)
    ]


def _create_generation(store: RunStore, generation: int, parent: RunStore) -> None:
    """Create the checkpoint's generation, so that the branch's own are newer. It has no members:
    the branch waits for none of the parent's nodes. The data that the parent leaves out stays out.
    """
    if generation <= newest_generation(store):
        return  # generation 0, of imported weights; or the same command was cut short
    record = GenerationRecord()
    with suppress(MissingKeyError, CorruptError):
        record = GenerationRecord(skips=record_of(parent, newest_generation(parent)).skips)
    create_generation(store, generation, record.to_json())


def _publish(part: Path, target: Path) -> None:
    try:
        os.rename(part, target)
    except OSError as error:
        raise RunFolderError(
            f"the branch cannot be made here ({error.strerror})",
            where=str(target),
            remedy=OTHER_FOLDER,
        ) from None
