"""The generation planner: decides a generation's topology, rank assignment and start state.

`policy.membership.transitions` decides when a generation is due, and of which nodes.

    plan    Before the object is made: the planner places the present processes. A process that
            holds a state keeps it.
    begin   After the object is made, which fences all older generations: choose what is restored if
            the processes do not hold the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.peers.config import Peer
from holdfast.config.run import RunConfig
from holdfast.elastic.coordinator.bad_steps import BadStepTracker
from holdfast.elastic.coordinator.coordinator import PlanOutdatedError
from holdfast.elastic.coordinator.survivors import RecoveryPlan, RecoveryPlanner
from holdfast.elastic.node.mover_supervisor import MoverSupervisor
from holdfast.elastic.protocol.coordinator_messages import NodeReport, StartState
from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.errors import CheckpointError, LayoutError
from holdfast.events import Event, GenerationStarted, RestorePointFound, SettingIgnored, WorkerLost
from holdfast.layout import Topology
from holdfast.plan.placing.interface import LayoutPlan, NodePlaces, Planner, PresentPlacement
from holdfast.plan.placing.planner import reweight
from holdfast.policy.membership.transitions import CoordinatorState, NodeRecord
from holdfast.policy.recovery.ladder import Recovery
from holdfast.policy.recovery.survivors import HeldState


@dataclass(frozen=True)
class PlannerContext:
    """Context of a generation planner.

    rendezvous_address: the rendezvous address of a generation's workers. on_generation_created:
    receives the number of each generation whose object was made, before any node learns of it.
    newest_durable_step: returns the newest step that has a checkpoint in the run store.
    is_single_node: the run has one node, whose mover knows its peers itself. exclude_slow: leaves a
    node out if the remaining nodes suffice, and returns True if they do. emit_in_generation: emits
    an event of a generation that this agent may have had no part in."""

    config: RunConfig
    planner: Planner
    mover: MoverSupervisor
    rendezvous_address: str
    emit: Callable[[Event], object]
    on_generation_created: Callable[[int], None]
    newest_durable_step: Callable[[], int] = lambda: 0
    is_single_node: bool = False
    exclude_slow: Callable[[str], bool] = lambda name: False
    emit_in_generation: Callable[[int, Event], object] = lambda generation, event: None


class GenerationPlanner:
    """The generation planner of one term. Lives in one event loop."""

    def __init__(self, context: PlannerContext) -> None:
        self._context = context
        self._recovery_planner = RecoveryPlanner(context.config)
        self._previous_topology: Topology | None = None  # of the generation that is over
        self._planned: dict[int, tuple[Topology, RecoveryPlan]] = {}
        self._planner = _PlacedPlanner(context)
        # of the checkpoint that the last generation began from
        self._restored_key: str | None = None
        self._declined_growth: tuple[int, tuple[NodePlaces, ...]] | None = None
        self.bad_steps = BadStepTracker()
        self.cause = ""  # what ended the last generation, for people; "" if nothing was lost
        self.relative_speeds: dict[tuple[str, int], float] = {}
        """Relative speed of each slow process, by node and process; a normal one has 1."""
        self.cores_by_node: dict[str, str] = {}
        """`AgentFacts.cores` of the nodes that are present and have said it."""
        self._reported_losses: set[tuple[int, str]] = set()
        self.is_session_start = True
        """True if a session of the run begins with the generation that was planned last."""
        self.recovery: Recovery | None = None
        """How the newest generation recovers; None: no generation ran before it."""
        self._present_nodes: frozenset[str] = frozenset()  # when it was planned
        self.reached_step = 0
        """The newest step that a generation has begun from."""
        self.rejected_checkpoints: dict[str, str] = {}
        """Keys of checkpoints that proved corrupt, and why."""

    def load_record(self, record: GenerationRecord, is_single_node: bool = False) -> None:
        """Take over the newest generation's record, at the beginning of a term. is_single_node: the
        run has one node, and no process of that generation is left."""
        self.bad_steps.load_record(record)
        if record.topology is not None and not is_single_node:
            if record.previous is not None:  # states may still have the previous layout
                self._recovery_planner.remember_topology(record.previous.topology)
            self._previous_topology = record.topology
            self._recovery_planner.remember_topology(self._previous_topology)

    def select_nodes(self, nodes: Sequence[NodeRecord]) -> tuple[str, ...]:
        """Return the nodes that a generation would use; () if none is possible."""
        if not nodes or sum(node.places for node in nodes) < 1:
            return ()
        present = _present_placement(self._previous_topology, ())
        try:
            plan = self._planner(_node_places(nodes), 1, present)
        except LayoutError:
            return ()
        return tuple(dict.fromkeys(plan.topology.nodes))

    def can_add_workers(self, nodes: Sequence[NodeRecord]) -> bool:
        """Return True if the ready processes of these nodes would give more workers than now."""
        before, ready = self._previous_topology, _ready_places(nodes)
        asked = (0 if before is None else before.generation, tuple(ready))
        if before is None or not ready or asked == self._declined_growth:
            return False
        try:
            present = _present_placement(before, ())
            planned = self._planner(ready, 1, present)
        except LayoutError:
            planned = None
        if planned is None or planned.topology.world_size <= before.world_size:
            self._declined_growth = asked  # remember it: the question comes at every heartbeat
            return False
        return True

    def is_full(self, nodes: Sequence[NodeRecord]) -> bool:
        """Return True if the run would not use more nodes."""
        wanted = self._context.config.layout.workers
        return bool(wanted) and sum(node.places for node in nodes) >= wanted

    def last_outcomes(self, node_reports: Mapping[str, NodeReport]) -> list[NodeOutcome]:
        """Return how the last generation ended, node by node.

        A node that never began that generation still reports the one before; it is left out."""
        last = None if self._previous_topology is None else self._previous_topology.generation
        told = [one.node_outcome for one in node_reports.values() if last in (None, one.generation)]
        return [outcome for outcome in told if outcome is not None]

    def reject_corrupt_checkpoint(self, node_reports: Mapping[str, NodeReport]) -> str | None:
        """Return a sentence if the last generation's checkpoint proved corrupt, None otherwise.

        The run ignores that checkpoint from then on."""
        lost = [outcome.lost for outcome in self.last_outcomes(node_reports)]
        said = next((one.corruption for one in lost if one is not None and one.corruption), None)
        if said is None or self._restored_key is None:
            return None
        self.rejected_checkpoints[self._restored_key] = said
        return f"{self._restored_key} is not whole ({said})"

    # --- one generation -------------------------------------------------------------------------
    async def plan_generation(
        self,
        state: CoordinatorState,
        generation: int,
        node_names: frozenset[str],
        node_reports: Mapping[str, NodeReport],
    ) -> GenerationRecord:
        """Return a generation's record, without a term, a reason and agents. Raises HoldfastError
        if no plan is possible."""
        nodes = [node for name in sorted(node_names) if (node := state.node(name)) is not None]
        self.is_session_start = self._previous_topology is None or not _is_run_continuing(state)
        self._planner.peers = {
            name: peer
            for name, one in node_reports.items()
            if state.node(name) is not None and (peer := one.facts.peer) is not None
        }
        self.cores_by_node = {
            name: one.facts.cores for name, one in node_reports.items() if one.facts.cores
        }
        self._present_nodes = frozenset(node.name for node in state.nodes)
        keys, held = _collect_held_states(node_reports, {node.name for node in state.nodes})
        self.reached_step = max([self.reached_step, *(one.applied for one in held.values())])
        self.bad_steps.observe(self._previous_topology, held, keys)
        held = self._exclude_faulty_workers(held, keys, {node.name for node in nodes})
        where = {key: node for key, (node, _) in keys.items()}
        durable = await asyncio.to_thread(self._context.newest_durable_step)
        topology, after = self._choose_topology(nodes, generation, held, where, durable)
        processes = enumerate(after.rank_assignment.processes)
        seated = {rank: keys[key] for rank, key in processes if key is not None}
        if speeds := {
            rank: self.relative_speeds[who]
            for rank, who in seated.items()
            if who in self.relative_speeds
        }:
            topology = reweight(topology, speeds)
        self._planned = {generation: (topology, after)}
        seats = tuple(
            None if key is None else keys[key][1] for key in after.rank_assignment.processes
        )
        return GenerationRecord(
            topology,
            seats,
            after.came_from,
            after.describe_previous_state(),
            self.bad_steps.skips,
            self.bad_steps.retry(topology, seated),
        )

    def _exclude_faulty_workers(
        self,
        held_states: dict[int, HeldState],
        worker_ids: Mapping[int, tuple[str, int]],
        node_names: set[str],
    ) -> dict[int, HeldState]:
        """Leave out the nodes of workers that compute wrongly again and again.

        If such a node is needed, distrust its workers' state, provided that other workers have it.
        Raises PlanOutdatedError once a node is left out."""
        sick = self.bad_steps.faulty_workers
        if any(node in node_names and self._context.exclude_slow(node) for node, _ in sorted(sick)):
            raise PlanOutdatedError("a node that computes wrongly is left out")
        well = {key: one for key, one in held_states.items() if worker_ids[key] not in sick}
        if len(well) == len(held_states) or not self._recovery_planner.has_complete_state(well):
            return held_states
        # The states, without those of untrusted workers, which keep their processes.
        return {
            key: one if key in well else replace(one, torn=True, state=None)
            for key, one in held_states.items()
        }

    def _choose_topology(
        self,
        nodes: Sequence[NodeRecord],
        generation: int,
        held_states: Mapping[int, HeldState],
        node_by_worker: Mapping[int, str],
        durable_step: int,
    ) -> tuple[Topology, RecoveryPlan]:
        """Choose the topology that lets training continue soonest.

        First choice: the replicas that lost no rank continue alone and at once (rung 0). If all or
        no replicas lost a rank, take all ready processes. If neither works, wait for processes."""
        present = _present_placement(
            self._previous_topology, _lost_ranks(self._previous_topology, held_states)
        )
        config, here = self._context.config, {node.name for node in nodes}
        whole = self._recovery_planner.find_intact_replicas(held_states, node_by_worker)
        some = _ready_places(nodes)
        if whole is not None:
            places = whole.places_by_node if whole.places_by_node.keys() <= here else {}
            some = [NodePlaces(name, places[name]) for name in sorted(places)]
            present = PresentPlacement(whole.topology, whole.lost_ranks)
        if some and len(some) >= min(config.cluster.min_nodes, len(nodes)):
            try:
                planned = self._planner(some, generation, present)
            except LayoutError:
                planned = None
            if planned is not None:
                kept = whole is None or planned.untouched_replicas == len(planned.topology.replicas)
                after = self._recovery_planner.plan_recovery(
                    planned.topology, held_states, node_by_worker, durable_step
                )
                if kept and after.resume_point is not None:
                    return planned.topology, after
        planned = self._planner(_node_places(nodes), generation, present)
        return planned.topology, self._recovery_planner.plan_recovery(
            planned.topology, held_states, node_by_worker, durable_step
        )

    async def make_start_state(self, generation: int, record: GenerationRecord) -> StartState:
        """Return what the generation's nodes begin from."""
        topology, after = self._planned[generation]
        self._context.on_generation_created(generation)
        here = set(topology.nodes)
        machines = [peer for name, peer in self._planner.peers.items() if name in here]
        sources = [peer for name, peer in self._planner.peers.items() if name not in here]
        newest: RestorePoint | None = None
        self._restored_key = None
        if after.resume_point is not None:
            step = after.resume_point.step
        else:
            asked = None if self._context.is_single_node else [*machines, *sources]
            newest = await self._context.mover.choose_restore_point(
                generation, self.rejected_checkpoints, asked
            )
            step, self._restored_key = newest.step, newest.key
            _refuse_empty_branch(newest, self._context.config.branch_of)
        self.recovery = None
        if self._previous_topology is not None:
            self.recovery = self._recovery_planner.recover(
                self._previous_topology,
                topology,
                after,
                self._present_nodes,
                None if newest is None else newest.durable,
            )
        self.reached_step = max(self.reached_step, step)
        self._emit_start_events(topology, record, newest, step)
        self._recovery_planner.remember_topology(topology)
        self._previous_topology = topology
        peers = None if self._context.is_single_node else tuple(machines)
        return StartState(step, newest, peers, tuple(sources), self._context.rendezvous_address)

    def _emit_start_events(
        self,
        topology: Topology,
        record: GenerationRecord,
        restore_point: RestorePoint | None,
        step: int,
    ) -> None:
        if (found := _restore_point_event(restore_point, step)) is not None:
            self._context.emit(found)
        for event in self.bad_steps.take_events():
            self._context.emit(event)
        first = topology.generation == 1 or self._previous_topology is None
        resumes = self.is_session_start and self._previous_topology is not None
        reason = "resume" if resumes else record.reason
        self._context.emit(
            GenerationStarted(
                topology.to_json(),
                reason,
                None if restore_point is None else restore_point.key,
                -1 if first or self.recovery is None else self.recovery.rung,
                None if record.came_from is None else list(record.came_from),
                self.cause,
                step=step,
            )
        )

    def report_lost_ranks(self, state: CoordinatorState) -> None:
        """Emit once which ranks the running generation has lost with their nodes, and why.

        At the beginning of a session no generation runs, so none is reported."""
        before = self._previous_topology
        if before is None or before.generation != state.generation or not _is_run_continuing(state):
            return
        for name, cause in state.lost_members:
            if (before.generation, name) in self._reported_losses:
                continue
            self._reported_losses.add((before.generation, name))
            for rank in (rank for rank, node in enumerate(before.nodes) if node == name):
                lost = WorkerLost(rank, 0, cause, "heartbeat", name, step=self.reached_step)
                self._context.emit_in_generation(before.generation, lost)


