"""A term's coordinator over a run store: what it finds there at its beginning, and how it makes the
object of a generation, whose number nobody else can have then.

The object says who takes part: for every node its agent's address and mark, so that whoever comes
to be coordinator next knows whom to expect, and the agents whom to ask for one.
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
"""The record of a generation, without a term and agents. What it raises is tried again."""
Begin = Callable[[int, GenerationRecord], Awaitable[StartState]]
"""Once the object is made, which fences all older ones: what the nodes begin from."""


COLLECTS = (20_000, 20, 100)
"""Objects made until the collector looks: the questions of 4,096 agents that are open at a time are
no garbage, and to look through them again and again took a third of the time of a decision."""


async def nothing(generation: int, record: GenerationRecord) -> StartState:
    return StartState()


async def reign_over(
    term: Term, store: RunStore, rules: Rules, plan: Plan, begin: Begin = nothing, *,
    changed: Callable[[Reign, Reign], None] = lambda old, new: None,
    complain: Callable[[str], None] = lambda sentence: None,
    above: int = 0, expects: bool = True,
    refused: Callable[[UserError], None] = lambda error: None,
) -> Coordinator:  # fmt: skip
    """The coordinator of a term that was just opened. above: the next generation is newer than
    that, too. expects: the nodes of the newest generation are waited for, until they are heard or
    lost. refused: told what the run store says where the object could not be made; what it raises
    counts instead. Raises what the run store raises."""
    generation = await asyncio.to_thread(newest_generation, store)
    reason = "resume" if generation else "start"
    record = GenerationRecord()
    if generation and expects:
        with suppress(CorruptError, MissingKeyError):  # then nobody is expected
            record = await read_record(store, generation)
    now = asyncio.get_running_loop().time()
    nodes = [
        Node(name, agent.mark, agent.places, now, now) for name, agent in record.agents.items()
    ]
    make = Maker(term, store, plan, begin, refused)
    gc.set_threshold(*COLLECTS)
    reign = transitions.begin(term.number, now, max(generation, above), nodes, reason)
    coordinator = Coordinator(reign, rules, make, changed, complain)
    for name, agent in record.agents.items():  # where they were to be found
        coordinator.known[name] = Known({"address": agent.address})
    return coordinator


class Maker:
    """Makes generations' objects under one term; see `coordinator.Make`."""

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
        """In this order: whoever opens a newer term in between opens this number, too, and one of
        the two comes too late."""
        self._term.check()
        try:
            open_generation(self._store, generation, record.to_json())
        except FencedError:
            raise TakenError(newest_term(self._store)[0], newest_generation(self._store)) from None
