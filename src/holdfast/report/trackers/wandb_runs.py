"""The tracker `wandb`: one run of Weights & Biases over all sessions.

`step` is a metric of its own, and the axis of all other metrics. W&B's internal step must only
grow, and W&B would drop a value that comes late. Offline, the files lie in the tracker's folder,
and `wandb sync` sends them. Every session has the same run id, so they become one run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from holdfast.report.trackers.tracker import RunInfo, Tracker


class WandbTracker(Tracker):
    option_names = ("mode", "project", "entity")

    def start(self, info: RunInfo) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to its maker
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
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._run.log({"step": step, **values})

    def finish(self, reason: str) -> None:
        self._run.finish(exit_code=1 if reason == "failed" else 0)
