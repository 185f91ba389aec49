"""The trackers that a run file names, as programs that an agent starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from holdfast.config.loading.identity import decisive_values
from holdfast.config.loading.load import LoadedConfig
from holdfast.config.loading.model_from import TRANSFORMERS_TASK
from holdfast.config.run import RunConfig
from holdfast.config.sections.data import SourceConfig
from holdfast.config.sections.task import refuse_task
from holdfast.data.read.source_files import find_files
from holdfast.elastic.run_context import TrackerProgram
from holdfast.errors import ConfigError
from holdfast.report.alerts.webhook import PLACE as WEBHOOK
from holdfast.report.alerts.webhook import webhook_options
from holdfast.report.trackers.process import TrackerSpec
from holdfast.report.trackers.registry import (
    BUILT_IN,
    check_options,
    load_tracker,
    options_of,
    require_tracker,
    trackers_of,
)
from holdfast.wire.child_command import paths_for

TRACKER_MODULE = "holdfast.report.trackers.process"
_EVALUATOR = "holdfast.evaluation.in_run:TaskEvaluator"
_NO_LIMIT_S = 1e9  # of one evaluation
_LAST_ALERTS_WAIT_S = 60.0
"""Of the end of a run, for its last alerts. They take so long only if the processors are busy."""


def refuse_missing_trackers(loaded: LoadedConfig) -> None:
    """Refuse a tracker that cannot run here. Raises ConfigError."""
    for name in trackers_of(loaded.config):
        key = "logging.trackers"
        if name in BUILT_IN and name not in loaded.config.logging.trackers:
            key = "tensorboard"
        require_tracker(name, loaded.where(key))
        if name in BUILT_IN:  # without importing what it needs
            options = options_of(name, loaded.config.logging)
            check_options(name, load_tracker(name), options, partial(_place, loaded, name))


def refuse_bad_tasks(loaded: LoadedConfig) -> None:
    """Raises UserError for evaluate.tasks that cannot be read, or that the run cannot answer."""
    config = loaded.config
    if not config.evaluate.tasks:
        return
    if config.task.name != TRANSFORMERS_TASK:
        refuse_task(config.task, "evaluate.tasks")
    if not config.model.has_language_head:
        raise ConfigError(
            "a reward model writes no text, and evaluate.tasks needs one",
            where=loaded.where("evaluate.tasks"),
            remedy="remove evaluate.tasks",
        )
    for number, task in enumerate(config.evaluate.tasks):
        key = f"evaluate.tasks.{number}"
        found = find_files(SourceConfig(kind="jsonl", path=task.path), loaded.where(f"{key}.path"))
        if found.refused:
            raise found.refused[0]


def _place(loaded: LoadedConfig, name: str, option: str) -> str:
    """Return where an option of a built-in tracker stands, with its key."""
    key = f"logging.{name}.{option}"
    if key not in loaded.origins:
        return "logging.options"
    place = loaded.where(key)
    return place if key in place else f"{place}: {key}"


def tracker_programs(config: RunConfig, folder: Path) -> tuple[TrackerProgram, ...]:
    """Return the programs of a run's trackers."""
    programs = []
    for name in trackers_of(config):
        log = f"logs/tracker-{name.replace(':', '.')}.log"
        options = options_of(name, config.logging)
        spec = tracker_spec(name, config, folder, options, str((folder / log).absolute()))
        programs.append(TrackerProgram(name, TRACKER_MODULE, spec.to_json_line(), log))
    if config.evaluate.tasks:
        log = "logs/evaluate.log"
        spec = tracker_spec(_EVALUATOR, config, folder, {}, str((folder / log).absolute()))
        line = replace(spec, timeout_s=_NO_LIMIT_S).to_json_line()
        wait_s, by_hand = config.evaluate.finish_seconds, f"holdfast evaluate {folder}"
        programs.append(
            TrackerProgram("evaluate.tasks", TRACKER_MODULE, line, log, wait_s, by_hand)
        )
    if config.observe.webhook:
        log = "logs/alerts.log"
        options = webhook_options(config)
        spec = tracker_spec(WEBHOOK, config, folder, options, str((folder / log).absolute()))
        # With the niceness of other trackers no alert comes while workers use every processor.
        line, by_hand = replace(spec, niceness=0).to_json_line(), f"holdfast track {folder}"
        programs.append(
            TrackerProgram(
                "observe.webhook", TRACKER_MODULE, line, log, _LAST_ALERTS_WAIT_S, by_hand
            )
        )
    return tuple(programs)


def tracker_spec(
    name: str, config: RunConfig, folder: Path, options: Mapping[str, str], log: str
) -> TrackerSpec:
    """Return what one tracker's process needs. log: its file; "" for standard error."""
    module = name.partition(":")[0] if ":" in name else TRACKER_MODULE
    return TrackerSpec(
        tracker=name,
        run=config.name,
        run_folder=str(folder.absolute()),
        config=decisive_values(config.model_dump(mode="json")),
        options=dict(options),
        timeout_s=config.logging.timeout_seconds,
        paths=[str(Path(path).absolute()) for path in paths_for(module)],
        log=log,
    )
