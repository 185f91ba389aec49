"""Starts a run: what `holdfast train`, `holdfast run`, scripts and adapters stand on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.api.early_end import crash_log_in, early_signals_answered
from holdfast.api.progress import StageProgress, say
from holdfast.api.views import RunViews
from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.errors import OverBudgetError
from holdfast.launch import local
from holdfast.launch.node.addresses import refuse_foreign_address
from holdfast.launch.node.trackers import refuse_bad_tasks, refuse_missing_trackers
from holdfast.launch.ranks.launchers import LauncherPlace
from holdfast.launch.ranks.local_ranks import as_one_node
from holdfast.launch.ranks.roll_call import call_roll
from holdfast.launch.run.bucket_run import place_word
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.pausing import refuse_bad_pause, train_between_pauses
from holdfast.launch.run.runs import run_folder_of
from holdfast.launch.start.begin import BegunRun, Start, begin_run, finished_step
from holdfast.launch.start.facts import Facts, Screen
from holdfast.launch.start.machine import plan_for_machine
from holdfast.machine.hardware import detect_hardware
from holdfast.wire.store.run_location import store_of_run

_LIMIT_KEY = "plan.ask_above_usd"


def confirm_cost(loaded: LoadedConfig, usd: float) -> None:
    """Ask on a terminal. Raises OverBudgetError for any answer but yes, and without a terminal."""
    limit = loaded.config.plan.ask_above_usd
    if usd <= limit:
        return
    cost = f"by the plan this run costs ${usd:,.2f}, and {_LIMIT_KEY} is {limit:g}"
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{cost}; train? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise OverBudgetError(
        cost, where=loaded.where(_LIMIT_KEY), remedy=f"pass --yes, or {_LIMIT_KEY}={int(usd) + 1}"
    )


SCREEN = Screen(say, StageProgress, confirm_cost)  # This process's terminal


@dataclass(frozen=True)
class StartResult:
    """How a start ended."""

    exit_code: int  # 0, 1, 3, 130
    folder: Path | None = None  # the run folder; None in a process whose node another one trains on
    last_step: int | None = None  # of a run that was finished before; None if it trained


def start(
    run_file: Path | None,
    overrides: Sequence[str] = (),
    *,
    fresh: bool = False,
    json: bool = False,
    yes: bool = False,
    before_joining: Callable[[], None] | None = None,
) -> StartResult:
    """Start or resume the run of a run file, and return when it ends.

    Of the processes of a launcher, one of each node trains.

    Args:
        run_file: None for the defaults and the overrides.
        overrides: `key=value`, as on the command line.
        fresh: begin again; the old run folder is moved aside.
        json: print the journal as JSON lines instead of a view.
        yes: do not ask, whatever the run costs.
        before_joining: called once the node's processes run; the node joins when it returns.

    Raises UserError.
    """
    results: list[StartResult] = []

    def start_node(place: LauncherPlace | None) -> int:
        loaded = load_config(run_file, overrides)
        facts = Facts(detect_hardware(), os.environ, place)
        loaded = plan_for_machine(loaded, facts)
        facts = facts.of_nodes(loaded)
        folder = run_folder_of(loaded.config)
        with crash_log_in(folder):
            watch = HolderWatch(folder, say)
            refuse_missing_trackers(loaded)
            refuse_bad_tasks(loaded)
            refuse_bad_pause(loaded)
            refuse_foreign_address(loaded.config.cluster)
            started = Start(loaded, facts, folder, watch, SCREEN, fresh, yes)
            begun = begin_run(started)
            code = 0
            if begun.last_step is None:
                config = begun.loaded.config
                code = train_between_pauses(
                    config, folder, say, lambda is_first: train_begun(started, begun, is_first)
                )
        results.append(StartResult(code, folder, begun.last_step))
        return code

    def train_begun(started: Start, begun: BegunRun, is_first: bool) -> int:
        facts, folder, config = started.facts, started.folder, begun.loaded.config
        version = begun.dataset_version
        if is_first and facts.launcher is not None and facts.several:
            call_roll(store_of_run(folder), facts.launcher, config.launch.gather_seconds)
        with RunViews(config, folder, version, facts.hardware, json=json) as views:
            code = local.train_locally(
                begun.loaded,
                observers=views.observers,
                render_metrics=views.render_metrics,
                seen_progress=views.seen_progress,
                say=views.say,
                say_last=views.say_last,
                dataset_version=version,
                fresh=fresh and is_first,
                watch=started.watch,
                before_joining=before_joining,
            )
        if code == 0 and finished_step(folder, config.train.steps) is not None:
            say(f"finished; the report: holdfast report {place_word(folder)}")
        return code

    with early_signals_answered():
        code = as_one_node(start_node)
    return results[0] if results else StartResult(code)
