"""Check-ups of a run file on a schedule: one at a time, each a line of a signed record."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.config.loading.load import LoadedConfig
from holdfast.errors import RunFolderError
from holdfast_platform.governance.record import append
from holdfast_platform.governance.signing import sign
from holdfast_platform.observe.alert_check import deliver_alert
from holdfast_platform.observe.ready import CheckUp, check_up
from holdfast_platform.pipeline.state import try_lock

KIND = "readiness"
"""Kind of the record's lines."""


@dataclass(frozen=True)
class Canary:
    """The check-ups of one run file in a folder.

    key: private key (PEM) that signs the record after each one; None: it is not signed. is_kept:
    keep the copy of a check-up that found nothing, too.
    """

    loaded: LoadedConfig
    folder: Path
    steps: int
    patience_s: float
    key: Path | None
    is_kept: bool
    say: Callable[[str], None]

    def run_once(self) -> CheckUp:
        """Carry one check-up out, and record it. Raises RunFolderError while another one is at
        work, and UserError if it cannot be recorded or signed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("a+") as lock:
            if not try_lock(lock):
                lock.seek(0)
                raise RunFolderError(
                    f"{lock.read().strip() or 'another process'} checks this run file now",
                    where=str(self.folder),
                    remedy="wait for its end, or name another folder with --to",
                )
            lock.truncate(0)
            lock.write(f"process {os.getpid()}")
            lock.flush()
            copy = self._new_folder()
            alert = partial(deliver_alert, self.loaded.config, os.environ)
            found = check_up(self.loaded, copy, self.steps, self.patience_s, alert, self.say)
            append(self.folder, KIND, found.to_json())
            if self.key is not None:
                sign(self.folder, self.key)
            if found.is_ready and not self.is_kept:
                shutil.rmtree(copy, ignore_errors=True)
            return found

    def run_every(self, seconds: float, stop: threading.Event) -> CheckUp:
        """Carry check-ups out until `stop` is set; return the last one. The next one begins so many
        seconds after the begin of the one before, or at its end, if that is later."""
        while True:
            begun = time.monotonic()
            found = self.run_once()
            self.say(describe(found))
            if stop.wait(max(0.0, begun + seconds - time.monotonic())):
                return found

    def _new_folder(self) -> Path:
        numbers = [0]
        for each in self.folder.iterdir():
            with suppress(ValueError):
                numbers.append(int(each.name))
        return self.folder / f"{max(numbers) + 1:04d}"


def describe(found: CheckUp) -> str:
    """Return the result of a check-up in a line."""
    failed = [check.name for check in found.checks if check.state == "fails"]
    words = f"failed: {', '.join(failed)}" if failed else "ready"
    return f"{found.name}: {words}, {found.seconds:g} s"