@dataclass
class _PlacedPlanner:
    """The run's planner, told the place of each node that its mover has named. peers: the movers of
    the nodes that are present, by node. reported: why the simple planner took the search's place,
    which is said once."""

    context: PlannerContext
    peers: Mapping[str, Peer] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def __call__(
        self, nodes: Sequence[NodePlaces], generation: int, present: PresentPlacement | None
    ) -> LayoutPlan:
        """Raises LayoutError."""
        placed = [
            replace(node, machine=self.peers[node.name].machine)
            if node.name in self.peers
            else node
            for node in nodes
        ]
        plan = self.context.planner(self.context.config, placed, generation, present)
        if (why := plan.simple_because) and why not in self.reported:
            self.reported.add(why)
            self.context.emit(SettingIgnored("layout.mode", f"the simple planner is used: {why}"))
        return plan


def _node_places(nodes: Sequence[NodeRecord]) -> list[NodePlaces]:
    return [NodePlaces(node.name, node.places) for node in nodes]


def _present_placement(
    previous: Topology | None, lost_ranks: Sequence[int]
) -> PresentPlacement | None:
    return None if previous is None else PresentPlacement(previous, frozenset(lost_ranks))


def _lost_ranks(previous: Topology | None, held_states: Mapping[int, HeldState]) -> list[int]:
    """Return the ranks of the generation before whose state is lost."""
    if previous is None:
        return []
    there = {
        one.state[1]
        for one in held_states.values()
        if one.state is not None and one.state[0] == previous.generation
    }
    return [rank for rank in range(previous.world_size) if rank not in there]


