"""How a start ends without its agent: by an early signal, or by an error in our code.

`holdfast train` prepares a dataset and imports for seconds before its agent catches signals. Until
then nothing has been trained, and the command just ends. A mere warning (SIGUSR1) ends nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import UserError
from holdfast.wire import lifeline


class EndedBySignal(BaseException):
    """A signal asked this command to end before an agent was there."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_code(self) -> int:
        """As a shell reports a command that a signal ended."""
        return 128 + self.number


@contextmanager
def early_signals_answered() -> Iterator[None]:
    """Answer the agent's signals until the agent does so itself.

    SIGINT stays Python's. A signal that our starter has ignored, as nohup does, stays ignored.
    """
    ours: dict[signal.Signals, Callable[[int, object], None]] = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for number in lifeline.AGENT_SIGNALS:
            if number is not signal.SIGINT and signal.getsignal(number) is signal.SIG_DFL:
                ours[number] = _go_on if number is signal.SIGUSR1 else _end
                signal.signal(number, ours[number])
    try:
        yield
    finally:
        for number, handler in ours.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL)


def _go_on(number: int, frame: object) -> None:
    """Not SIG_IGN: children would inherit it."""


def _end(number: int, frame: object) -> None:
    raise EndedBySignal(number)


class CrashedInError(Exception):
    """Carries the run folder whose logs should hold the traceback of the error behind it."""

    def __init__(self, folder: Path):
        self.folder = folder
        super().__init__(str(folder))


@contextmanager
def crash_log_in(folder: Path) -> Iterator[None]:
    """An unexpected error inside is logged in `folder` (a run folder), not where we stand."""
    try:
        yield
    except (UserError, BrokenPipeError, CrashedInError):
        raise
    except Exception as error:
        raise CrashedInError(folder) from error
