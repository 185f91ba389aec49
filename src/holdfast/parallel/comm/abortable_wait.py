"""Waits for messages that can be given up, because gloo does not always end them.

When a connection breaks, gloo wakes a wait for a message that has not begun to come. It does not
wake a wait for a message of which a part has come. (`Pair::signalException` of gloo's TCP
transport goes through the pending receives, but not through the one being read; seen with torch
2.13.) Closing the group does not wake it either: it waits for as long as the group's deadline.
A peer that is killed or cut off while it sends leaves such a message behind, and more surely the
larger the message is.

So a thread that must continue lets another thread (an errand) wait, and abandons it once the
group has been given up. A closed connection brings nothing any more, so the buffers are free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.parallel.torch_compat import Work

GRACE_SECONDS = 0.05
"""For what gloo does wake, which says more about its reason."""
CUT_SHORT = "Connection closed by peer, or by this rank, in the midst of a message"


class LeftError(Exception):
    """No thread waits for this errand any more."""


class Errand:
    """One run of `job` on a thread of its own; `job` waits for messages by `wait` alone."""

    def __init__(self, job: Callable[[Errand], None], name: str) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._over = self._waits = self._given_up = self._left = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def start(self) -> None:
        self._thread.start()

    def wait(self, work: Work) -> None:
        """Until the message is there; on this errand's thread. Raises RuntimeError when it does not
        come."""
        with self._changed:
            if self._given_up:
                raise RuntimeError(CUT_SHORT)
            self._waits = True
        try:
            work.wait()
        finally:
            with self._changed:
                self._waits = False
                if self._left:  # however it ended: when gloo's own time is over it is an error
                    raise LeftError

    def give_up(self) -> None:
        """The connections are closed: wait for no message from now on."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def join(self) -> None:
        """Return when the job is over. Raises what it raised, and RuntimeError when it waits in
        vain: it touches nothing any more then."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._given_up)
            self._changed.wait_for(lambda: self._over, GRACE_SECONDS)
            if self._waits:
                self._left = True
                raise RuntimeError(CUT_SHORT)
            self._changed.wait_for(lambda: self._over)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._job(self)
        except LeftError:
            pass  # the thread that sent it out has got its error already
        except Exception as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
