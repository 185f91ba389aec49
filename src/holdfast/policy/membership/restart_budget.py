"""Decides between a restart and giving up.

Pure: the agent feeds it what happened, the simulator may too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RestartHistory:
    """Progress of restarts so far.

    `without_progress` counts losses since the newest committed step last grew; `committed` is
    that step as of the last loss.
    """

    without_progress: int = 0
    committed: int = 0

    def with_loss(self, committed: int) -> RestartHistory:
        """Count one more loss, at a time when `committed` is the newest committed step."""
        if committed > self.committed:
            return RestartHistory(1, committed)
        return replace(self, without_progress=self.without_progress + 1)


def why_give_up(restarts: RestartHistory, limit: int, cause: str) -> str | None:
    """Return why not to restart once more, as a sentence; None means: restart.

    `limit` is how many restarts in a row may pass without a newer committed step. A restart does
    not repair a fault that recurs at the same place every time.
    """
    if restarts.without_progress <= limit:
        return None
    times = "once" if limit == 1 else f"{limit} times"
    tried = f"restarted {times} without getting" if limit else "may not restart, and never got"
    since = f"beyond committed step {restarts.committed}" if restarts.committed else "to a commit"
    return (
        f"gave up: {tried} {since}; the last cause was: {cause} "
        f"(the limit is cluster.max_restarts_without_progress={limit})"
    )
