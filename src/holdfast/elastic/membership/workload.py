"""The node's work as the role loop (`role_loop`) sees it; `node_runner` implements it."""

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
    """This node's part in a generation. Every heartbeat reports `at`, `stage` and `held`;
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
        """Places with a process that works or could at once; None if not known."""
        ...

    def outside(self) -> None:
        """Note that the other nodes work without this one; every heartbeat's answer repeats it."""
        ...

    def start(self, generation: int, record: GenerationRecord, begin: StartState) -> None:
        """Take part in a newer generation, which begins from `begin`. Returns at once, as `halt`
        and `leave` do."""
        ...

    def halt(self, generation: int, reason: str, *, gentle: bool) -> None: ...

    def leave(self, verdict: str) -> None: ...

    @property
    def still(self) -> dict[str, Any]:
        """The hang monitor's report on the workers here without progress; {} if there are none."""
        ...

    @property
    def paces(self) -> list[list[Any]]:
        """Seconds that the workers here took for their microbatches (`Generation.paces`); [] if
        there is nothing to report now."""
        ...

    def blame(self, generation: int, blamed: Sequence[Blame]) -> None:
        """Take the coordinator's list of hung workers on this node."""
        ...
