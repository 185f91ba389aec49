"""The agent's requests, in the training loop's form (`train.protocols.Membership`)."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.elastic.protocol.worker_messages import SaveRequest
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.policy.saving.tiers import BUCKET, DISK, MEMORY, PEERS
from holdfast.training.engine.vote import Wishes

MAX_UNSENT_STEPS = 3
"""Steps whose events a process may still have to itself when it votes on the next one. If it is
killed, other processes report these steps (`training/recover/recover.py`), and the agent
completes the ledger (`elastic/coordinator/ledger_repair.py`)."""


class AgentMembership:
    """Reads the agent's requests, as of its last answer. It waits only if the ledger is too far
    behind."""

    def __init__(
        self,
        reporter: AgentReporter,
        generation: int,
        on_outdated: Callable[[int], None],
        spans_nodes: bool = False,
    ) -> None:
        """Bind the requests to a generation.

        Args:
            on_outdated: ends the step if a newer generation has been opened.
            spans_nodes: a replica lies on several nodes, so a node that leaves may take a part of
                the state with it.
        """
        self._reporter, self._generation, self._on_outdated = reporter, generation, on_outdated
        self._spans_nodes = spans_nodes
        self._last_save_request = 0  # the newest request that has been passed on

    def requests(self, step: int) -> Wishes:
        self._reporter.wait_until_sent(step - MAX_UNSENT_STEPS)
        if self._reporter.is_fenced:
            self._on_outdated(step)
        told = self._reporter.requests
        save = told.save or SaveRequest()
        into = save.tiers if save.number > self._last_save_request else ()
        self._last_save_request = save.number
        pause = told.pause_generation == self._generation
        parting = pause and told.is_node_leaving and self._spans_nodes
        return Wishes(
            stop=told.should_stop,
            is_snapshot_enough=told.is_peer_copy_enough,
            save=DISK in into,
            snapshot=MEMORY in into or PEERS in into,
            copy=PEERS in into,
            upload=BUCKET in into,
            pause=pause,
            is_node_leaving=parting,
        )
