"""What a job's spec says now, read in a thread: Ray's client blocks while its head is away."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from holdfast.launch.owners.ray.board import RayBoard
from holdfast.launch.owners.ray.plan import RaySpec

READ_INTERVAL_S = 0.3
RAY_LIMIT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_LIMIT_S = 60.0
"""Ray's default for that variable: its raylets end so long after their head, with all actors."""
SAVE_S = 20.0
"""Seconds before that limit for an agent's last save. A third of a limit below a minute."""


class SpecWatch:
    """Reads the spec of a job again and again."""

    def __init__(self, board: RayBoard) -> None:
        self._board = board
        self._spec: RaySpec | None = None
        self._answered_at = time.monotonic()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="spec", daemon=True).start()

    @property
    def silent_s(self) -> float:
        """Seconds since Ray's head has answered."""
        return time.monotonic() - self._answered_at

    def newest(self) -> RaySpec:
        """Return the newest spec; wait until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._spec is not None)
            assert self._spec is not None
            return self._spec

    def wait_answer(self) -> None:
        """Wait until Ray's head answers a request of later than now."""
        asked = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._answered_at > asked)

    def _run(self) -> None:
        while True:
            with suppress(Exception):  # Ray's head is away: nothing is asked of us meanwhile
                found = self._board.read_spec()
                with self._changed:
                    self._spec, self._answered_at = found or self._spec, time.monotonic()
                    self._changed.notify_all()
            time.sleep(READ_INTERVAL_S)


def head_limit_s(environment: Mapping[str, str] = os.environ) -> float:
    """Return how long Ray's raylets wait for a head that is away."""
    with suppress(KeyError, ValueError):
        return float(environment[RAY_LIMIT_VARIABLE])
    return RAY_LIMIT_S


def leave_after_s(limit_s: float) -> float:
    """Return after how long without a head an agent has to save and leave."""
    return limit_s - min(SAVE_S, limit_s / 3)
