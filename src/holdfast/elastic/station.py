"""This node's part of a run on several nodes: what the coordinator's orders mean for its processes.

`following.Follower` brings the orders; the `Host` has the processes; here is what lies between:

    start   the generation's object says which ranks sit here and which process takes which; the
            mover is told, the processes are, and what becomes of them is this node's stage
    pause   the workers' next vote wishes it, and they hold after the same step everywhere
    halt    they hold where they are
    leave   the run is over

What the workers hold, and how they ended, is told in `held`: by that the coordinator plans.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.mover_client import Newest
from holdfast.checkpoint.peer_settings import Peer
from holdfast.config.run import RunConfig
from holdfast.elastic.board import Board, Say
from holdfast.elastic.generation import Generation
from holdfast.elastic.host import Host, Start
from holdfast.elastic.mover_link import MoverLink
from holdfast.elastic.noticing import Blame, Watch
from holdfast.elastic.opening import boots, standby_boot, standbys, wanted_workers
from holdfast.elastic.verdict import Failed, Finished, Left, Lost, Verdict
from holdfast.errors import FencedError, HoldfastError
from holdfast.layout import Topology
from holdfast.plan.hardware import usable_cores
from holdfast.policy.membership import LET_GO, Stage
from holdfast.policy.seen import Seen
from holdfast.policy.survivors import Held
from holdfast.wire.secret import Secret

SPARE_SECONDS = 10.0
"""Until standbys that were lost are replaced, at the earliest."""
HOLD_SECONDS = 10.0
"""Beside three of its steps: how long a worker may take to stop where it is."""


@dataclass(frozen=True)
class Surroundings:
    """What a station is told once. control: where this node's agent listens."""

    config: RunConfig
    node: str
    folder: Path
    secret: Secret
    control: str
    seen: Seen


