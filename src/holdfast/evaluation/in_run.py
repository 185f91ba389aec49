"""Evaluates a run's checkpoints while it trains, as a tracker that the leading agent keeps running.

It only reads committed checkpoints, so the curve does not depend on it. A killed one starts again,
and reads the results that are there.
"""

from __future__ import annotations

import logging
from importlib import import_module

from holdfast.errors import CheckpointError
from holdfast.evaluation.results import evaluated_steps
from holdfast.events import CheckpointCommitted, Record
from holdfast.launch.run.runs import open_run
from holdfast.report.trackers.tracker import RunInfo, Tracker

logger = logging.getLogger(__name__)


class TaskEvaluator(Tracker):
    """Evaluates the first checkpoint at or after each interval, and the last one."""

    can_rewind = True
    option_names = ()

    def start(self, info: RunInfo) -> None:
        self._run = open_run(info.run_folder)
        self._done: set[int] = set()
        self._newest = 0

    def event(self, record: Record) -> None:
        if not isinstance(record.event, CheckpointCommitted):
            return
        step, every = record.event.step, self._run.config.evaluate.every
        self._newest = step
        before = max((s for s in evaluated_steps(self._run.store) if s < step), default=0)
        if every and step // every > before // every:
            self._evaluate(step)

    def finish(self, reason: str) -> None:
        if reason == "finished" and self._newest not in self._done:
            self._evaluate(None)

    def _evaluate(self, step: int | None) -> None:
        """Evaluate a checkpoint; None: the newest one."""
        import_module("torch").set_num_threads(1)
        tasks = import_module("holdfast.evaluation.tasks")
        model = import_module("holdfast.evaluation.model")
        try:
            opened = model.open_checkpoint_of(self._run, step, logger.info)
        except CheckpointError as error:  # retention was faster
            logger.warning("step %s is not evaluated: %s", step, error)
            return
        logger.info("evaluates the %s", opened.source)
        results = tasks.results_of(opened)
        tasks.evaluate_tasks(opened, self._run.config.evaluate.tasks, logger.info, results)
        self._done.add(opened.checkpoint.step)
