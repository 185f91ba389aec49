"""The agent: starts and watches the others, and decides when a generation is over.

It holds no training state and imports no torch, so it answers within milliseconds. One event loop
runs everything:

    control (HTTP)     /report events and progress of workers, /orders what they are to do, /store
                       rendezvous, /term who is there
    health (HTTP)      /healthz, /metrics
    host               the processes of this node, their template, the mover
    tick               progress watch; term watch

Whatever ends a generation sets its verdict, once; the loop in `_run` acts on it. Those who are left
then stop, keep what they hold, and go on in the next generation (`aftermath.py`).
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.checkpoint.mover_client import Newest
from holdfast.config.run import RunConfig
from holdfast.elastic import exits, health
from holdfast.elastic.aftermath import Aftermath, Survivors
from holdfast.elastic.board import Board, Observer, Say
from holdfast.elastic.boot import DEFAULT_ENTRY
from holdfast.elastic.clouds import Warned, source_of
from holdfast.elastic.generation import Generation
from holdfast.elastic.host import Host, Start
from holdfast.elastic.last_upload import LastUpload
from holdfast.elastic.mover_link import MoverLink
from holdfast.elastic.notice_watch import NoticeWatch
from holdfast.elastic.notices import NOTICE, Notice, Notices, Pending
from holdfast.elastic.noticing import Watch
from holdfast.elastic.opening import boots, mover_settings, plan_topology, standbys
from holdfast.elastic.rendezvous import Rendezvous
from holdfast.elastic.standing import Standing
from holdfast.elastic.standing_in import StandIn, Told
from holdfast.elastic.verdict import Failed, Finished, Left, Lost, Verdict
from holdfast.elastic.watching import counting_refusals, watch_progress, watch_term
from holdfast.errors import FencedError, HoldfastError, UserError
from holdfast.events import (
    CheckpointCommitted,
    Event,
    GenerationStarted,
    RestorePointFound,
    RunStarted,
    StopRequested,
)
from holdfast.layout import Topology
from holdfast.plan.hardware import usable_cores
from holdfast.policy.hazard import Hazard
from holdfast.policy.restart import Restarts, RunState, give_up
from holdfast.policy.seen import Seen
from holdfast.policy.survivors import Held
from holdfast.wire import lifeline
from holdfast.wire.auth import Verifier
from holdfast.wire.journal import read
from holdfast.wire.runstore import RunStore
from holdfast.wire.secret import Secret
from holdfast.wire.server import Guard, Listener, bind
from holdfast.wire.term import QUESTION, Term, newest_generation, open_generation

HOLD_SECONDS = 10.0
"""Beside three of its steps: how long a worker may take to stop where it is. It stops between two
microbatches at the latest, and its peers wake it where it waits for them."""

LEFT_AT_ONCE = 130
"""Exit code after a second Ctrl-C: 128 + SIGINT, as a shell would say."""


class Agent:
    """One run on one node, from opening to exit code."""

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        secret: Secret,
        term: Term,
        control: socket.socket,
        *,
        folder: Path,
        above: int = 0,
        config_hash: str = "",
        dataset_version: str = "",
        observers: Sequence[Observer] = (),
        render_metrics: Callable[[], bytes] = lambda: b"",
        say: Say = print,
        resume: str = "holdfast train",
        entry: str = DEFAULT_ENTRY,
    ) -> None:
        """`control` is the bound socket whose address `term` names; `folder` is the run folder
        that `store` stands for; `above`: generations up to it were opened in a folder that is lost;
        `say` prints one line to the person; `resume` is the command that takes the run up again;
        `entry` is a worker's main function."""
        self._config, self._store, self._secret, self._term = config, store, secret, term
        self._control, self._folder, self._above = control, folder, above
        self._config_hash, self._dataset_version = config_hash, dataset_version
        self._render_metrics, self._say = render_metrics, say
        self._entry = entry
        self._node = platform.node() or "localhost"
        prior = Hazard.prior(config.checkpoint.node_mtbf_hours * 3600)
        self._seen = Seen(prior)
        self._notices = Notices(config, lambda event: self._board.emit("agent", event), say)
        self._told = Told(config)
        self._behind: asyncio.Task[None] | None = None
        learn = [self._seen.observe, self._notices.observe, lambda r: self._told.observe(r.event)]
        self._notice_source = source_of(config.cluster)
        self._pending = Pending()
        self._board = Board(store, [*learn, *observers], say)
        self._stand_in = StandIn(self._told, self._board, say, config.cluster.heartbeat_seconds)
        self._standing = Standing(self._board, say, resume)
        self._number = 0  # of the newest generation; 0 before the first
        self._current: Generation | None = None
        self._restarts = Restarts()
        self._committed = 0
        self._newest: Newest | None = None  # what the present generation began from
        self._tried: dict[str, str] = {}  # checkpoints that proved rotten when they were read
        self._stop: str | None = None
        self._leave_now = False
        self._live = config.cluster.recovery == "live"
        self._survivors = Survivors(config)
        self._voices: dict[str, int] = {}  # of every process that reports: its next event
        self._still = Watch(kill=lambda pid, why: self._host.kill(pid, why))

    def run(self) -> int:
        """Train until finished, stopped or given up. The exit code: 0, 1, 130.

        Raises UserError for what the person can mend (no checkpoint can be trusted, an address
        that cannot be listened on, an error of that kind in a worker).
        """
        return asyncio.run(self._main())

    # --- the outer frame ------------------------------------------------------------------
    async def _main(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._rendezvous = Rendezvous()
        self._refusals = counting_refusals(self._board, lambda: self._number > 0, self._say)
        cluster = self._config.cluster
        metrics = bind(cluster.interface, cluster.metrics_port, "cluster.metrics_port")
        self._lifeline, lifeline_end = lifeline.pipe()
        settings = mover_settings(self._config, self._config_hash, self._dataset_version)
        self._mover = MoverLink(
            self._config, self._folder, self._secret, settings, self._take_from_mover
        )
        self._host = Host(
            self._mover, self._folder, self._secret, self._entry, self._lifeline, self,
            mover_gone=self._mover_gone, template_gone=self._template_gone,
        )  # fmt: skip
        patience = self._config.checkpoint.bucket_wait_seconds
        self._last_upload = LastUpload(self._mover, patience, self._say)
        listeners = [
            Listener(self._guard().application, self._control),
            Listener(
                health.application(self._health, self._render_metrics, self._refusals), metrics
            ),
        ]
        served = [asyncio.create_task(listener.serve()) for listener in listeners]
        beat = cluster.heartbeat_seconds
        watches = [
            asyncio.create_task(watch_progress(beat, lambda: self._current, self._board.flush)),
            asyncio.create_task(watch_term(self._term, self._decide)),
        ]
        run = asyncio.create_task(self._run())
        self._catch_signals(run)
        every = cluster.notices_every_seconds
        self._watch = warnings = NoticeWatch(
            self._notice_source, every, self._warned, self._say, self._write_down
        )
        try:
            # A watch or a listener ends only by a bug of ours, which must not go unseen.
            await asyncio.wait({run, *served, *watches}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*served, *watches):
                if task.done() and not run.done():
                    task.result()
            return await run
        except asyncio.CancelledError:
            if not self._leave_now:
                raise
            return LEFT_AT_ONCE
        finally:
            if self._leave_now:
                os.close(lifeline_end)  # ends every child
            run.cancel()
            if self._stop is not None and not self._leave_now:
                await warnings.acknowledge()
            warnings.close()
            for task in watches:
                task.cancel()
            await self._shut_down()
            for listener in listeners:
                listener.close()
            await asyncio.wait(served, timeout=5.0)
            if not self._leave_now:
                os.close(lifeline_end)
            os.close(self._lifeline)

    async def _shut_down(self) -> None:
        await self._host.end()
        await asyncio.to_thread(self._refusals.close)
        await self._board.flush(sync=True)

    def _guard(self) -> Guard:
        return Guard(
            {
                "/report": self._report,
                "/orders": self._host.orders,
                "/store": self._rendezvous.handle,
                QUESTION: self._who,
                NOTICE: self._notice,
            },
            self._secret,
            Verifier(self._secret, time.time),
            lambda: self._number,
            outside=frozenset({QUESTION, NOTICE, "/orders"}),
            refusals=self._refusals,
        )

    # --- the run --------------------------------------------------------------------------
    async def _run(self) -> int:
        resumed = await asyncio.to_thread(newest_generation, self._store) > 0
        if resumed:
            await self._recall()
        reason = "resume" if resumed else "start"
        first = True
        while True:
            try:
                current = await self._open(reason, resumed if first else None)
                verdict = await current.verdict
            except UserError as error:
                self._fail(str(error))
                raise
            except FencedError as error:
                verdict = Failed(str(error), exits.FENCED)
            except HoldfastError as error:  # of the mover or the template
                # One that cannot start at all will not the next time; later, it is a loss.
                verdict = Failed(str(error)) if first else Lost("mover_lost", str(error))
            first = False
            await self._part(verdict)
            code = await self._act(verdict)
            if code is not None:
                return code
            assert isinstance(verdict, Lost)
            reason = verdict.reason

    async def _part(self, verdict: Verdict) -> None:
        """Everybody stops. Where the run goes on, those who can wait for what comes next."""
        current = self._current
        if not (self._live and isinstance(verdict, Lost) and self._stop is None):
            await self._host.clear()
        elif current is not None:
            if verdict.reason == "hang":
                for rank in verdict.ranks:
                    self._host.kill(current.members[rank].pid)
            mates = [r.ranks for r in current.topology.replicas if verdict.ranks & set(r.ranks)]
            inside = [rank for ranks in mates for rank in ranks]
            seconds = HOLD_SECONDS + 3 * current.step_seconds
            await self._host.halt(current.number, inside, seconds)
        self._current = None

    async def _recall(self) -> None:
        """What older sessions saw break, and how long their saves took. A journal that cannot be
        read costs that only."""
        try:
            records = await asyncio.to_thread(read, self._store)
        except HoldfastError as error:
            self._say(f"how often the run broke before is not known: {error}")
            return
        for record in records:
            self._seen.observe(record)
            self._notices.measured.observe(record)

    async def _act(self, verdict: Verdict) -> int | None:
        """The exit code, or None to open the next generation."""
        if isinstance(verdict, Left) and verdict.unsaved is None:
            verdict = Left(verdict.step, await self._notices.not_kept(verdict.step))
        missing = None
        if isinstance(verdict, Finished | Left):
            if verdict.unsaved is None:
                missing = await self._in_bucket(verdict)
            await self._mover.drain(self._number)
        if isinstance(verdict, Lost) and self._stop is None:
            return self._restart_or_give_up(verdict)
        match verdict:
            case Finished(step, str(unsaved)) | Left(step, str(unsaved)):
                why = f"the state after step {step} could not be saved: {unsaved}"
                self._standing.stopped(self._committed, why)
                return 1
            case Finished(step) if missing is not None:
                self._standing.stopped(step, missing)
                return 1
            case Finished(step):
                self._standing.finished(step)
                return 0
            case Left(step):
                why = self._stop or "the workers left"
                self._standing.stopped(step, why if missing is None else f"{why}; {missing}")
                return 0
            case Failed(sentence, code):
                self._fail(sentence, journal=code != exits.FENCED)
                if code == exits.USER:
                    raise UserError(sentence)
                self._say(sentence)
                return 1
            case Lost(_, cause):
                self._standing.stopped(self._committed, f"{self._stop}; lost while saving: {cause}")
                return 1

    async def _in_bucket(self, verdict: Finished | Left) -> str | None:
        """What the bucket lacks at the end. Whoever leaves writes that down first: it may be killed
        while it waits."""

        async def written() -> None:
            self._standing.write_stopped(verdict.step, self._stop or "the workers left")
            await self._board.flush(sync=True)

        before = written if isinstance(verdict, Left) else None
        return await self._last_upload.arrived(self._number, before, self._notices.seconds_left)

    def _restart_or_give_up(self, verdict: Lost) -> int | None:
        self._standing.become(RunState.RECOVERING)
        newest = self._newest
        if verdict.rotten is not None and newest is not None and newest.key is not None:
            self._say(f"{newest.key} is not whole ({verdict.rotten}); the next older one is tried")
            self._tried[newest.key] = verdict.rotten
            return None  # each goes once: this ends
        reached = max(self._committed, newest.step if newest is not None else 0)
        self._restarts = self._restarts.after_loss(reached)
        limit = self._config.cluster.max_restarts_without_progress
        sentence = give_up(self._restarts, limit, verdict.cause)
        if sentence is None:
            return None
        self._fail(sentence)
        self._say(sentence)
        return 1

    def _fail(self, sentence: str, journal: bool = True) -> None:
        """`journal` is False once another trainer has taken over: the journal is its own then."""
        self._standing.failed(sentence, self._committed, journal and self._number > 0)

    @property
    def _step(self) -> int:
        return self._committed if self._current is None else self._current.step

    # --- a generation ---------------------------------------------------------------------
    async def _open(self, reason: str, resumed: bool | None) -> Generation:
        """Open the next generation and fork its workers; `resumed` is None but for the first."""
        if self._standing.state is RunState.RECOVERING:
            self._standing.become(RunState.OPENING)
        if self._behind is not None:
            self._behind.cancel()
        await self._host.prepare(self._config.layout.workers)
        await self._mover.settle(self._number)  # the next generation fences what is being saved
        # In this order: whoever takes over in between opens this number, and ours comes too late.
        number = max(await asyncio.to_thread(newest_generation, self._store), self._above) + 1
        await asyncio.to_thread(self._term.check)
        topology = plan_topology(self._config, number, self._node)
        value = {"topology": topology.to_json(), "term": self._term.number, "reason": reason}
        await asyncio.to_thread(open_generation, self._store, number, value)
        await self._board.flush()
        self._board.begin(number)
        self._number = number  # from here on, requests of older generations are refused
        self._rendezvous.begin(number)
        if resumed is not None:
            self._board.emit("agent", RunStarted(
                self._config.name, self._config_hash, self._dataset_version, resumed))  # fmt: skip
        plan = self._survivors.plan(topology, self._host.holding())
        self._stand_in.owing = plan.live is not None
        newest = self._newest = await self._begin_from(topology, plan)
        came_from = None if plan.came_from is None else list(plan.came_from)
        rung = -1 if resumed is not None else plan.rung(in_memory=not newest.durable)
        self._board.emit("agent", GenerationStarted(
            topology.to_json(), reason, newest.key, rung, came_from, step=newest.step,
        ))  # fmt: skip
        self._survivors.opened(topology)
        await self._board.flush()
        return await self._populate(topology, newest, plan)

    async def _begin_from(self, topology: Topology, plan: Aftermath) -> Newest:
        """The mover begins the generation too. Where the workers go on with what they hold, that
        is what it begins from; else the newest that memory or the run store has."""
        if plan.live is not None:
            await self._mover.go_on(topology, plan.live.step)
            return Newest(None, plan.live.step, topology.generation, {}, (), durable=False)
        if plan.stay:
            self._say(f"the state has to be restored: {plan.why}")
        newest = await self._mover.begin(topology, self._tried)
        if newest.durable:
            self._committed = newest.step
        if newest.key is not None:
            self._board.emit("agent", RestorePointFound(
                newest.key, newest.durable, newest.seconds, step=newest.step))  # fmt: skip
        return newest

    async def _populate(self, topology: Topology, newest: Newest, plan: Aftermath) -> Generation:
        """Give an opened generation its workers, unless no step is left to do."""
        step = newest.step
        current = self._current = Generation(
            topology, step, self._config.cluster, self._board, self._say, self._ready,
            self._voices, again=self._told.again, watch=self._still,
        )  # fmt: skip
        for notice in self._pending.take(self._loop.time()):
            self._notices.heard(notice, topology, step)
        if step >= self._config.train.steps and plan.live is None:  # else they have to save it
            current.decide(await self._nothing_to_do(topology.generation, newest))
            return current
        told = boots(
            self._config, topology, folder=self._folder, agent=self._term.address,
            mover_socket=self._mover.socket_path, cores=usable_cores(),
            restore_key=newest.key, start_step=step,
            seen=self._seen,
        )  # fmt: skip
        self._spare = told[0]
        stay = plan.seats.processes
        current.expect({rank: pid for rank, pid in enumerate(stay) if pid is not None})
        # Either may have died while the restore point was looked for.
        if not self._mover.alive:
            current.decide(Lost("mover_lost", "the mover ended"))
        elif not self._live and not self._host.can_fork:
            current.decide(Lost("template_lost", "the template ended"))
        else:
            await self._host.begin(Start(
                topology.generation, tuple(told), stay, plan.came_from, plan.told_before()
            ))  # fmt: skip
        return current

    async def _nothing_to_do(self, generation: int, newest: Newest) -> Verdict:
        """The last step has been done. No worker will read its checkpoint, so its mover does: a
        run is not finished with a state that nobody can have back."""
        unsaved = None if newest.durable else await self._mover.made_durable(newest)
        problem = None
        if unsaved is None and newest.key is not None:
            problem = await self._mover.damage(generation, newest.key)
        return Finished(newest.step, unsaved) if problem is None else Lost("rot", problem, problem)

    def _decide(self, verdict: Verdict) -> None:
        if self._current is not None:
            self._current.decide(verdict)

    # --- news -----------------------------------------------------------------------------
    def joined(self, generation: int, rank: int, process: int) -> None:
        if self._current is not None and self._current.number == generation:
            self._current.joined(rank, process)

    def exited(
        self, generation: int, rank: int, process: int, code: int, log: Path, doom: str
    ) -> None:
        if self._current is not None and self._current.number == generation:
            self._current.exited(rank, process, code, log, doom)

    def held(self, generation: int, rank: int, held: Held) -> None:
        if self._current is not None and self._current.number == generation:
            self._current.held(rank, held)

    def _ready(self) -> None:
        if self._standing.state is RunState.OPENING:
            self._standing.become(RunState.TRAINING)
        self._behind = asyncio.create_task(self._behind_the_training())

    async def _behind_the_training(self) -> None:
        """What a generation that has begun still needs, and does not wait for."""
        await self._stand_in.make()
        if count := standbys(self._config):
            await self._host.standby(count, self._spare)

    def _template_gone(self) -> None:
        if self._live:
            self._say("the template ended; a new one is started behind the training")
            return
        self._say("the template ended; its workers are given up and a new one is started")
        self._decide(Lost("template_lost", "the template ended"))

    def _mover_gone(self) -> None:
        self._say("the mover ended, and its arenas with it; a new one is started")
        self._decide(Lost("mover_lost", "the mover ended"))

    def _take_from_mover(self, event: Event) -> None:
        if isinstance(event, CheckpointCommitted):
            self._committed = max(self._committed, event.step)
        self._board.emit("mover", event)

    # --- requests -------------------------------------------------------------------------
    async def _report(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        current = self._current
        if current is None or current.number != number:
            raise FencedError(f"generation {number} is over")
        events, sync = current.report(body), bool(body["sync"])
        stored = True
        if events or sync:
            stored = await self._board.flush(f"rank{int(body['rank'])}", sync)
            stored = stored and not (sync and self._stand_in.owing)
        current.answered(int(body["rank"]))
        told = self._notices.answer(int(body["rank"]))
        return {"stop": self._stop is not None, "generation": number, "stored": stored} | told

    async def _notice(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        """Some nodes are about to go. Raises ValueError for what cannot be."""
        notice = Notice.from_json(body)
        if self._current is None:
            self._pending.hold(notice, self._loop.time())
            return {"tiers": [], "reason": "kept for the generation that begins next"}
        plan = self._notices.heard(notice, self._current.topology, self._step)
        if notice.leave:
            self._leave(notice.source)
        return {"tiers": list(plan.tiers), "reason": plan.reason}

    async def _who(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        return {"term": self._term.number, "pid": os.getpid(), "node": self._node}

    def _health(self) -> dict[str, Any]:
        return {
            "state": str(self._standing.state),
            "term": self._term.number,
            "generation": self._number,
            "step": self._step,
            "committed": self._committed,
            "workers": len(self._current.members.alive) if self._current is not None else 0,
        }

    # --- signals --------------------------------------------------------------------------
    def _catch_signals(self, run: asyncio.Task[int]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Only a process's main thread may; elsewhere whoever started us has them.
            with suppress(ValueError, RuntimeError):
                self._loop.add_signal_handler(number, self._signalled, number.name, run)

    def _leave(self, why: str) -> None:
        if self._stop is not None:
            return
        self._stop = why
        self._say(f"{why}: saving and leaving at the next step (Ctrl-C again: at once)")
        if self._number:
            self._board.emit("agent", StopRequested(why, step=self._step))
        if self._standing.state in (RunState.OPENING, RunState.TRAINING):
            self._standing.become(RunState.LEAVING)

    def _warned(self, warned: Warned) -> None:
        """The cloud says when this machine is gone: save into what survives it, and leave where it
        will not come back."""
        if self._stop is not None:
            return
        notice = Notice(warned.seconds, leave=warned.leave, source=warned.source)
        if self._current is not None:
            self._notices.heard(notice, self._current.topology, self._step)
        else:
            self._pending.hold(notice, self._loop.time())
        if warned.leave:
            self._leave(warned.source)

    def _write_down(self, event: Event) -> None:
        if self._number:
            self._board.emit("agent", event)

    def _signalled(self, name: str, run: asyncio.Task[int]) -> None:
        if self._last_upload.missing and not self._leave_now:  # nothing else is waited for
            self._leave_now = True
            self._standing.stopped(self._committed, f"{name}; {self._last_upload.missing}")
            run.cancel()
        elif self._stop is None:
            grace = self._config.cluster.grace_seconds
            if name == "SIGTERM" and self._watch.signalled(signal.SIGTERM):
                return  # its source says how much is left
            if name == "SIGTERM" and grace:
                self._warned(Warned(grace, True, name, name))
            else:
                self._leave(name)
        elif name == "SIGINT":
            self._leave_now = True
            run.cancel()