class Station:
    """One node's `Work` (see `following`). Lives in one event loop."""

    def __init__(
        self, around: Surroundings, host: Host, mover: MoverLink, board: Board, say: Say,
        opened: Callable[[int], None], ended: Callable[[Verdict], None],
    ) -> None:  # fmt: skip
        """opened: called with a generation's number before anything of it is done here; ended: with
        how it ended for this node."""
        self.changed = asyncio.Event()
        self.at, self.stage = 0, Stage.IDLE
        self.pausing = 0  # the generation whose workers are asked to end their step and hold
        self.current: Generation | None = None
        self.verdict: str | None = None  # of the run, once it is over
        self._around, self._host, self._mover = around, host, mover
        self._board, self._say = board, say
        self._opened, self._ended = opened, ended
        self._voices: dict[str, int] = {}
        self._watch = Watch(kill=host.kill, tell=self.changed.set)
        self._outcome: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        self._meet = ""
        self._all_ready = False
        self._spares: asyncio.Task[None] | None = None
        self._told_ready: int | None = None
        self._spared = -math.inf  # when standbys were last seen to
        self._counts = False  # whether it is known here which processes are ready
        host.noticed = self._counted

    # --- what the coordinator hears -------------------------------------------------------------
    @property
    def held(self) -> dict[str, Any]:
        """By process, what those who wait hold; and how the generation ended here."""
        holding = {str(pid): one.to_json() for pid, one in self._host.holding().items()}
        return {"processes": holding, **self._outcome}

    @property
    def ready(self) -> int | None:
        """Places with a process that works or could at once. As long as no others work, and where
        new processes begin each generation, that says nothing."""
        live = self._around.config.cluster.recovery == "live"
        return min(self._host.ready, self._room) if live and self._counts else None

    @property
    def _room(self) -> int:
        config = self._around.config
        return config.cluster.places or config.layout.workers

    def _counted(self) -> None:
        if self.ready is not None and self.ready != self._told_ready:
            self._told_ready = self.ready
            self.changed.set()

    def _become(self, stage: Stage, **outcome: Any) -> None:
        self.stage = stage
        self._outcome = outcome
        self.changed.set()

    # --- orders ---------------------------------------------------------------------------------
    def start(self, generation: int, value: Mapping[str, Any], begin: Mapping[str, Any]) -> None:
        self.at, self._all_ready, self._counts = generation, False, True
        self._spared = -math.inf
        self._become(Stage.BUILDING)
        self._replace_task(self._run(generation, value, begin))

    def halt(self, generation: int, reason: str, *, gentle: bool) -> None:
        if self.stage not in (Stage.BUILDING, Stage.WORKING, Stage.BROKEN):
            return
        if gentle and self.stage is Stage.WORKING:
            self.pausing = generation  # told with the answer to each worker's next report
            return
        self.pausing = 0
        self._replace_task(self._halt(generation))

    def leave(self, verdict: str) -> None:
        self.verdict = verdict

    # --- who stands still -----------------------------------------------------------------------
    @property
    def still(self) -> dict[str, Any]:
        """Of this node's workers; {} if nobody does."""
        current = self.current
        at_work = self.stage in (Stage.BUILDING, Stage.WORKING) and current is not None
        return current.still() if at_work and current is not None else {}

    def blame(self, generation: int, blamed: Sequence[Blame]) -> None:
        """The coordinator names workers of this node for whom the others wait."""
        current = self.current
        if current is not None and current.number == generation:
            current.blame(blamed)

    def _replace_task(self, coroutine: Any) -> None:
        """Orders overtake each other: what was begun for an older one is given up."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(coroutine)
        self._task.add_done_callback(self._looked_at)

    def _looked_at(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, HoldfastError):
            self._say(f"a fault of this node's agent: {error!r}")
        self._become(Stage.BROKEN, cause=str(error))

    # --- one generation -------------------------------------------------------------------------
    async def _run(
        self, generation: int, value: Mapping[str, Any], begin: Mapping[str, Any]
    ) -> None:
        topology = Topology.from_json(value["topology"])
        self._opened(generation)
        self._meet = str(begin["meet"])
        ranks = [rank for rank, node in enumerate(topology.nodes) if node == self._around.node]
        await self._host.prepare(len(ranks))
        newest = None if begin.get("newest") is None else Newest.from_json(begin["newest"])
        step = int(begin["step"])
        machines = [Peer.from_json(row) for row in begin["machines"]]
        sources = [Peer.from_json(row) for row in begin["sources"]]
        await self._mover.expect(topology, step, newest, machines, sources)
        self.current = current = Generation(
            topology, step, self._around.config.cluster, self._board, self._say, self._ready,
            self._voices, self._around.node, watch=self._watch,
        )  # fmt: skip
        processes = self._processes(value, ranks)
        current.expect({rank: pid for rank, pid in zip(ranks, processes, strict=True) if pid})
        told = boots(
            self._around.config, topology, folder=self._around.folder,
            agent=self._around.control, mover_socket=self._mover.socket_path,
            cores=usable_cores(), restore_key=None if newest is None else newest.key,
            start_step=step, seen=self._around.seen, node=self._around.node, meet=self._meet,
        )  # fmt: skip
        came_from = value.get("came_from")
        await self._host.begin(
            Start(generation, tuple(told), tuple(processes),
                  None if came_from is None else tuple(came_from), value.get("before"))
        )  # fmt: skip
        if not ranks:
            self._become(Stage.WORKING)
            return
        await self._judge(await current.verdict)

    def _processes(self, value: Mapping[str, Any], ranks: list[int]) -> list[int | None]:
        """Which process of this node takes which of its ranks; None: a newcomer. One that has died
        since is replaced by a newcomer, too, which the others do not count on: they notice."""
        living = {process.pid for process in self._host.workers}
        seats = value.get("seats") or [None] * len(value["topology"]["nodes"])
        return [pid if (pid := seats[rank]) in living else None for rank in ranks]

    def _ready(self) -> None:
        self._all_ready = True

    def stored(self) -> None:
        """What the workers have told so far is in the journal: whoever hears that this node works
        finds there what it had still to tell of older generations."""
        if self._all_ready and self.stage is Stage.BUILDING:
            self._all_ready = False
            self._become(Stage.WORKING)
        current = self.current
        if self.stage is Stage.WORKING and current is not None and current.has_stepped:
            world = current.topology.world_size
            self._keep_spares(len(current.ranks), world)  # behind the training: it costs time

    # --- standbys -------------------------------------------------------------------------------
    def outside(self) -> None:
        """Others work: what could take part here is made ready, and then offered."""
        if self.stage in LET_GO:
            self._counts = True
            self._keep_spares(0, 0)

    def _keep_spares(self, here: int, everywhere: int) -> None:
        """As many as the run file says, and one for each place that was given up with a worker."""
        now = asyncio.get_running_loop().time()
        busy = self._spares is not None and not self._spares.done()
        if self._around.config.cluster.recovery != "live" or busy:
            return
        if now - self._spared < SPARE_SECONDS:
            return
        self._spared = now
        wanted, room = wanted_workers(self._around.config), self._room - here
        missing = min(room, wanted - everywhere) if wanted else room
        count = standbys(self._around.config) * bool(here) + max(0, missing)
        if count:
            self._spares = asyncio.create_task(self._spare(count))
            self._spares.add_done_callback(_looked_at)

    async def _spare(self, count: int) -> None:
        around = self._around
        await self._host.prepare(0)
        boot = standby_boot(
            around.config, around.folder, around.control, self._mover.socket_path, usable_cores()
        )
        await self._host.standby(count, boot)

    async def _judge(self, verdict: Verdict) -> None:
        self._ended(verdict)
        match verdict:
            case Finished(step, unsaved) | Left(step, unsaved):
                kind = "finished" if isinstance(verdict, Finished) else "left"
                self._become(Stage.DONE, kind=kind, step=step, unsaved=unsaved)
            case Failed(sentence, code):
                self._become(Stage.BROKEN, failed=sentence, code=code)
            case Lost(reason, cause, rotten):
                self._become(Stage.BROKEN, reason=reason, cause=cause, rotten=rotten)

    def held_one(self, rank: int, held: Held) -> None:
        """A worker has stopped and waits. When all have for a pause, this node holds."""
        current = self.current
        if current is None or held.kind != "paused":
            return
        if all(member.held is not None for member in current.members if member.alive):
            if self._task is not None:
                self._task.cancel()  # it waits for a verdict that nobody will give
            self._become(Stage.HELD)

    async def _halt(self, generation: int) -> None:
        """Whatever was under way here, nobody works when this returns."""
        current = self.current
        seconds = HOLD_SECONDS
        inside: list[int] = []
        if current is not None and current.number == generation:
            seconds += 3 * current.step_seconds
            lost = {member.rank for member in current.members if not member.alive}
            # A replica that spans nodes may have lost somebody elsewhere: then all of it is woken.
            inside = [
                rank
                for replica in current.topology.replicas
                if lost & set(replica.ranks) or self._spans(current.topology, replica.ranks)
                for rank in replica.ranks
            ]
        with suppress(FencedError):
            await self._host.halt(generation, inside, seconds)
        self._become(Stage.HELD, **self._outcome)

    def _spans(self, topology: Topology, ranks: tuple[int, ...]) -> bool:
        return len({topology.nodes[rank] for rank in ranks}) > 1


def _looked_at(task: asyncio.Task[None]) -> None:
    """Standbys that could not be made: they are tried again when somebody misses them."""
    if not task.cancelled() and isinstance(task.exception(), HoldfastError):
        return
