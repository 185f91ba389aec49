"""The section `evaluate`: tasks that a run's checkpoints are evaluated on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from holdfast.config.sections.base import Section
from holdfast.config.sections.rewards import PromptsConfig


class EvaluationTask(PromptsConfig):
    """A file of rows with prompts and answers, choices, or texts (docs/guide/evaluation.md)."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """name in results; the file's name if left out"""
    choices: str = "choices"
    """column of the choices, of which `answer` is one, or its number from 0"""
    text: str = "text"
    """column of the text of a row without a prompt, whose loss is measured"""
    pattern: str | None = None
    """of a reply: the last match is compared, or its first group"""
    ignore_case: bool = False
    """capital letters of a reply do not count"""
    max_tokens: int = Field(64, ge=1, description="tokens of a reply at most")
    limit: int = Field(0, ge=0, description="rows that are used, from the first one; 0: all")
    by: str | None = None
    """column whose values get a score each, such as skill"""

    @property
    def label(self) -> str:
        """Its name in results."""
        return self.name or re.sub(r"[^A-Za-z0-9_-]", "_", Path(self.path).stem)


class EvaluateTasksConfig(Section):
    """Tasks that checkpoints are evaluated on while the run trains."""

    tasks: tuple[EvaluationTask, ...] = ()
    """files of rows; each checkpoint that is due is evaluated on all of them"""
    every: int = Field(0, ge=0)
    """steps between two evaluations: the first checkpoint at or after each of them is due; 0: the
    last checkpoint alone"""
    finish_seconds: float = Field(600.0, ge=0)
    """how long the end of the run waits for the last evaluation"""

    def broken_rules(self) -> Iterator[str]:
        labels = [task.label for task in self.tasks]
        for label in labels:
            if labels.count(label) > 1:
                yield f"evaluate.tasks has {label} twice: use name to tell them apart"
        if self.every and not self.tasks:
            yield f"evaluate.every {self.every} has no task: use evaluate.tasks, or 0"
