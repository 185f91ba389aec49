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
from dataclasses import dataclass, replace

from holdfast.checkpoint.mover.client import Newest
from holdfast.checkpoint.peers.config import Peer
from holdfast.config.run import RunConfig
from holdfast.elastic.coordinator.bad_steps import Doubting
from holdfast.elastic.coordinator.coordinator import ChangedError
from holdfast.elastic.coordinator.survivors import Aftermath, Survivors
from holdfast.elastic.node.mover_supervisor import MoverLink
from holdfast.elastic.protocol.coordinator_messages import Known
from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.start_state import StartState
from holdfast.errors import LayoutError
from holdfast.events import Event, GenerationStarted, RestorePointFound, WorkerLost
from holdfast.layout import Topology
from holdfast.plan.interface import NodePlaces, Planner, Present
from holdfast.plan.planner import weighted
from holdfast.policy.membership.transitions import Node, Reign
from holdfast.policy.recovery.survivors import Held


@dataclass(frozen=True)
class Leading:
    """Context of a generation planner.

    meet: the rendezvous address of a generation's workers. opened: receives the number of each
    generation whose object was made, before any node learns of it. durable: returns the newest step
    that has a checkpoint in the run store. alone: the run has one node, whose mover knows its peers
    itself. rest: leaves a node out if the remaining nodes suffice, and returns True if they do.
    late: emits an event of a generation that this agent may have had no part in."""

    config: RunConfig
    planner: Planner
    mover: MoverLink
    meet: str
    emit: Callable[[Event], object]
    opened: Callable[[int], None]
    durable: Callable[[], int] = lambda: 0
    alone: bool = False
    rest: Callable[[str], bool] = lambda name: False
    late: Callable[[int, Event], object] = lambda generation, event: None


