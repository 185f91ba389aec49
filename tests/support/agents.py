"""Agents without trainers: real HTTP between them, a real run store, and a node's work as a switch.

Terms, generations, heartbeats and elections are real. An agent can be killed (its sockets close),
suspended (it answers nothing and says nothing), cut off from other agents, and restarted.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.generation_store import start_term
from holdfast.elastic.membership.role_loop import RoleLoop
from holdfast.elastic.protocol.coordinator_messages import NodeReport, StartState, WorkerPace
from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.hung_worker import HungWorker, StallReport
from holdfast.policy.membership.election import ElectionTimeouts
from holdfast.policy.membership.transitions import CoordinatorState, MembershipRules, NodeStage
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.server import Handler, HttpListener, SignedApplication
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore, RunStore
from holdfast.wire.term import Term
from tests.support.ranks import DEADLINE_S

SECRET = Secret(b"f" * 32)
QUICK = ElectionTimeouts(leader_timeout_s=1.0, delay_per_place_s=0.2, minority_wait_s=2.0)
BEAT = 0.2


class Switch:
    """A node's workers: they build and work at once, and hold on command."""

    def __init__(self) -> None:
        self.state_changed = asyncio.Event()
        self.generation, self.stage = 0, NodeStage.IDLE
        self.node_outcome = NodeOutcome()
        self.history: list[tuple[str, int]] = []
        self.slow = False  # stays in `building`
        self.stalled_workers: StallReport | None = None
        self.worker_paces: tuple[WorkerPace, ...] = ()
        self.blamed: list[tuple[int, int]] = []
        self.ready_workers: int | None = None

    def start_generation(
        self, generation: int, record: GenerationRecord, begin: StartState
    ) -> None:
        assert generation > self.generation, "an older generation was begun"
        assert self.stage in (NodeStage.IDLE, NodeStage.HELD, NodeStage.DONE), (
            "work in two generations at once"
        )
        self.generation = generation
        self._become(NodeStage.BUILDING)
        if not self.slow:
            asyncio.get_running_loop().call_soon(self._built, generation)

    def on_outside_generation(self) -> None:
        return

    def _built(self, generation: int) -> None:
        if (self.generation, self.stage) == (generation, NodeStage.BUILDING):
            self._become(NodeStage.WORKING)

    def halt_generation(self, generation: int, reason: str, *, at_step_end: bool) -> None:
        assert generation == self.generation
        if self.stage in (NodeStage.BUILDING, NodeStage.WORKING, NodeStage.BROKEN):
            self._become(NodeStage.HELD)

    def breaks(self) -> None:
        self._become(NodeStage.BROKEN)

    def ends(self) -> None:
        self._become(NodeStage.DONE)

    def handle_hung_workers(self, generation: int, blamed: Sequence[HungWorker]) -> None:
        self.blamed += [(generation, one.rank) for one in blamed]

    def on_run_ended(self, verdict: str) -> None:
        self.history.append(("left", self.generation))

    def _become(self, stage: NodeStage) -> None:
        self.stage = stage
        self.history.append((stage.value, self.generation))
        self.state_changed.set()


class FleetAgent:
    """One agent: its listener, its follower, its work."""

    def __init__(
        self,
        name: str,
        store: RunStore,
        least: int = 1,
        most: int = 100,
        *,
        patience: ElectionTimeouts = QUICK,
        beat: float = BEAT,
        lost_after: float = 1.0,
        changed: Callable[[CoordinatorState, CoordinatorState], None] = lambda old, new: None,
        gather: float = 0.3,
        secret: Secret = SECRET,
    ) -> None:
        self.name, self.store = name, store
        self.work = Switch()
        self.said: list[str] = []
        self.term: Term | None = None  # the newest that it has led
        self._least, self._most, self._changed, self._lost_after = least, most, changed, lost_after
        self._gather = gather
        self._bound = bind_listener("127.0.0.1", 0, "cluster.interface")
        self.address = address_of(self._bound)
        self.follower = RoleLoop(
            name,
            self.address,
            store,
            secret,
            self.work,
            self._reign,
            timeouts=patience,
            heartbeat_interval_s=beat,
            complain=self.said.append,
        )
        self._frozen = False
        handlers = {path: self._answer(do) for path, do in self.follower.handlers.items()}
        guard = SignedApplication(
            handlers,
            secret,
            Verifier(secret, time.time),
            lambda: 0,
            generationless_paths=frozenset(handlers),
        )
        self._listener = HttpListener(guard, self._bound)
        self._serving = asyncio.create_task(self._listener.serve())
        self.running = asyncio.create_task(self.follower.run())

    async def _reign(self, term: Term) -> Coordinator:
        self.term = term

        def fits(nodes: Any) -> tuple[str, ...]:
            names = sorted(node.name for node in nodes)[: self._most]
            return tuple(names) if len(names) >= self._least else ()

        rules = MembershipRules(
            fits,
            node_timeout_s=self._lost_after,
            gather_wait_s=self._gather,
            settle_time_s=0.1,
            is_full=lambda nodes: len(nodes) >= self._most,
        )
        return await start_term(
            term, self.store, rules, plan, on_state_change=self._changed, complain=self.said.append
        )

    @property
    def reigns(self) -> bool:
        return self.follower.coordinator is not None

    def _answer(self, handler: Handler) -> Handler:
        async def answer(generation: int, body: dict[str, Any]) -> dict[str, Any]:
            said = await handler(generation, body)
            if self._frozen:
                await asyncio.Event().wait()
            return said

        return answer

    def freeze(self) -> None:
        """It says nothing and answers nothing any more; its port is open."""
        self._frozen = True
        self.running.cancel()

    def die(self) -> None:
        """As `kill`, from within: it does not get beyond the next wait."""
        self.running.cancel()
        self._serving.cancel()  # and with it the listening socket

    async def kill(self) -> None:
        """Nothing of it is left, and its port refuses."""
        self.die()
        await asyncio.wait({self.running, self._serving})


async def plan(
    reign: CoordinatorState, generation: int, names: frozenset[str], known: Mapping[str, NodeReport]
) -> GenerationRecord:
    return GenerationRecord()


def working(agents: list[FleetAgent]) -> bool:
    """All work, in one generation."""
    return len({a.work.generation for a in agents}) == 1 and all(
        a.work.stage is NodeStage.WORKING for a in agents
    )


def scene_of(scene: Callable[[FolderStore], Awaitable[None]], folder: Path) -> None:
    """In an event loop of its own, in which nothing may be left."""

    async def whole() -> None:
        try:
            await scene(FolderStore(folder))
        finally:
            others = {t for t in asyncio.all_tasks() if t is not asyncio.current_task()}
            for task in others:
                task.cancel()
            _, left = await asyncio.wait(others, timeout=DEADLINE_S)
            assert not left, f"these do not end: {left}"

    asyncio.run(whole())


def in_scene(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of a coroutine whose first parameter is a run store: see `scene_of`."""
    signature = inspect.signature(test)
    _, *more = signature.parameters.values()
    folder = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    @functools.wraps(test)
    def run(tmp_path: Path, **given: Any) -> None:
        scene_of(lambda store: test(store, **given), tmp_path)

    run.__signature__ = signature.replace(parameters=[folder, *more])  # type: ignore[attr-defined]
    return run


async def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> None:
    """Poll in an event loop until it holds: `wait_until` for coroutines."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.01)
