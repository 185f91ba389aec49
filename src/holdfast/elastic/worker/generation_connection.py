"""A worker's rank in one generation, and its connections there."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker.commands import CommandClient, GenerationHalts
from holdfast.elastic.worker.event_queue import UnsentEvents
from holdfast.elastic.worker.http_store import Rendezvous
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.elastic.worker.stuck_threads import ThreadId, ThreadWatcher
from holdfast.events import BatchFed
from holdfast.layout import Topology
from holdfast.wire.http.client import Client
from holdfast.wire.secret import Secret

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationConnection:
    """The process as `rank` of one generation. Nothing in it outlives the generation.

    reporter: each generation has its own, because the agent accepts only the newest.
    """

    topology: Topology
    rank: int
    halts: GenerationHalts
    rendezvous: Rendezvous
    reporter: AgentReporter

    @classmethod
    def open(
        cls,
        spec: WorkerSpec,
        secret: Secret,
        commands: CommandClient,
        topology: Topology,
        rank: int,
        unsent: UnsentEvents | None,
    ) -> GenerationConnection:
        """Connect to the agent as `rank` of `topology`, and send `unsent` first.

        Call it on the training thread: the reporter watches the calling thread.
        """
        halts = GenerationHalts(commands, topology.generation)
        meet = Client(spec.meet or spec.agent, secret, topology.generation)
        rendezvous = Rendezvous(meet, halts)
        reporter = AgentReporter(
            Client(spec.agent, secret, topology.generation),
            rank,
            heartbeat_s=spec.heartbeat_seconds,
            on_error=_print_reporter_error,
            unsent=unsent,
            is_asleep=ThreadWatcher(ThreadId.current()).is_asleep,
        )
        reporter.start()
        return cls(topology, rank, halts, rendezvous, reporter)

    def close_for_next(self, generation: int, start_step: int) -> UnsentEvents:
        """Close the connection and return its unsent events up to `start_step`, from which
        `generation` continues."""
        unsent = self.reporter.close_and_take_unsent().up_to_step(start_step)
        if generation > self.topology.generation + 1:  # other ranks continued without this process
            unsent = unsent.without_kind(BatchFed)
        self.rendezvous.close()  # the groups that needed it are closed
        return unsent

    @property
    def has_replicas_across_nodes(self) -> bool:
        """Return True if a replica lies on several nodes: one that leaves may take the only copy of
        a part of the state."""
        nodes = self.topology.nodes
        return any(len({nodes[rank] for rank in each.ranks}) > 1 for each in self.topology.replicas)


def _print_reporter_error(error: BaseException) -> None:
    logger.warning("reporter: %s: %s", type(error).__name__, error)
