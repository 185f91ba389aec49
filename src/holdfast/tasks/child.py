"""The child process that imports a run's task and answers one question about it
(`tasks/task/ask.py`).

The answer goes into a file, because the user's modules may print.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from holdfast.config.run import RunConfig
from holdfast.core.data.skips import Skips
from holdfast.data.order.ledger_entries import stand_in_entries
from holdfast.errors import UserError
from holdfast.tasks.named.named import load_optimizer, load_schedule, sources_of
from holdfast.tasks.named.optimizer_probe import probe_optimizer
from holdfast.tasks.script import Script, load_run_task
from holdfast.tasks.task.ask import BASE_CHECKSUM, Answer, Question
from holdfast.tasks.task.batches import TaskBatches, open_samples, open_validation
from holdfast.tasks.task.initial import first_values, frozen_values, trained_module, values_checksum
from holdfast.tasks.task.loading import place_in_user_code, source_digest
from holdfast.tasks.task.module import known_flops, meta_module, module_rows, refuse_other_rows
from holdfast.tasks.task.parts_probe import probe_parts
from holdfast.tasks.task.pipeline import stage_rows
from holdfast.tasks.task.sharding import sharding_rows
from holdfast.tasks.task.task import Task
from holdfast.wire.process_end import skip_collections

_MAX_SAMPLED_STEPS = 10_000  # so that the start of a long run takes no time


def describe(config: RunConfig) -> dict[str, Any]:
    """Return the planned keys of the section `task`, and for adapters the checksum of what they are
    for. Under "train" are the keys that a script decides. Raises UserError."""
    task = load_run_task(config)
    return {"source": source_digest(config.task, task)} | describe_task(config, task)


def describe_task(config: RunConfig, task: Task) -> dict[str, Any]:
    """Return the same of a task that is loaded, without its source."""
    lora = config.lora
    rows = module_rows(task, trained_module(task, lora))
    refuse_other_rows(rows, module_rows(task, trained_module(task, lora)))
    opened = open_samples(task)
    version, samples = ("", 0) if opened is None else (opened[1], len(opened[0]))
    validation = open_validation(task)
    found: dict[str, Any] = {"data": version, "samples": samples, "parameters": list(rows)}
    found["validation"] = 0 if validation is None else len(validation)
    found["flops"] = known_flops(task)
    found["sharding"] = [] if lora.rank else list(sharding_rows(task, meta_module(task)))
    count, positions = stage_rows(task, meta_module(task))
    count, positions = (0, ()) if lora.rank else (count, positions)
    probe_parts(task, config)
    found["blocks"], found["positions"] = count, list(positions)
    found["train"] = task.planned_values() if isinstance(task, Script) else {}
    found["notes"] = task.run.notes if isinstance(task, Script) else [*task.start_notes()]
    if not lora.rank:
        return found
    frozen = frozen_values(task, first_values(task, config.seed))
    return found | {BASE_CHECKSUM: values_checksum(frozen)}


def describe_named(config: RunConfig) -> dict[str, Any]:
    """Return the planned keys of what `train` names by a path. Raises UserError."""
    train, found = config.train, dict[str, Any]()
    if train.optimizer.is_class:
        slots, layouts = probe_optimizer(load_optimizer(config), train.optimizer)
        found["train.optimizer.slots"] = [slot.text for slot in slots]
        found["train.optimizer.layouts"] = list(layouts)
    if train.schedule.is_function:
        rate = load_schedule(config)
        stride = max(1, train.steps // _MAX_SAMPLED_STEPS)
        for step in (*range(1, train.steps + 1, stride), train.steps):
            rate(step, train.schedule_steps)
    return found | sources_of(config)


def answer(question: Question) -> Answer:
    """Answer one question."""
    config = RunConfig.model_validate(question.config)
    try:
        if question.purpose == "describe":
            return Answer(describe(config))
        if question.purpose == "named":
            return Answer(describe_named(config))
        task, skips = load_run_task(config), Skips.from_json(question.skips)
        batches = TaskBatches(task, config, skips)
        return Answer(stand_in_entries(batches, question.missing, question.last_step))
    except UserError as error:
        return Answer(None, error.message, error.remedy or "", error.where or "task")
    except OSError as error:  # of the user's code
        said = " ".join(str(error).split())
        return Answer(None, f"{type(error).__name__}: {said}{place_in_user_code(error)}")


def main() -> None:
    skip_collections()
    answer_file = Path(sys.argv[1])  # a script gets arguments of its own
    found = answer(TypeAdapter(Question).validate_json(sys.stdin.read()))
    answer_file.write_text(json.dumps(asdict(found)), "utf-8")


if __name__ == "__main__":
    main()
