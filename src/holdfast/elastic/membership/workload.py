"""What an agent's place in the run (`role_loop`) asks of its workers' side:
`node_runner.Station`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.hung_worker import Blame
from holdfast.elastic.protocol.start_state import StartState
from holdfast.policy.membership.transitions import Stage


class Work(Protocol):
    """What this node does in a generation. `at`, `stage` and `held` are told with every question;
    `changed` is set whenever one of them has changed."""

    changed: asyncio.Event

    @property
    def at(self) -> int: ...

    @property
    def stage(self) -> Stage: ...

    @property
    def held(self) -> NodeOutcome: ...

    @property
    def ready(self) -> int | None:
        """Places with a process that works or could at once; None: it cannot say."""
        ...

    def outside(self) -> None:
        """The others work without this node: told with every heartbeat."""
        ...

    def start(self, generation: int, record: GenerationRecord, begin: StartState) -> None:
        """Take part in a newer generation, and what it begins from. Returns at
        once, as the others do."""
        ...

    def halt(self, generation: int, reason: str, *, gentle: bool) -> None: ...

    def leave(self, verdict: str) -> None: ...

    @property
    def still(self) -> dict[str, Any]:
        """Who stands still here (`noticing.Lookout.told`); {} if nobody does."""
        ...

    @property
    def paces(self) -> list[list[Any]]:
        """What the workers here took for their microbatches (`Generation.paces`); [] if nothing is
        to be told now."""
        ...

    def blame(self, generation: int, blamed: Sequence[Blame]) -> None:
        """For whom the others wait, of the workers here."""
        ...