def _restore_point_event(restore_point: RestorePoint | None, step: int) -> RestorePointFound | None:
    """Return the event of a restore point that has a key."""
    if restore_point is None or restore_point.key is None:
        return None
    return RestorePointFound(
        restore_point.key, restore_point.durable, restore_point.seconds, step=step
    )


def _is_run_continuing(state: CoordinatorState) -> bool:
    """Return True if any node here took part in the run before. Otherwise a session begins."""
    return any(node.generation for node in state.nodes)


def _ready_places(nodes: Sequence[NodeRecord]) -> list[NodePlaces]:
    """Return the places that have a process; all places of a node that does not report them."""
    found = [
        (n.name, n.places if n.ready_workers is None else min(n.places, n.ready_workers))
        for n in nodes
    ]
    return [NodePlaces(name, places) for name, places in found if places]


def _collect_held_states(
    node_reports: Mapping[str, NodeReport], node_names: set[str]
) -> tuple[dict[int, tuple[str, int]], dict[int, HeldState]]:
    """Give each process a unique key, since pids of different nodes may be equal.

    Return (node, process) by key, and the state that the process holds by key."""
    keys: dict[int, tuple[str, int]] = {}
    held: dict[int, HeldState] = {}
    for name in sorted(node_names & node_reports.keys()):
        outcome = node_reports[name].node_outcome or NodeOutcome()
        for pid, one in sorted(outcome.processes.items(), key=lambda item: str(item[0])):
            key = len(keys) + 1
            keys[key] = (name, pid)
            held[key] = one
    return keys, held


def _refuse_empty_branch(newest: RestorePoint, parent: str) -> None:
    """Raise CheckpointError for a branch without a checkpoint: it has no weights to begin from."""
    if parent and newest.key is None:
        raise CheckpointError(
            f"this run continues {parent}, and no checkpoint is left",
            remedy="make another branch: holdfast branch RUN --at STEP --to NEW",
        )
