"""The object in the run store that opens a generation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import (
    object_of,
)


@dataclass(frozen=True)
class Opened:
    """A generation's object in the run store. agents: name -> address of all who take part."""

    value: Mapping[str, Any]
    agents: Mapping[str, str]
    members: tuple[str, ...]


async def read_opened(store: RunStore, generation: int) -> Opened:
    """Raises what the run store raises."""

    def read() -> Opened:
        value = object_of(store, generation)
        said = dict(value["agents"])
        agents = {str(name): str(said[name]["address"]) for name in sorted(said)}
        return Opened(value, agents, tuple(agents))

    return await asyncio.to_thread(read)
