"""The start of a term from the run store, and the creation of a generation's object.

Only one agent can create the object of a given number. The object names the members: for every
node, its agent's address and mark. From it, the next coordinator knows which nodes to expect, and
each agent knows which agents to ask for a coordinator.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from holdfast.elastic.coordinator.coordinator import Coordinator, CreationRejectedError, Made
from holdfast.elastic.protocol.coordinator_messages import AgentFacts, NodeReport, StartState
from holdfast.elastic.protocol.generation_record import AgentEntry, GenerationRecord, read_record
from holdfast.errors import CorruptError, FencedError, UserError
from holdfast.policy.membership import transitions
from holdfast.policy.membership.transitions import CoordinatorState, MembershipRules, NodeRecord
from holdfast.wire.store.run_store import MissingKeyError, RunStore
from holdfast.wire.term import Term, create_generation, newest_generation, newest_term

PlanGeneration = Callable[
    [CoordinatorState, int, frozenset[str], Mapping[str, NodeReport]], Awaitable[GenerationRecord]
]
"""Returns the record of a generation, without a term and agents. It is retried after an error."""
MakeStartState = Callable[[int, GenerationRecord], Awaitable[StartState]]
"""Returns what the nodes begin from, after the object is made and fences all older ones."""

GC_THRESHOLDS = (20_000, 20, 100)
"""Thresholds of Python's garbage collector. The open requests of 4,096 agents are no garbage. To
scan them repeatedly took a third of the time of a decision."""


async def make_empty_start_state(generation: int, record: GenerationRecord) -> StartState:
    return StartState()


async def start_term(
    term: Term,
    store: RunStore,
    rules: MembershipRules,
    plan_generation: PlanGeneration,
    make_start_state: MakeStartState = make_empty_start_state,
    *,
    on_state_change: Callable[[CoordinatorState, CoordinatorState], None] = lambda old, new: None,
    complain: Callable[[str], None] = lambda sentence: None,
    generation_floor: int = 0,
    wait_for_members: bool = True,
    on_creation_refused: Callable[[UserError], None] = lambda error: None,
) -> Coordinator:
    """Return the coordinator of a term that was just opened. Raises what the run store raises.

    generation_floor: the next generation must also exceed this number. wait_for_members: wait for
    the nodes of the newest generation until each reports or is lost. on_creation_refused: receives
    the run store's error if the object cannot be made; an error that it raises replaces that
    one."""
    generation = await asyncio.to_thread(newest_generation, store)
    reason = "resume" if generation else "start"
    record = GenerationRecord()
    if generation and wait_for_members:
        with suppress(CorruptError, MissingKeyError):  # then no node is expected
            record = await read_record(store, generation)
    now = asyncio.get_running_loop().time()
    nodes = [
        NodeRecord(name, agent.mark, agent.places, now, now)
        for name, agent in record.agents.items()
    ]
    make = GenerationCreator(term, store, plan_generation, make_start_state, on_creation_refused)
    gc.set_threshold(*GC_THRESHOLDS)
    reign = transitions.begin_term(
        term.number, now, max(generation, generation_floor), nodes, reason
    )
    coordinator = Coordinator(reign, rules, make, on_state_change, complain)
    for name, agent in record.agents.items():  # their last known addresses
        coordinator.node_reports[name] = NodeReport(AgentFacts(agent.address))
    return coordinator


@dataclass(eq=False)
class GenerationCreator:
    """Creates generations' objects under one term; see `coordinator.CreateGeneration`."""

    term: Term
    store: RunStore
    plan_generation: PlanGeneration
    make_start_state: MakeStartState
    on_creation_refused: Callable[[UserError], None] = lambda error: None

    async def __call__(
        self,
        state: CoordinatorState,
        generation: int,
        node_names: frozenset[str],
        node_reports: Mapping[str, NodeReport],
    ) -> Made:
        record = await self.plan_generation(state, generation, node_names, node_reports)
        used = node_names if record.topology is None else node_names & set(record.topology.nodes)
        nodes = [node for name in sorted(used) if (node := state.node(name)) is not None]
        agents = {
            node.name: AgentEntry(
                node_reports[node.name].facts.address, node.incarnation, node.places
            )
            for node in nodes
        }
        record = replace(
            record, term=self.term.number, reason=record.reason or state.reason, agents=agents
        )
        try:
            await asyncio.to_thread(self._create_record, generation, record)
        except UserError as error:
            self.on_creation_refused(error)
            raise
        taken = None if record.topology is None else Counter(record.topology.nodes)
        return Made(await self.make_start_state(generation, record), taken)

    def _create_record(self, generation: int, record: GenerationRecord) -> None:
        """Check the term, then create the object.

        The order matters. If another agent opens a newer term in between, it creates this number
        too, and one of the two agents comes too late."""
        self.term.check()
        try:
            create_generation(self.store, generation, record.to_json())
        except FencedError:
            raise CreationRejectedError(
                newest_term(self.store)[0], newest_generation(self.store)
            ) from None
