"""The child process that imports a run's task and answers one question about it (`tasks/ask.py`).

The answer goes into a file, because the user's modules may print.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.core.data.skips import Skips
from holdfast.data.ledger_entries import stand_in_entries
from holdfast.errors import UserError
from holdfast.tasks.ask import Answer, Question
from holdfast.tasks.batches import TaskBatches, open_samples
from holdfast.tasks.loading import load_task, source_digest
from holdfast.tasks.module import meta_module, module_rows, refuse_other_rows


def describe(config: RunConfig) -> dict[str, Any]:
    """Return the planned keys of the section `task`. Raises TaskError."""
    task = load_task(config.task)
    source = source_digest(config.task)
    rows = module_rows(task, meta_module(task))
    refuse_other_rows(rows, module_rows(task, meta_module(task)))
    samples, version = open_samples(task)
    return {"source": source, "data": version, "samples": len(samples), "parameters": list(rows)}


def answer(question: Question) -> Answer:
    """Answer one question."""
    config = RunConfig.model_validate(question.config)
    try:
        if question.purpose == "describe":
            return Answer(describe(config))
        task, skips = load_task(config.task), Skips.from_json(question.skips)
        batches = TaskBatches(task, config, skips)
        return Answer(stand_in_entries(batches, question.missing, question.last_step))
    except UserError as error:
        return Answer(None, error.message, error.remedy or "", error.where or "task")


def main() -> None:
    found = answer(Question.from_json(json.load(sys.stdin)))
    Path(sys.argv[1]).write_text(json.dumps(asdict(found)), "utf-8")


if __name__ == "__main__":
    main()
