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
from dataclasses import replace

from holdfast.elastic.coordinator.coordinator import Coordinator, Made, TakenError
from holdfast.elastic.protocol.coordinator_messages import Known
from holdfast.elastic.protocol.generation_record import (
    AgentEntry,
    GenerationRecord,
    read_record,
)
from holdfast.elastic.protocol.start_state import StartState
from holdfast.errors import CorruptError, FencedError, UserError
from holdfast.policy.membership import transitions
from holdfast.policy.membership.transitions import Node, Reign, Rules
from holdfast.wire.store.run_store import MissingKeyError, RunStore
from holdfast.wire.term import (
    Term,
    newest_generation,
    newest_term,
    open_generation,
)

Plan = Callable[[Reign, int, frozenset[str], Mapping[str, Known]], Awaitable[GenerationRecord]]
"""Returns the record of a generation, without a term and agents. It is retried after an error."""
Begin = Callable[[int, GenerationRecord], Awaitable[StartState]]
"""Returns what the nodes begin from, after the object is made and fences all older ones."""


COLLECTS = (20_000, 20, 100)
"""Thresholds of Python's garbage collector. The open requests of 4,096 agents are no garbage. To
scan them repeatedly took a third of the time of a decision."""


async def nothing(generation: int, record: GenerationRecord) -> StartState:
    return StartState()


async def reign_over(
    term: Term, store: RunStore, rules: Rules, plan: Plan, begin: Begin = nothing, *,
    changed: Callable[[Reign, Reign], None] = lambda old, new: None,
    complain: Callable[[str], None] = lambda sentence: None,
    above: int = 0, expects: bool = True,
    refused: Callable[[UserError], None] = lambda error: None,
) -> Coordinator:  # fmt: skip
    """Return the coordinator of a term that was just opened. Raises what the run store raises.

    above: the next generation must also exceed this number. expects: wait for the nodes of the
    newest generation until each reports or is lost. refused: receives the run store's error if the
    object cannot be made; an error that it raises replaces that one."""
    generation = await asyncio.to_thread(newest_generation, store)
    reason = "resume" if generation else "start"
    record = GenerationRecord()
    if generation and expects:
        with suppress(CorruptError, MissingKeyError):  # then no node is expected
            record = await read_record(store, generation)
    now = asyncio.get_running_loop().time()
    nodes = [
        Node(name, agent.mark, agent.places, now, now) for name, agent in record.agents.items()
    ]
    make = Maker(term, store, plan, begin, refused)
    gc.set_threshold(*COLLECTS)
    reign = transitions.begin(term.number, now, max(generation, above), nodes, reason)
    coordinator = Coordinator(reign, rules, make, changed, complain)
    for name, agent in record.agents.items():  # their last known addresses
        coordinator.known[name] = Known({"address": agent.address})
    return coordinator


class Maker:
    """Creates generations' objects under one term; see `coordinator.Make`."""

    def __init__(
        self, term: Term, store: RunStore, plan: Plan, begin: Begin,
        refused: Callable[[UserError], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self._term, self._store, self._plan, self._begin = term, store, plan, begin
        self._refused = refused

    async def __call__(
        self, reign: Reign, generation: int, names: frozenset[str], known: Mapping[str, Known]
    ) -> Made:
        record = await self._plan(reign, generation, names, known)
        used = names if record.topology is None else names & set(record.topology.nodes)
        nodes = [node for name in sorted(used) if (node := reign.node(name)) is not None]
        agents = {
            node.name: AgentEntry(
                str(known[node.name].told.get("address", "")), node.mark, node.places
            )
            for node in nodes
        }
        record = replace(
            record, term=self._term.number, reason=record.reason or reign.reason, agents=agents
        )
        try:
            await asyncio.to_thread(self._create, generation, record)
        except UserError as error:
            self._refused(error)
            raise
        taken = None if record.topology is None else Counter(record.topology.nodes)
        return Made(await self._begin(generation, record), taken)

    def _create(self, generation: int, record: GenerationRecord) -> None:
        """Check the term, then create the object.

        The order matters. If another agent opens a newer term in between, it creates this number
        too, and one of the two agents comes too late."""
        self._term.check()
        try:
            open_generation(self._store, generation, record.to_json())
        except FencedError:
            raise TakenError(newest_term(self._store)[0], newest_generation(self._store)) from None
