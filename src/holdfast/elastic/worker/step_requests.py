"""The agent's requests, in the training loop's form (`train.protocols.Membership`)."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.elastic.worker.reporter import Reporter
from holdfast.policy.saving.tiers import BUCKET, DISK, PEERS
from holdfast.train.journal_repair import COVERED
from holdfast.train.vote import Wishes


class AgentMembership:
    """Reads the agent's requests, as of its last answer. It waits only if the ledger is too far
    behind."""

    def __init__(
        self, reporter: Reporter, generation: int, outdated: Callable[[int], None],
        spread: bool = False,
    ) -> None:  # fmt: skip
        """Bind the requests to a generation.

        Args:
            on_outdated: ends the step if a newer generation has been opened.
            spans_nodes: a replica lies on several nodes, so a node that leaves may take a part of
                the state with it.
        """
        self._reporter, self._generation, self._outdated = reporter, generation, outdated
        self._spread = spread
        self._done = 0  # the newest request that has been passed on

    def wishes(self, step: int) -> Wishes:
        self._reporter.catch_up(step - COVERED)
        if self._reporter.fenced:
            self._outdated(step)
        told = self._reporter.wishes
        into, self._done = (told.into if told.request > self._done else ()), told.request
        pause = told.pause == self._generation
        parting = pause and told.parting and self._spread
        return Wishes(
            stop=told.stop, brief=told.brief, save=DISK in into, remember=PEERS in into,
            copy=PEERS in into, upload=BUCKET in into, pause=pause, parting=parting,
        )  # fmt: skip
