"""The exit codes of a worker, for its agent."""

from __future__ import annotations

import signal

DONE = 0  # finished or left, and said so in its last report
CRASHED = 1  # a bug: the traceback stands in the worker's log
USER_ERROR = 2  # something the person at the keyboard must mend: a restart would not
PEER_LOST = 75  # a collective failed because another rank is gone
AGENT_LOST = 79  # the lifeline ended


def describe_exit_code(code: int) -> str:
    """Return an exit code of `os.waitstatus_to_exitcode` in words; a negative code is a signal."""
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    words = {PEER_LOST: "lost its peers", AGENT_LOST: "lost its agent"}
    words |= dict.fromkeys((DONE, CRASHED, USER_ERROR), "")
    why = words.get(code, "ended by os._exit of the script or a library")
    return f"exit {code}" + (why and f" ({why})")
