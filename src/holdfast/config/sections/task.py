"""The `task` section: what is trained, if it is not the built-in decoder."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from holdfast.config.sections.base import Branch, InPlace, Section
from holdfast.errors import ConfigError

SCRIPT_TASK = "holdfast.tasks.script:Script"
"""The task of a run whose loop is a script."""
TASK_NAME = r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)?$"


class TaskConfig(Section):
    name: str = Field("", pattern=TASK_NAME)
    """package.module:Class, a subclass of `holdfast.Task`; empty: the built-in decoder. `task:
    package.module:Class` is short for it"""
    args: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments of the class: numbers, texts, lists"""
    folder: InPlace[str] = ""
    """where the task's module lies, if it is not an installed package; empty: in the run file's
    folder"""
    source: Branch[str] = Field("", description="digest of the task's source files (planned)")
    data: str = Field("", description="version of the task's data (planned)")
    samples: int = Field(0, ge=0, description="samples of the task's data (planned)")
    validation: InPlace[int] = Field(0, ge=0)
    """samples of the task's validation data (planned)"""
    flops: InPlace[float] = Field(0.0, ge=0)
    """FLOPs of training for a weight of 1; 0: not known (planned)"""
    parameters: tuple[str, ...] = ()
    """the task's parameters: name, shape, marks (planned)"""
    sharding: InPlace[tuple[str, ...]] = ()
    """how tensor parallelism cuts the task's parameters: name, dim and parts, or partial
    (planned)"""
    blocks: InPlace[int] = Field(0, ge=0)
    """blocks of the task that pipeline parallelism shares out; 0: it names none (planned)"""
    positions: InPlace[tuple[str, ...]] = ()
    """where the task's parameters are used: name, and numbers of blocks; -1 is before the first,
    and task.blocks after the last (planned)"""

    @property
    def label(self) -> str:
        """What is trained, in a sentence."""
        is_script = self.name == SCRIPT_TASK
        return f"the script {self.args.get('script')}" if is_script else f"task {self.name}"

    @property
    def other_run_command(self) -> str:
        """The command that begins another run of the same task."""
        if self.name == SCRIPT_TASK:
            return f"holdfast run {self.args.get('script')} --folder NEW"
        return "holdfast train RUN.yaml folder=NEW"

    @property
    def has_own_data(self) -> bool:
        """Whether the data is the task's own, not that of the section `data`. Known once the
        planned keys are."""
        return bool(self.name and self.data)

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


def refuse_task(task: TaskConfig, what: str, *, is_file: bool = False) -> None:
    """Raises ConfigError for a task, where only the built-in decoder is known. what: the subject of
    the sentence. is_file: it is the task of a run file, not of a run."""
    if task.name:
        place = "this run file" if is_file else "this run"
        read = "read its parameters with holdfast.open_checkpoint (docs/guide/python.md)"
        raise ConfigError(
            f"{what} is for the built-in decoder, and {place} trains {task.label}",
            where="task",
            remedy="name a run file without task" if is_file else read,
        )
