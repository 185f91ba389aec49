"""The object in the run store that opens a generation: `generations/<ten digits>.json`.

It is made once, by the coordinator, and never changed. Agents read their part in it. The next
coordinator reads which agents to expect, and `train` which to ask whether the run is at work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from holdfast.core.data.skips import Skips
from holdfast.core.json_parsing import JsonMessage, Key
from holdfast.errors import CorruptError
from holdfast.layout import Topology
from holdfast.policy.detection.bad_steps import StepRetry
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import generation_key, read_generation


@dataclass(frozen=True)
class PreviousState(JsonMessage):
    """The state that the processes of a generation hold: laid out by the topology of an older one,
    and that after `step`."""

    topology: Topology
    step: int


@dataclass(frozen=True)
class AgentEntry(JsonMessage):
    """An agent whose node takes part. address: "host:port", where it listens. mark: which of the
    agents that have had its name. places: how many workers its node has room for."""

    address: str = ""
    mark: str = ""
    places: int = 1


@dataclass(frozen=True)
class GenerationRecord(JsonMessage):
    """The definition of a generation.

    topology     None only where agents coordinate nothing that trains
    processes    by rank, the process of its node that takes it; None: a newcomer. (): all are
    came_from    by rank, which rank of `previous` its process was; None: a newcomer. None for
                 all: the workers restore what the StartState names
    previous     what those with a rank in came_from hold; None just where came_from is None
    skips        all microbatches that the run leaves out, not only those of this generation
    retry        the step that is to be done again, if any
    reason       why there is a new generation, as in `GenerationStarted.reason`
    stopping     why the run stops after this generation's first step; "": it does not
    end_reason   the workers save the state that they hold, without a step, and the run ends for
                 this `EndReason` and `stopping`; "": they train
    term         under which it was made
    agents       by node, exactly those that take part
    mark         random: tells apart two that were made alike; "" until it is made
    """

    absent_if_default = frozenset({"skips", "retry", "stopping", "end_reason", "mark"})
    empty_if_none = frozenset({"topology"})
    topology: Topology | None = None
    processes: Annotated[tuple[int | None, ...], Key("seats")] = ()
    came_from: tuple[int | None, ...] | None = None
    previous: Annotated[PreviousState | None, Key("before")] = None
    skips: Skips = field(default_factory=Skips)
    retry: Annotated[StepRetry | None, Key("again")] = None
    reason: str = ""
    stopping: Annotated[str, Key("closing")] = ""
    end_reason: str = ""
    term: int = 0
    agents: Mapping[str, AgentEntry] = field(default_factory=dict)
    mark: str = ""

    @cached_property
    def addresses(self) -> Mapping[str, str]:
        """Return the agents' addresses by name, in the order of their names."""
        return {name: self.agents[name].address for name in sorted(self.agents)}


def record_of(store: RunStore, generation: int) -> GenerationRecord:
    """Read a record. Raises MissingKeyError, CorruptError, and what the run store raises."""
    value = read_generation(store, generation)
    try:
        return GenerationRecord.from_json(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{generation_key(generation)}: {error!r}") from error


async def read_record(store: RunStore, generation: int) -> GenerationRecord:
    """Read a record as `record_of` does, without blocking the event loop."""
    return await asyncio.to_thread(record_of, store, generation)
