"""The tracker `wandb`: one run of Weights & Biases over all sessions.

Every session has the same run id, so they become one run. Offline, the files lie in the tracker's
folder, and `wandb sync` sends them.

W&B drops a row whose internal step does not grow. So `step` is a metric of its own, and the axis of
all other metrics. The internal step is at least `ROWS_PER_STEP` times as large. So a new session
continues above the old one, and a late step gets a free internal step. A row that is sent twice
keeps its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any

from holdfast.report.trackers.tracker import RunInfo, Tracker, mode_problems

ROWS_PER_STEP = 4
"""Internal steps for each step: one for training, one for validation, some for late steps."""
FILE_INTERVAL_S = 1.0  # Seconds between two writes of W&B's process to its file
_STARTED_FILE = "started"  # Marks the folder of a session that may hold values

_NO_PROJECT_CHARS = "/\\#?%:"
_MAX_PROJECT_CHARS = 128
_LASTING_ERRORS = ("UsageError", "AuthenticationError", "UnsupportedError")


class WandbTracker(Tracker):
    option_names = ("mode", "project", "entity")
    settle_seconds = 5 * FILE_INTERVAL_S
    places = "logging.wandb.project, logging.wandb.entity and WANDB_API_KEY of the environment"

    @classmethod
    def problems(
        cls, options: Mapping[str, str], environment: Mapping[str, str]
    ) -> Iterator[tuple[str, str, str]]:
        yield from mode_problems(options)
        project = options.get("project", "")
        if found := [char for char in _NO_PROJECT_CHARS if char in project]:
            entity, slash, name = project.partition("/")
            is_team = slash and entity and name and "/" not in name
            remedy = f"use entity {entity} and project {name}" if is_team else "use another name"
            what = f"the project {project!r} has {' '.join(found)}, which W&B does not take"
            yield "project", what, remedy
        if len(project) > _MAX_PROJECT_CHARS:
            what = f"the project has more than {_MAX_PROJECT_CHARS} characters"
            yield "project", what, "use a shorter name"

    def is_refusal(self, error: BaseException) -> bool:
        kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__[:5] == "wandb"}
        return not kinds.isdisjoint(_LASTING_ERRORS) or super().is_refusal(error)

    def start(self, info: RunInfo) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to its maker
        # Each attempt to reach a server has left a folder.
        for session in (info.folder / "wandb").glob("*run-*"):
            if not (session / _STARTED_FILE).exists():
                rmtree(session, ignore_errors=True)
        wandb: Any = import_module("wandb")
        self._run = wandb.init(
            id=info.key,
            resume="allow",
            name=info.name,
            project=info.options.get("project") or "holdfast",
            entity=info.options.get("entity") or None,
            mode=info.options.get("mode") or "offline",
            dir=str(info.folder),
            config=dict(info.config),
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                disable_code=True,
                x_transaction_log_flush_interval=FILE_INTERVAL_S,
            ),
        )
        self._row = ROWS_PER_STEP * (max(info.delivered.values(), default=-1) + 1) - 1
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        (Path(self._run.dir).parent / _STARTED_FILE).touch()

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._row = max(self._row + 1, ROWS_PER_STEP * step)
        self._run.log({"step": step, **values}, step=self._row, commit=True)

    def flush(self) -> None:
        dict(self._run.summary)  # W&B's process answers after it has taken all that was logged

    def finish(self, reason: str) -> None:
        self._run.finish(exit_code=1 if reason == "failed" else 0)
