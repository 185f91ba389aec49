"""Decides between a restart and giving up.

Pure: the agent feeds it what happened, the simulator may too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b|did not start")
"""What the cause of a loss names if code failed; a signal or a hang names none of it."""
_TRANSIENT = re.compile(r"Connection|Timeout|BrokenPipe|PeerLost")
_VARIABLE = re.compile(r"0x[0-9a-f]+|\d+")
"""Parts of a cause that differ although the failure is the same: addresses, ranks, sizes."""


@dataclass(frozen=True)
class RestartHistory:
    """Progress of restarts so far.

    `without_progress` counts losses since the newest committed step last grew; `committed` is
    that step as of the last loss. `failure` is the last loss's failure without what varies, and
    `is_repeated` tells that the loss before had the same one.
    """

    without_progress: int = 0
    committed: int = 0
    failure: str = ""
    is_repeated: bool = False

    def with_loss(self, committed: int, cause: str = "") -> RestartHistory:
        """Count one more loss, at a time when `committed` is the newest committed step."""
        failure = failure_in(cause)
        if committed > self.committed:
            return RestartHistory(1, committed, failure)
        return replace(
            self,
            without_progress=self.without_progress + 1,
            failure=failure,
            is_repeated=bool(failure) and failure == self.failure,
        )


def failure_in(cause: str) -> str:
    """Return what is the same whenever the failure is; "" if the cause is no failure of code."""
    if not _ERROR.search(cause) or _TRANSIENT.search(cause):
        return ""
    return _VARIABLE.sub("#", cause)


def why_give_up(restarts: RestartHistory, limit: int, cause: str) -> str | None:
    """Return why not to restart once more, as a sentence; None means: restart.

    `limit` is how many restarts in a row may pass without a newer committed step. A restart does
    not repair a fault that recurs at the same place every time. Before the first step, the second
    failure of the same kind is enough to know that.
    """
    if restarts.is_repeated and not restarts.committed:
        return f"gave up: no step was done, and two starts failed alike; the cause was: {cause}"
    if restarts.without_progress <= limit:
        return None
    times = "once" if limit == 1 else f"{limit} times"
    tried = f"restarted {times} without getting" if limit else "may not restart, and never got"
    since = f"beyond step {restarts.committed}" if restarts.committed else "to a commit"
    return (
        f"gave up: {tried} {since}; the last cause was: {cause} "
        f"(the limit is cluster.max_restarts_without_progress={limit})"
    )
