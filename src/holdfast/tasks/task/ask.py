"""Asks a child process about a run's task: only the child imports the task, and torch with it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from holdfast.config.run import RunConfig
from holdfast.core.data.data_ledger import Range
from holdfast.core.data.skips import Skips
from holdfast.data.order.ledger_entries import stand_in_entries
from holdfast.errors import TaskError
from holdfast.wire.child_command import module_command

CHILD = "holdfast.tasks.child"
BASE_CHECKSUM = "base_checksum"
"""Key of the checksum of what adapters are for, next to the planned ones."""
OPTIMIZER_KEY, SCHEDULE_KEY = "train.optimizer.name", "train.schedule.kind"
"""Keys that may name a class or a function by its path."""
_OUTPUT_CHARACTERS = 2000  # of the child's last words, where it gave no answer


@dataclass(frozen=True)
class Question:
    """What a child is to do. purpose: "describe", "named" or "entries" (with `missing` and
    `last_step`)."""

    purpose: str
    config: dict[str, Any]
    skips: list[dict[str, Any]] = field(default_factory=list)
    missing: list[Range] = field(default_factory=list)
    last_step: int = 0


@dataclass(frozen=True)
class Answer:
    """message, remedy, where: why there is no result, as in an error; empty if there is one.

    result: for "describe" the planned keys of `task`, for "named" those of `train`, for "entries"
        [step, entries] for each step. where: the key that is wrong.
    """

    result: Any = None
    message: str = ""
    remedy: str = ""
    where: str = "task"


def describe_task(config: RunConfig) -> dict[str, Any]:
    """Return the planned keys of the section `task`: `launch.task_run.PLANNED_KEYS`, and for
    adapters also `BASE_CHECKSUM`. Under "train" are keys of the run file that a script decides.
    Raises TaskError."""
    planned: dict[str, Any] = _ask(Question("describe", config.model_dump(mode="json")))
    return planned


def describe_named(config: RunConfig) -> dict[str, Any]:
    """Return the planned keys of what `train` names by a path, under their full names. Raises
    TaskError."""
    planned: dict[str, Any] = _ask(Question("named", config.model_dump(mode="json")))
    return planned


def run_entries(
    config: RunConfig, skips: Skips, missing: Sequence[Range], last_step: int
) -> list[tuple[int, list[dict[str, Any]]]]:
    """As `data.ledger_entries.stand_in_entries`, from the run's data. Raises UserError."""
    if config.rollout.is_on:
        from holdfast.rollout.roles.batches import RolloutBatches

        return stand_in_entries(RolloutBatches(config, skips), missing, last_step)
    if not config.task.has_own_data:
        from holdfast.data.stream.batch import Batches
        from holdfast.data.stream.dataset_location import open_dataset

        dataset = open_dataset(config.data.folder, config.data)
        key = config.objective.reference.key
        batches = Batches(dataset, config.data, config.step_train, config.seed, skips, key)
        return stand_in_entries(batches, missing, last_step)
    dumped = config.model_dump(mode="json")
    found = _ask(Question("entries", dumped, skips.to_json(), list(missing), last_step))
    return [(int(step), entries) for step, entries in found]


def _ask(question: Question) -> Any:
    with tempfile.TemporaryDirectory(prefix="holdfast-task-") as folder:
        answer_file = Path(folder) / "answer.json"
        done = subprocess.run(
            module_command(CHILD, str(answer_file)),
            input=json.dumps(asdict(question)),
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # a table needs no device
            text=True,
            capture_output=True,
            check=False,
        )
        if not answer_file.exists():
            words, train = done.stderr.strip()[-_OUTPUT_CHARACTERS:], question.config["train"]
            named = question.config["task"]["name"]
            if question.purpose == "named":
                named = f"{train['optimizer']['name']} and {train['schedule']['kind']}"
            raise TaskError(
                f"the process that imports {named} ended with status {done.returncode}: {words}",
                remedy="import it in Python to see more",
            )
        answer = TypeAdapter(Answer).validate_python(json.loads(answer_file.read_bytes()))
    if answer.message:
        raise TaskError(answer.message, where=answer.where, remedy=answer.remedy or None)
    return answer.result
