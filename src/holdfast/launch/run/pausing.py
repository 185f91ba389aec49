"""Sessions of a run that waits for better hours (section `pause`).

The agent ends a session with a save (`elastic/agent/pause_watch.py`). Here each node waits until
its file says so, and begins the next session. Workers hold no memory and no device meanwhile. A
start in a bad hour trains until its first step, so that its errors show at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from holdfast.config.loading.load import LoadedConfig
from holdfast.config.run import RunConfig
from holdfast.elastic.agent.pause_watch import PauseSignal, last_pause
from holdfast.elastic.event_log import Say
from holdfast.errors import ConfigError, UserError
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_location import store_of_run

_POLL_S = 1.0
"""Seconds between two looks at the file, while the run waits."""


def refuse_bad_pause(loaded: LoadedConfig) -> None:
    """Raise UserError if the section `pause` has no limit, or a file that cannot be read."""
    pause = loaded.config.pause
    if not pause.file:
        return
    if pause.above is None:
        raise ConfigError(
            "pause.file has values, and no key says which are too high",
            where=loaded.where("pause.file"),
            remedy="use pause.above=400, or another number",
        )
    PauseSignal(pause).read()


def train_between_pauses(
    config: RunConfig, folder: Path, say: Say, session: Callable[[bool], int]
) -> int:
    """Train in sessions until the run ends for another reason than a pause; its exit code.

    session: trains until the run stops; True for the first one. Raises UserError.
    """
    if not config.pause.file:
        return session(True)
    signal, is_first = PauseSignal(config.pause), True
    while True:
        _wait(signal, folder, say)
        earlier = _last_pause(folder)
        code = session(is_first)
        is_first = False
        if code not in (0, config.cluster.left_exit_code) or _last_pause(folder) == earlier:
            return code


def _wait(signal: PauseSignal, folder: Path, say: Say) -> None:
    """Return when the run may train. A file that cannot be read meanwhile ends no pause."""
    paused_at, problem = _last_pause(folder), ""

    def lasts(since: float) -> bool:
        nonlocal problem
        now = time.time()
        try:
            is_paused, found = signal.lasts(now, since), ""
        except UserError as error:
            is_paused, found = now - since < signal.limits.longest_s, str(error)
        if found and found != problem:
            say(f"{found}; the run waits for it")
        problem = found
        return is_paused

    if paused_at is None or not lasts(paused_at):
        return
    say("the run waits; Ctrl-C ends the command, and the same one resumes the run")
    while lasts(paused_at):
        time.sleep(_POLL_S)
    say("the pause is over")


def _last_pause(folder: Path) -> float | None:
    return last_pause(read_journal(store_of_run(folder)))
