"""Follows the journals of all runs of the page on a thread, one look at each a second."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.report.dashboard.run_view import RunSource, RunView
from holdfast.wire.store.run_store import append_interval

POLL_S = 1.0
FIND_EVERY_S = 5.0  # between two searches for new runs in the folder
IDLE_POLL_S = 10.0  # between two looks at a run that is over: it may be resumed
QUIET_S = 5.0  # without a record, until the trainer is asked for a sign of life
# Records under one hold of the lock: a page may be served between two batches.
_BATCH = 2000


class Dashboard:
    """The runs and their views.

    find: returns by name what opens each run; called every few seconds. If that raises
    HoldfastError, the run is left out until the next search. is_single: there is no table.
    """

    def __init__(
        self, find: Callable[[], Mapping[str, Callable[[], RunSource]]], *, is_single: bool
    ) -> None:
        self.is_single = is_single
        self._find = find
        self._lock = threading.Lock()
        self._views: dict[str, RunView] = {}
        self._due: dict[str, float] = {}  # monotonic seconds of the next look at each run
        self._heard: dict[str, float] = {}  # the same, of the newest record or question
        self._find_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dashboard", daemon=True)

    def start(self) -> None:
        """Find the runs and begin to follow them."""
        self.search()
        self._thread.start()

    def search(self) -> None:
        """Find the runs: open new ones, and forget those that are away."""
        found, new = self._find(), dict[str, RunView]()
        for name in found.keys() - self._views.keys():
            with suppress(HoldfastError):
                new[name] = RunView(found[name]())
        with self._lock:
            known = self._views | new
            self._views = {name: known[name] for name in found if name in known}
        self._find_at = time.monotonic() + FIND_EVERY_S

    def view(self, name: str) -> RunView:
        """Return the view of a run. Raises KeyError if there is none."""
        return self._views[name]

    def close(self) -> None:
        self._stop.set()

    @property
    def is_closed(self) -> bool:
        return self._stop.is_set()

    def names(self) -> list[str]:
        with self._lock:
            return list(self._views)

    def rows(self) -> list[dict[str, Any]]:
        """Return a line for each run of the table."""
        with self._lock:
            return [view.row() for view in self._views.values()]

    def versions(self) -> dict[str, int]:
        """Return a number for each run that rises when its state changes."""
        with self._lock:
            return {name: view.version for name, view in self._views.items()}

    def state(self, name: str) -> dict[str, Any] | None:
        """Return the state of a run without its curve; None if there is no such run."""
        with self._lock:
            view = self._views.get(name)
            return None if view is None else view.to_json()

    def news(self, name: str, known: PageState) -> str:
        """Return what a page of a run lacks as JSON. Raises KeyError if there is no such run."""
        with self._lock:
            view = self._views[name]
            state, curve = view.to_json(), view.curve(known.epoch, known.points)
            known.epoch, known.points = view.epoch, len(view.progress.curve)
        found = known.changes(state) | {"curve": curve}
        return json.dumps(found, separators=(",", ":"), allow_nan=False)

    # --- the thread -------------------------------------------------------------------------
    def _follow(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            if began >= self._find_at and not self.is_single:
                self._try_search()
            for view in list(self._views.values()):
                if self._stop.is_set():
                    return
                if began >= self._due.get(view.source.name, 0.0):
                    self.look(view)
            self._stop.wait(max(0.05, POLL_S - (time.monotonic() - began)))

    def look(self, view: RunView) -> None:
        """Take what was appended to a run's journal. A store that fails is asked again later."""
        name, now = view.source.name, time.monotonic()
        try:
            records = view.read_new()
            problem = ""
        except (HoldfastError, OSError) as error:
            records, problem = [], str(error).partition("\n")[0]
        for start in range(0, len(records), _BATCH):
            with self._lock:
                view.observe(records[start : start + _BATCH])
        with self._lock:
            if problem != view.problem or not view.is_read:
                view.problem, view.is_read = problem, view.is_read or not problem
                view.version += 1
        if records:
            self._heard[name] = now
        elif not view.is_over and now - self._heard.get(name, 0.0) > QUIET_S:
            self._heard[name] = now
            if view.source.is_trainer_gone():
                with self._lock:
                    view.is_interrupted = True
                    view.version += 1
        wait = IDLE_POLL_S if view.is_over and not self.is_single else POLL_S
        self._due[name] = now + max(wait, append_interval(view.source.store)) - 0.1

    def _try_search(self) -> None:
        try:
            self.search()
        except (HoldfastError, OSError):
            self._find_at = time.monotonic() + FIND_EVERY_S  # the folder is away for a while


class PageState:
    """What an open page has been sent."""

    def __init__(self) -> None:
        self.epoch, self.points = -1, 0  # of the curve
        self._sent: Mapping[str, Any] = {}

    def changes(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries that differ from those that were sent before."""
        sent, self._sent = self._sent, state
        return {key: value for key, value in state.items() if sent.get(key, ...) != value}
