"""Carries out the coordinator's directives on this node, in a run on several nodes.

`role_loop.RoleLoop` brings the directives; the `ProcessManager` has the processes. This module maps
one to the other:

    start   The generation record names the ranks of this node and their processes. The mover and
            the processes receive their orders. The result is this node's stage.
    pause   The workers' next vote asks for a pause: they hold after the same step everywhere.
    halt    The workers hold where they are.
    leave   The run has ended.

`node_outcome` reports the workers' states and the generation's end. The coordinator plans by it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.checkpoint.mover.client import Newest
from holdfast.config.run import RunConfig
from holdfast.elastic.event_log import Board, Say
from holdfast.elastic.node.hang_monitor import Watch
from holdfast.elastic.node.launch_specs import boots, standby_boot, standbys, wanted_workers
from holdfast.elastic.node.mover_supervisor import MoverLink
from holdfast.elastic.node.process_manager import Host, Start
from holdfast.elastic.node.worker_group import Generation
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.generation_outcome import (
    Failed,
    Finished,
    Left,
    Lost,
    NodeOutcome,
    Verdict,
)
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.hung_worker import Blame
from holdfast.elastic.protocol.start_state import StartState
from holdfast.errors import FencedError, HoldfastError, UserError
from holdfast.layout import Topology
from holdfast.plan.hardware import usable_cores
from holdfast.policy.membership.transitions import LET_GO, Stage
from holdfast.policy.recovery.survivors import Held
from holdfast.policy.saving.failure_history import Seen
from holdfast.wire.secret import Secret

SPARE_SECONDS = 10.0
"""Least seconds between two checks for missing standbys."""
ASK_AGAIN_SECONDS = 1.0
"""Seconds before a mover that did not answer gets its announcement again."""
HOLD_SECONDS = 10.0
"""Seconds that a worker may take to stop, in addition to three of its steps."""


@dataclass(frozen=True)
class Surroundings:
    """The fixed context of a node runner. control_address: address at which this node's agent
    listens."""

    config: RunConfig
    node: str
    folder: Path
    secret: Secret
    control: str
    seen: Seen
    places: int


class Station:
    """One node's `Workload` (see `role_loop`). Lives in one event loop."""

    def __init__(
        self, around: Surroundings, host: Host, mover: MoverLink, board: Board, say: Say,
        opened: Callable[[int], None], began: Callable[[Generation], None],
        ended: Callable[[Verdict], Awaitable[Verdict]],
    ) -> None:  # fmt: skip
        """Set up an idle runner.

        Args:
            on_generation_started: called with the generation's number before this node does
                anything.
            on_group_started: called once its workers can report.
            on_group_ended: called with this node's outcome before the coordinator receives it.
                Returns the outcome to report.
        """
        self.changed = asyncio.Event()
        self.at, self.stage = 0, Stage.IDLE
        self.pausing = 0  # the generation whose workers are asked to end their step and hold
        self.parting = False  # and one of its nodes leaves then
        self.current: Generation | None = None
        self.closing = ""  # why the run stops after this generation's first step
        self._around, self._host, self._mover = around, host, mover
        self._board, self._say = board, say
        self._live = around.config.cluster.recovery == "live"
        self._opened, self._began, self._ended = opened, began, ended
        self._voices: dict[str, int] = {}
        self._paced = 0.0
        compiles = around.config.train.compile
        self._watch = Watch(kill=host.kill, tell=self.changed.set, compiles=compiles)
        self._outcome: Verdict | None = None
        self._task: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._meet = ""
        self._all_ready = False
        self._spares: asyncio.Task[None] | None = None
        self._told_ready: int | None = None
        self._spared = -math.inf  # when standbys were last seen to
        self._counts = False  # whether it is known here which processes are ready
        host.noticed = self._counted
        self._halting = 0  # the newest generation that was to halt
        self._all_here = False  # whether no other node takes part

    # --- reports to the coordinator -------------------------------------------------------------
    @property
    def held(self) -> NodeOutcome:
        """Return the states of waiting workers, by process, and how the generation ended here."""
        return NodeOutcome(self._host.holding(), self._outcome)

    @property
    def ready(self) -> int | None:
        """Return the number of places with a process that works or could start at once.

        Return None if each generation starts new processes, or before any generation runs, here or
        elsewhere.
        """
        live = self._around.config.cluster.recovery == "live"
        return min(self._host.ready, self._room) if live and self._counts else None

    @property
    def _room(self) -> int:
        return self._around.places

    def _counted(self) -> None:
        if self.ready is not None and self.ready != self._told_ready:
            self._told_ready = self.ready
            self.changed.set()

    def _become(self, stage: Stage, outcome: Verdict | None = None) -> None:
        self.stage = stage
        self._outcome = outcome
        self.changed.set()

    # --- orders ---------------------------------------------------------------------------------
    def start(self, generation: int, record: GenerationRecord, begin: StartState) -> None:
        self.at, self._all_ready, self._counts = generation, False, True
        self._spared = -math.inf
        self._become(Stage.BUILDING)
        self._replace_task(self._run(generation, record, begin))

    def halt(self, generation: int, reason: str, *, gentle: bool) -> None:
        if self.stage not in (Stage.BUILDING, Stage.WORKING, Stage.BROKEN):
            return
        if gentle and self.stage is Stage.WORKING:
            self.pausing = generation  # told with the answer to each worker's next report
            self.parting = reason == "notice"
            return
        self.pausing = 0
        if self._halting == generation and self._task is not None and not self._task.done():
            return  # it is told with every heartbeat, as long as it lasts
        self._halting = generation
        self._replace_task(self._halt(generation))

    def leave(self, verdict: str) -> None:
        """Do nothing: the processes end with the agent."""

    # --- hung workers ---------------------------------------------------------------------------
    @property
    def still(self) -> dict[str, Any]:
        """Return the stall report of this node's workers; {} if none is stalled.

        Workers that hold for a pause count, since they wait for other workers.
        """
        current = self.current
        if current is None:
            return {}
        paused = self.stage is Stage.HELD and any(member.pauses for member in current.members)
        at_work = paused or self.stage in (Stage.BUILDING, Stage.WORKING)
        return current.still() if at_work else {}

    @property
    def paces(self) -> list[list[Any]]:
        """Return the recent speed of this node's workers, once per heartbeat."""
        now = asyncio.get_running_loop().time()
        current, every = self.current, self._around.config.cluster.beat_seconds / 2
        if current is None or self.stage is not Stage.WORKING or now - self._paced < every:
            return []
        self._paced = now
        return current.paces()

    def blame(self, generation: int, blamed: Sequence[Blame]) -> None:
        """Handle workers of this node that the coordinator declares hung."""
        current = self.current
        if current is not None and current.number == generation:
            current.blame(blamed)

    def _replace_task(self, coroutine: Any) -> None:
        """Replace the running task: a newer directive cancels the work for an older one."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(coroutine)
        self._task.add_done_callback(self._looked_at)

    def _looked_at(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, HoldfastError):
            self._say(f"a fault of this node's agent: {error!r}")
        if isinstance(error, UserError) and self._all_here:
            self._become(Stage.BROKEN, Failed(str(error), exit_codes.USER))
            return
        self._become(Stage.BROKEN, Lost("", str(error)))

    def _told(self, task: asyncio.Task[None]) -> None:
        """Log the failure only: workers that have their state keep training without the mover."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say(f"a fault of this node's agent, while updating its mover: {error!r}")

    # --- one generation -------------------------------------------------------------------------
    async def _run(self, generation: int, record: GenerationRecord, begin: StartState) -> None:
        topology = record.topology
        assert topology is not None, "nobody trains without one"
        if self._telling is not None:
            self._telling.cancel()
        self._opened(generation)
        self._meet = begin.rendezvous
        self.closing = record.stopping
        ranks = [rank for rank, node in enumerate(topology.nodes) if node == self._around.node]
        self._all_here = len(ranks) == topology.world_size
        await self._host.prepare(len(ranks))
        newest, step = begin.restore_point, begin.step
        came_from = record.came_from
        stored = came_from is None and newest is not None and newest.durable
        tell_mover = partial(self._tell_mover, topology, step, newest, begin, stored)
        if came_from is None:  # the workers ask the mover for their state first
            await tell_mover()
        self.current = current = Generation(
            topology, step, self._around.config.cluster, self._board, self._say, self._ready,
            self._voices, self._around.node, self._watch,
        )  # fmt: skip
        self._began(current)
        if self._done_before(record, newest, step):
            assert newest is not None, "nobody holds a state"
            await self._judge(await self._nothing_to_do(generation, newest))
            return
        if not (self._live or self._mover.alive):
            current.decide(Lost("mover_lost", "the mover ended"))
        processes = self._processes(record, ranks)
        current.expect({rank: pid for rank, pid in zip(ranks, processes, strict=True) if pid})
        told = boots(
            self._around.config, topology, folder=self._around.folder,
            agent=self._around.control, mover_socket=self._mover.socket_path,
            cores=usable_cores(), restore_key=None if newest is None else newest.key,
            start_step=step, seen=self._around.seen, node=self._around.node, meet=self._meet,
            record=record,
        )  # fmt: skip
        beginning = self._host.begin(
            Start(generation, tuple(told), tuple(processes), came_from,
                  None if record.previous is None else record.previous.to_json())
        )  # fmt: skip
        if came_from is not None:
            self._telling = asyncio.create_task(self._tell_behind(generation, tell_mover))
            self._telling.add_done_callback(self._told)
        await beginning
        if not ranks:
            self._become(Stage.WORKING)
            return
        await self._judge(await current.verdict)

    async def _tell_mover(
        self, topology: Topology, step: int, newest: Newest | None, begin: StartState,
        stored: bool,
    ) -> None:  # fmt: skip
        if begin.peers is None:  # this node is the run's only one
            await self._mover.expect(topology, step, stored=stored)
            return
        await self._mover.expect(topology, step, newest, begin.peers, begin.extra_sources, stored)

    async def _tell_behind(self, generation: int, tell: Callable[[], Awaitable[None]]) -> None:
        """Repeat the announcement until the mover takes it; the workers train meanwhile.

        The code that restarts a mover announces the generation to the new mover itself.
        """
        while self.at == generation and self._mover.alive:
            try:
                await tell()
                return
            except FencedError:
                return
            except HoldfastError as error:
                self._say(f"the mover of {self._around.node} does not answer: {error}")
                await asyncio.sleep(ASK_AGAIN_SECONDS)

    def _done_before(self, record: GenerationRecord, newest: Newest | None, step: int) -> bool:
        """Return True if all steps are done and this node must verify the final state."""
        restored = record.came_from is None and newest is not None
        chosen = self._meet == self._around.control  # by this node's mover
        return restored and step >= self._around.config.train.steps and self._all_here and chosen

    async def _nothing_to_do(self, generation: int, newest: Newest) -> Verdict:
        """Verify the final state of a run whose steps are all done.

        No worker will read its checkpoint, so the mover does. A run must not finish with a state
        that cannot be restored.
        """
        unsaved = None if newest.durable else await self._mover.made_durable(newest)
        problem = None
        if unsaved is None and newest.key is not None:
            problem = await self._mover.damage(generation, newest.key)
        return Finished(newest.step, unsaved) if problem is None else Lost("rot", problem, problem)

    def _processes(self, record: GenerationRecord, ranks: list[int]) -> list[int | None]:
        """Return the process of each of this node's ranks; None: a newcomer.

        A newcomer also replaces a process that has died since. The other workers do not expect it,
        and they notice.
        """
        living = {process.pid for process in self._host.workers}
        if not record.processes:
            return [None] * len(ranks)
        return [pid if (pid := record.processes[rank]) in living else None for rank in ranks]

    def _ready(self) -> None:
        self._all_ready = True

    def stored(self) -> None:
        """Report WORKING once the workers' events so far are in the journal.

        A node that learns that this one works then finds its late events of older generations
        there.
        """
        if self._all_ready and self.stage is Stage.BUILDING:
            self._all_ready = False
            self._become(Stage.WORKING)
        current = self.current
        if self.stage is Stage.WORKING and current is not None and current.has_stepped:
            world = current.topology.world_size
            self._keep_spares(len(current.ranks), world)  # behind the training: it costs time

    # --- standbys -------------------------------------------------------------------------------
    def outside(self) -> None:
        """Prepare standbys while other nodes work, so that this node can offer its places."""
        if self.stage in LET_GO:
            self._counts = True
            self._keep_spares(0, 0)

    def _keep_spares(self, here: int, everywhere: int) -> None:
        """Start missing standbys: as many as the run file asks for, and one for each lost worker's
        place."""
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
            self._spares.add_done_callback(self._spared_or_not)

    async def _spare(self, count: int) -> None:
        around = self._around
        await self._host.prepare(0)
        boot = standby_boot(
            around.config, around.folder, around.control, self._mover.socket_path, usable_cores()
        )
        await self._host.standby(count, boot)

    def _spared_or_not(self, task: asyncio.Task[None]) -> None:
        """Ignore a failed start of standbys: the next check tries again."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, HoldfastError):
            self._say(f"a fault of this node's agent, while starting standbys: {error!r}")

    async def _judge(self, verdict: Verdict) -> None:
        verdict = await self._ended(verdict)
        done = isinstance(verdict, Finished | Left)
        self._become(Stage.DONE if done else Stage.BROKEN, verdict)

    def held_one(self, rank: int, held: Held) -> None:
        """Note that a worker has stopped; once all hold for a pause, this node holds."""
        current = self.current
        if current is None or held.kind != "paused":
            return
        if all(member.held is not None for member in current.members if member.alive):
            if self._task is not None:
                self._task.cancel()  # it waits for a verdict that nobody will give
            self._become(Stage.HELD)

    async def _halt(self, generation: int) -> None:
        """Stop all workers, whatever the stage; none works when this returns."""
        current = self.current
        seconds = HOLD_SECONDS
        inside: list[int] = []
        if current is not None and current.number == generation:
            seconds += 3 * current.step_seconds
            lost = {member.rank for member in current.members if not member.alive}
            verdict = current.ended
            lost |= verdict.ranks if isinstance(verdict, Lost) else frozenset()
            # If a replica spans nodes, a rank elsewhere may be lost: then all of its ranks are
            # woken.
            inside = [
                rank
                for replica in current.topology.replicas
                if lost & set(replica.ranks) or self._spans(current.topology, replica.ranks)
                for rank in replica.ranks
            ]
        if self._live and not isinstance(self._outcome, Failed):
            with suppress(FencedError):
                await self._host.halt(generation, inside, seconds)
        else:
            await self._host.clear()
        if self._all_here:  # the next generation fences what is being saved
            with suppress(HoldfastError):
                await self._mover.settle(generation)
        self._become(Stage.HELD, self._outcome)

    def _spans(self, topology: Topology, ranks: tuple[int, ...]) -> bool:
        return len({topology.nodes[rank] for rank in ranks}) > 1