class Lead:
    """The generation planner of one term. Lives in one event loop."""

    def __init__(self, leading: Leading) -> None:
        self._it = leading
        self._survivors = Survivors(leading.config)
        self._before: Topology | None = None  # of the generation that is over
        self._plans: dict[int, tuple[Topology, Aftermath]] = {}
        self._peers: dict[str, Peer] = {}
        self._key: str | None = None  # of the checkpoint that the last generation began from
        self._declined: tuple[int, tuple[NodePlaces, ...]] | None = None
        self.doubting = Doubting()
        self.speeds: dict[tuple[str, int], float] = {}
        """Relative speed of each slow process, by node and process; a normal one has 1."""
        self._told_lost: set[tuple[int, str]] = set()
        self.begins = True
        """True if a session of the run begins with the generation that was planned last."""
        self.reached = 0
        """The newest step that a generation has begun from."""
        self.tried: dict[str, str] = {}
        """Keys of checkpoints that proved corrupt, and why."""

    def found(self, record: GenerationRecord, alone: bool = False) -> None:
        """Take over the newest generation's record, at the beginning of a term. alone: the run has
        one node, and no process of that generation is left."""
        self.doubting.found(record)
        if record.topology is not None and not alone:
            if record.previous is not None:  # states may still have the previous layout
                self._survivors.opened(record.previous.topology)
            self._before = record.topology
            self._survivors.opened(self._before)

    def fits(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """Return the nodes that a generation would use; () if none is possible."""
        if not nodes or sum(node.places for node in nodes) < 1:
            return ()
        try:
            plan = self._it.planner(self._it.config, self._places(nodes), 1, self._present(()))
        except LayoutError:
            return ()
        return tuple(dict.fromkeys(plan.topology.nodes))

    def more(self, nodes: Sequence[Node]) -> bool:
        """Return True if the ready processes of these nodes would give more workers than now."""
        before, ready = self._before, _ready(nodes)
        asked = (0 if before is None else before.generation, tuple(ready))
        if before is None or not ready or asked == self._declined:
            return False
        try:
            planned = self._it.planner(self._it.config, ready, 1, self._present(()))
        except LayoutError:
            planned = None
        if planned is None or planned.topology.world_size <= before.world_size:
            self._declined = asked  # remember it: the question comes at every heartbeat
            return False
        return True

    def full(self, nodes: Sequence[Node]) -> bool:
        """Return True if the run would not use more nodes."""
        wanted = self._it.config.layout.workers
        return bool(wanted) and sum(node.places for node in nodes) >= wanted

    def outcomes(self, known: Mapping[str, Known]) -> list[NodeOutcome]:
        """Return how the last generation ended, node by node.

        A node that never began that generation still reports the one before; it is left out."""
        last = None if self._before is None else self._before.generation
        told = [one.held for one in known.values() if last in (None, one.at)]
        return [outcome for outcome in told if outcome is not None]

    def rotten(self, known: Mapping[str, Known]) -> str | None:
        """Return a sentence if the last generation's checkpoint proved corrupt, None otherwise.

        The run ignores that checkpoint from then on."""
        lost = [outcome.lost for outcome in self.outcomes(known)]
        said = next((one.rotten for one in lost if one is not None and one.rotten), None)
        if said is None or self._key is None:
            return None
        self.tried[self._key] = said
        return f"{self._key} is not whole ({said})"

    # --- one generation -------------------------------------------------------------------------
    async def plan(
        self, reign: Reign, generation: int, names: frozenset[str], known: Mapping[str, Known]
    ) -> GenerationRecord:
        """Return a generation's record, without a term, a reason and agents. Raises HoldfastError
        if no plan is possible."""
        nodes = [node for name in sorted(names) if (node := reign.node(name)) is not None]
        self.begins = self._before is None or not _goes_on(reign)
        self._peers = {
            name: Peer.from_json(row)
            for name, one in known.items()
            if reign.node(name) is not None and (row := one.told.get("peer"))
        }
        keys, held = _holdings(known, {node.name for node in reign.nodes})
        self.reached = max([self.reached, *(one.applied for one in held.values())])
        self.doubting.hear(self._before, held, keys)
        held = self._without_sick(held, keys, {node.name for node in nodes})
        where = {key: node for key, (node, _) in keys.items()}
        durable = await asyncio.to_thread(self._it.durable)
        topology, after = self._chosen(nodes, generation, held, where, durable)
        if speeds := self._speeds_of(after, keys):
            topology = weighted(topology, speeds)
        self._plans = {generation: (topology, after)}
        seats = tuple(None if key is None else keys[key][1] for key in after.seats.processes)
        processes = enumerate(after.seats.processes)
        seated = {rank: keys[key] for rank, key in processes if key is not None}
        return GenerationRecord(
            topology, seats, after.came_from, after.told_before(),
            self.doubting.skips, self.doubting.retry(topology, seated),
        )  # fmt: skip

    def _without_sick(
        self, held: dict[int, Held], keys: Mapping[int, tuple[str, int]], names: set[str]
    ) -> dict[int, Held]:
        """Leave out the nodes of workers that compute wrongly again and again.

        If such a node is needed, distrust its workers' state, provided that other workers have it.
        Raises ChangedError once a node is left out."""
        sick = self.doubting.sick
        if any(node in names and self._it.rest(node) for node, _ in sorted(sick)):
            raise ChangedError("a node that computes wrongly is left out")
        well = {key: one for key, one in held.items() if keys[key] not in sick}
        if len(well) == len(held) or not self._survivors.live(well):
            return held
        return {
            key: one if key in well else replace(one, torn=True, state=None)
            for key, one in held.items()
        }

    def _chosen(
        self, nodes: Sequence[Node], generation: int, held: Mapping[int, Held],
        where: Mapping[int, str], durable: int,
    ) -> tuple[Topology, Aftermath]:  # fmt: skip
        """Choose the topology that lets training continue soonest.

        First choice: the replicas that lost no rank continue alone and at once (rung 0). If all or
        no replicas lost a rank, take all ready processes. If neither works, wait for processes."""
        present = self._present(self._lost(held))
        config, here = self._it.config, {node.name for node in nodes}
        whole = self._survivors.whole(held, where)
        some = _ready(nodes)
        if whole is not None:
            places = whole.places if whole.places.keys() <= here else {}
            some = [NodePlaces(name, places[name]) for name in sorted(places)]
            present = Present(whole.before, whole.lost)
        if some and len(some) >= min(config.cluster.min_nodes, len(nodes)):
            try:
                planned = self._it.planner(config, some, generation, present)
            except LayoutError:
                planned = None
            if planned is not None:
                kept = whole is None or planned.untouched == len(planned.topology.replicas)
                after = self._survivors.plan(planned.topology, held, where, durable)
                if kept and after.live is not None:
                    return planned.topology, after
        planned = self._it.planner(config, self._places(nodes), generation, present)
        return planned.topology, self._survivors.plan(planned.topology, held, where, durable)

    async def begin(self, generation: int, record: GenerationRecord) -> StartState:
        """Return what the generation's nodes begin from."""
        topology, after = self._plans[generation]
        self._it.opened(generation)
        here = set(topology.nodes)
        machines = [peer for name, peer in self._peers.items() if name in here]
        sources = [peer for name, peer in self._peers.items() if name not in here]
        newest: Newest | None = None
        self._key = None
        if after.live is not None:
            step = after.live.step
        else:
            asked = None if self._it.alone else [*machines, *sources]
            newest = await self._it.mover.choose(generation, self.tried, asked)
            step, self._key = newest.step, newest.key
        rung = _rung(self._before, topology, after, newest)
        self.reached = max(self.reached, step)
        self._tell(topology, record, newest, step, rung)
        self._survivors.opened(topology)
        self._before = topology
        peers = None if self._it.alone else tuple(machines)
        return StartState(step, newest, peers, tuple(sources), self._it.meet)

    def _tell(
        self, topology: Topology, record: GenerationRecord, newest: Newest | None, step: int,
        rung: int,
    ) -> None:  # fmt: skip
        if newest is not None and newest.key is not None:
            self._it.emit(RestorePointFound(
                newest.key, newest.durable, newest.seconds, step=step))  # fmt: skip
        for event in self.doubting.news():
            self._it.emit(event)
        first = topology.generation == 1 or self._before is None
        resumes = self.begins and self._before is not None
        reason = "resume" if resumes else record.reason
        self._it.emit(GenerationStarted(
            topology.to_json(), reason, None if newest is None else newest.key,
            -1 if first else rung,
            None if record.came_from is None else list(record.came_from), step=step,
        ))  # fmt: skip

    def _speeds_of(
        self, after: Aftermath, keys: Mapping[int, tuple[str, int]]
    ) -> dict[int, float]:  # fmt: skip
        """Return the speeds of the ranks whose processes are slow."""
        processes = enumerate(after.seats.processes)
        seated = {rank: keys[key] for rank, key in processes if key is not None}
        return {rank: self.speeds[who] for rank, who in seated.items() if who in self.speeds}

    def tell_lost(self, reign: Reign) -> None:
        """Emit once which ranks the running generation has lost with their nodes, and why.

        At the beginning of a session no generation runs, so none is reported."""
        before = self._before
        if before is None or before.generation != reign.generation or not _goes_on(reign):
            return
        for name, cause in reign.lost:
            if (before.generation, name) in self._told_lost:
                continue
            self._told_lost.add((before.generation, name))
            for rank in (rank for rank, node in enumerate(before.nodes) if node == name):
                lost = WorkerLost(rank, 0, cause, "heartbeat", name, step=self.reached)
                self._it.late(before.generation, lost)

    # --- input of the planner -------------------------------------------------------------------
    def _places(self, nodes: Sequence[Node]) -> list[NodePlaces]:
        return [NodePlaces(node.name, node.places) for node in nodes]

    def _present(self, lost: Sequence[int]) -> Present | None:
        return None if self._before is None else Present(self._before, frozenset(lost))

    def _lost(self, held: Mapping[int, Held]) -> list[int]:
        """Return the ranks of the generation before whose state is lost."""
        before = self._before
        if before is None:
            return []
        there = {
            one.state[1] for one in held.values()
            if one.state is not None and one.state[0] == before.generation
        }  # fmt: skip
        return [rank for rank in range(before.world_size) if rank not in there]


def _goes_on(reign: Reign) -> bool:
    """Return True if any node here took part in the run before. Otherwise a session begins."""
    return any(node.at for node in reign.nodes)


def _ready(nodes: Sequence[Node]) -> list[NodePlaces]:
    """Return the places that have a process; all places of a node that does not report them."""
    found = [(n.name, n.places if n.ready is None else min(n.places, n.ready)) for n in nodes]
    return [NodePlaces(name, places) for name, places in found if places]


def _rung(
    before: Topology | None, now: Topology, after: Aftermath, newest: Newest | None
) -> int:  # fmt: skip
    """Return the rung of the recovery ladder; -1 if no generation ran before."""
    if before is None:
        return -1
    if newest is not None and newest.durable:
        return 6  # neither a process nor memory held the newest state
    if now.world_size > before.world_size:
        return 5
    if now.world_size == before.world_size:
        if after.stay == now.world_size:
            return 1
        return 2 if set(now.nodes) <= set(before.nodes) else 3
    if after.before is None or after.came_from is None:
        return 4
    return 0 if _whole(after.before, now, after.came_from) else 4


def _whole(before: Topology, now: Topology, came_from: Sequence[int | None]) -> bool:
    """Return True if each replica existed before, with all its ranks in their places."""
    old = {(each.kind, tuple(each.ranks)) for each in before.replicas}
    new = ((r.kind, tuple(came_from[rank] for rank in r.ranks)) for r in now.replicas)
    return all(replica in old for replica in new)


def _holdings(
    known: Mapping[str, Known], alive: set[str]
) -> tuple[dict[int, tuple[str, int]], dict[int, Held]]:
    """Give each process a unique key, since pids of different nodes may be equal.

    Return (node, process) by key, and the state that the process holds by key."""
    keys: dict[int, tuple[str, int]] = {}
    held: dict[int, Held] = {}
    for name in sorted(alive & known.keys()):
        outcome = known[name].held or NodeOutcome()
        for pid, one in sorted(outcome.processes.items(), key=lambda item: str(item[0])):
            key = len(keys) + 1
            keys[key] = (name, pid)
            held[key] = one
    return keys, held
