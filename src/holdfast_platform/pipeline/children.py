"""Commands that a pipeline or a search starts, and the signals that they get from it."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from holdfast_platform.pipeline.stages import LEFT_CODE

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LEFT_CODES = (LEFT_CODE, *(128 + number for number in ENDING_SIGNALS))
"""Exit codes of a command that was asked to end, and continues when it is called again."""


class Children:
    """The commands at work. A signal that asks this process to end is passed on to them."""

    def __init__(self) -> None:
        self.asked = 0  # number of the signal that asked this process to end; 0: none did
        self._at_work: list[subprocess.Popen[bytes]] = []

    def start(
        self, words: Sequence[str], lock: TextIO, folder: Path, log: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command. It holds `lock` to its end, even if this process is killed.

        Args:
            folder: where it works.
            log: gets its output; None: it goes to ours.

        Raises OSError.
        """
        out = None if log is None else log.open("ab")
        try:
            child = subprocess.Popen(
                words,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[lock.fileno()],
                start_new_session=True,  # a signal to our group reaches it once, through us
            )
        finally:
            if out is not None:
                out.close()
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {child.pid}")
        lock.flush()
        self._at_work = [each for each in self._at_work if each.poll() is None] + [child]
        if self.asked:
            child.send_signal(self.asked)
        return child

    @contextmanager
    def forward_signals(self) -> Iterator[None]:
        """Pass signals on that end this process; the commands save and leave."""
        if threading.current_thread() is not threading.main_thread():
            yield  # no other thread may set handlers
            return

        def forward(number: int, frame: object) -> None:
            self.asked = number
            for child in self._at_work:
                child.send_signal(number)

        # One that our starter has ignored, as nohup does, stays ignored.
        heard = [n for n in ENDING_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, forward) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def is_lost(code: int) -> bool:
    """Return True for the exit code, as of a shell, of a command that something outside ended."""
    return code == LEFT_CODE or code > 128


def shell_code(code: int) -> int:
    """Return an exit code of `Popen` as a shell reports it: 137 for SIGKILL."""
    return 128 - code if code < 0 else code
