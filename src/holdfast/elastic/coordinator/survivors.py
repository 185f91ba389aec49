"""The recovery plan between two generations: reuse the state that survivors of the last one hold.

The processes report what they hold (`policy.recovery.survivors`). The topology of some generation
lays out each state, usually that of the generation that just ended. If a recovery failed before any
state moved, it is an older topology, for some processes or for all. Processes continue live if
their states are of one generation: the newest one whose state is complete. The remaining processes
join as newcomers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.config.run import RunConfig
from holdfast.core.sharding.run_table import count_blocks, run_state_table
from holdfast.elastic.protocol.generation_record import PreviousState
from holdfast.layout import Topology
from holdfast.policy.recovery.ladder import (
    Holders,
    Loss,
    Recovery,
    Successor,
    intact_replicas,
    recover,
)
from holdfast.policy.recovery.rank_assignment import RankAssignment, assign_ranks
from holdfast.policy.recovery.state_parts import StateSizes
from holdfast.policy.recovery.survivors import (
    HeldState,
    ResumePoint,
    first_missing_tensor,
    resume_point,
)
from holdfast.policy.saving.tiers import DISK, MEMORY, PEERS

_MAX_TOPOLOGIES = 16  # of older generations in whose layout no process holds a state


@dataclass(frozen=True)
class RecoveryPlan:
    """How the next generation begins. resume_point: the resume point of its processes' own state,
    None if they cannot resume. restore_reason: the reason then. previous_topology: the topology
    that lays out this state."""

    rank_assignment: RankAssignment
    resume_point: ResumePoint | None
    restore_reason: str
    previous_topology: Topology | None

    @property
    def staying_workers(self) -> int:
        return sum(pid is not None for pid in self.rank_assignment.processes)

    @property
    def came_from(self) -> tuple[int | None, ...] | None:
        return self.rank_assignment.came_from if self.resume_point is not None else None

    def describe_previous_state(self) -> PreviousState | None:
        """Return the previous state for the commands to newcomers; None without live state."""
        if self.resume_point is None or self.previous_topology is None:
            return None
        return PreviousState(self.previous_topology, self.resume_point.step)


class RecoveryPlanner:
    """Memory of the topologies that lay out the processes' states."""

    def __init__(self, config: RunConfig) -> None:
        self._table = run_state_table(config)
        self._sizes = StateSizes.of_table(self._table, count_blocks(config))
        self._topologies: dict[int, Topology] = {}
        self._held_generations: set[int] = set()  # that lay out the states of the newest plan

    def remember_topology(self, topology: Topology) -> None:
        self._topologies[topology.generation] = topology
        for old in sorted(self._topologies.keys() - self._held_generations)[:-_MAX_TOPOLOGIES]:
            del self._topologies[old]

    def plan_recovery(
        self,
        new: Topology,
        held_states: Mapping[int, HeldState],
        node_by_process: Mapping[int, str] | None = None,
        durable_step: int = 0,
    ) -> RecoveryPlan:
        """Return how the next generation begins.

        `held_states`: the state of each surviving process. node_by_process: the node of each, if
        there are several. durable_step: the newest step that has a checkpoint. Processes with an
        older state were cut off while the run continued elsewhere, so their state does not
        count."""
        stood = self._find_complete_state(held_states)
        if isinstance(stood, str):
            why = stood
        elif stood.resume_point.step < durable_step:
            why = (
                f"there is a checkpoint of step {durable_step}, and they hold step "
                f"{stood.resume_point.step}"
            )
        else:
            before, point = stood.topology, stood.resume_point
            living = _place_processes(before, stood.processes, held_states, node_by_process)
            seated = assign_ranks(before, new, living, point.ranks)
            stay = {was for was in seated.came_from if was is not None}
            missing = first_missing_tensor(before, self._table, stay & point.ranks)
            if missing is None:
                return RecoveryPlan(seated, point, "", before)
            why = f"of the processes that hold parts of {missing}, not all have a place"
        return RecoveryPlan(
            assign_ranks(new, new, _place_processes(new, {}, held_states, node_by_process), ()),
            None,
            why,
            None,
        )

    def find_intact_replicas(
        self, held_states: Mapping[int, HeldState], node_by_process: Mapping[int, str]
    ) -> IntactReplicas | None:
        """Return the intact replicas, which can continue by themselves, or None.

        The result is None unless some replicas have lost a rank and some have not. Arguments as in
        `plan_recovery`."""
        stood = self._find_complete_state(held_states)
        if isinstance(stood, str):
            return None
        before = stood.topology
        lost = frozenset(range(before.world_size)) - stood.resume_point.ranks
        replicas = intact_replicas(before, lost)
        if not replicas:
            return None
        places = Counter(
            node_by_process[stood.processes[rank]] for r in replicas for rank in r.ranks
        )
        return IntactReplicas(before, lost, places)

    def recover(
        self,
        previous: Topology,
        new: Topology,
        plan: RecoveryPlan,
        present_nodes: Collection[str],
        restores_durable: bool | None,
    ) -> Recovery:
        """Return the rung of the recovery ladder, the source of the state and the bytes to move.

        Args:
            previous: the topology of the generation that is over.
            new: the topology that follows.
            plan: how the processes are placed in it.
            present_nodes: nodes whose memory is there.
            restores_durable: the state that was chosen to restore lies in the run store, or in the
                memory of nodes; None: nothing is restored.
        """
        before = plan.previous_topology or previous
        kept = frozenset(rank for rank in plan.came_from or () if rank is not None)
        nodes = set(before.nodes)
        tiers: dict[int, Holders | None] = {DISK: None}
        if not restores_durable:  # the movers have found it complete
            here = tuple(present_nodes)
            tiers = {MEMORY: {node: (node,) for node in nodes}, PEERS: dict.fromkeys(nodes, here)}
        ranks = frozenset(range(before.world_size))
        loss = Loss(before, ranks - kept, frozenset(nodes - set(present_nodes)), tiers, self._table)
        newcomers = new.world_size - plan.staying_workers
        came_from = plan.came_from or (None,) * new.world_size
        after = Successor(new, came_from, newcomers, previous.world_size)
        return recover(loss, after, self._sizes)

    def has_complete_state(self, held_states: Mapping[int, HeldState]) -> bool:
        """Return True if these processes hold the complete state of some generation."""
        return not isinstance(self._find_complete_state(held_states), str)

    def _find_complete_state(self, held_states: Mapping[int, HeldState]) -> _CompleteState | str:
        """Return the newest generation whose state is complete, or why there is none."""
        why = "nobody is left who holds a state"
        stood = {one.state[0] for one in held_states.values() if one.state is not None}
        self._held_generations = stood
        for generation in sorted(stood & self._topologies.keys(), reverse=True):
            before = self._topologies[generation]
            processes = {
                h.state[1]: pid
                for pid, h in held_states.items()
                if h.state is not None and h.state[0] == generation
            }
            holding = {rank: held_states[pid] for rank, pid in processes.items()}
            found = resume_point(before, self._table, holding)
            if isinstance(found, ResumePoint):
                return _CompleteState(before, processes, found)
            why = found
        return why


@dataclass(frozen=True)
class IntactReplicas:
    """The replicas of `topology` that lost no rank. lost_ranks: the lost ranks. places_by_node: the
    number of these replicas' processes by node."""

    topology: Topology
    lost_ranks: frozenset[int]
    places_by_node: Counter[str]


@dataclass(frozen=True)
class _CompleteState:
    """The holders of a generation's state. processes: the process of each rank."""

    topology: Topology
    processes: Mapping[int, int]
    resume_point: ResumePoint


def _place_processes(
    topology: Topology,
    processes: Mapping[int, int],
    held_states: Mapping[int, HeldState],
    node_by_process: Mapping[int, str] | None,
) -> dict[int, int]:
    """Return `processes` by rank, with the remaining processes at free ranks of their node.

    A remaining process keeps its old rank if that is free."""
    out = dict(processes)
    for pid, one in held_states.items():
        free = [
            rank
            for rank in range(topology.world_size)
            if rank not in out
            and (node_by_process is None or topology.nodes[rank] == node_by_process[pid])
        ]
        if pid not in processes.values() and free:
            out[one.rank if one.rank in free else free[0]] = pid
    return out
