"""The agent of one node: starts and watches its other processes, and takes part in the run.

It needs only the run store and the secret to join. It holds no training state and imports no torch,
so it answers within milliseconds. One event loop runs everything:

    control (HTTP)   from its workers: /report, /orders; from other agents: /join, /beat, /term;
                     from workers of all nodes if it leads: /store; /notice
    health (HTTP)    /healthz, /metrics
    role loop        follows a coordinator or leads (`elastic/membership/role_loop.py`)
    node runner      starts and stops this node's workers (`elastic/node/node_runner.py`)
    run controller   if it leads, plans generations (`elastic/coordinator/run_controller.py`)
    shutdown         signals and notices (`elastic/agent/shutdown.py`)
    run folder       a lost run folder (`elastic/agent/run_folder_monitor.py`)

A run of one node works the same way without other nodes. Its term is opened before, so that a
second trainer is refused. The agent waits for no other node, and the run is over when its term is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.elastic.agent import health
from holdfast.elastic.agent.final_upload import LastUpload
from holdfast.elastic.agent.monitors import counting_refusals, watch_progress
from holdfast.elastic.agent.run_folder_monitor import GONE, WAITED, Losing, RunFolder
from holdfast.elastic.agent.shutdown import Leaving
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.ledger_repair import Told
from holdfast.elastic.coordinator.rendezvous import Rendezvous
from holdfast.elastic.coordinator.run_controller import MISSED_BEATS, Desk, Office
from holdfast.elastic.event_log import Board, Observer, Say, logged
from holdfast.elastic.membership.role_loop import Follower
from holdfast.elastic.node.launch_specs import mover_settings
from holdfast.elastic.node.mover_supervisor import MoverLink
from holdfast.elastic.node.node_runner import Station, Surroundings
from holdfast.elastic.node.process_manager import Host
from holdfast.elastic.node.worker_group import Generation
from holdfast.elastic.notices.clouds import source_of
from holdfast.elastic.notices.handler import NOTICE, Notices
from holdfast.elastic.notices.poller import NoticeWatch
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.generation_outcome import Failed, Finished, Left, Lost, Verdict
from holdfast.elastic.protocol.worker_spec import preloads
from holdfast.elastic.reviving import Reviving
from holdfast.elastic.run_context import Joining
from holdfast.elastic.run_result import End, EndedError, Over, end_of
from holdfast.errors import CannotGoOnError, FencedError, HoldfastError, UserError
from holdfast.events import CheckpointCommitted, Event, RunStopped
from holdfast.plan.interface import Planner
from holdfast.policy.membership.election import Patience
from holdfast.policy.recovery.survivors import Held
from holdfast.policy.saving.failure_history import Seen
from holdfast.policy.saving.failure_rate import Hazard
from holdfast.wire import lifeline, process_log
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.server import Guard, Listener
from holdfast.wire.http.sockets import address_of, bind
from holdfast.wire.journal import read
from holdfast.wire.term import Term, newest_generation

TERM_SECONDS = 2.0
"""Seconds between two reads of the newest term in the run store."""
CLEAN_SECONDS = 60.0
"""Seconds for the clean-up of an agent whose run folder was unavailable at the end. A disk that
does not answer may block a thread for ever."""
LEFT_AT_ONCE = 130
"""Exit code after a second Ctrl-C: 128 + SIGINT, as in a shell."""


class NodeAgent:
    """One node's agent, from joining to exit code."""

    def __init__(
        self, joining: Joining, control: socket.socket, planner: Planner, *,
        observers: Sequence[Observer] = (), render_metrics: Callable[[], bytes] = lambda: b"",
        say: Say = print,
    ) -> None:  # fmt: skip
        """control: the bound socket whose address other agents find in the run store. planner: lays
        a generation out over the nodes. say: prints one line for the user."""
        self._it, self._control, self._planner = joining, control, planner
        self._render_metrics, self._say = render_metrics, (say := logged(say))
        config, alone = joining.config, joining.alone is not None
        self._seen = Seen(Hazard.prior(config.checkpoint.node_mtbf_hours * 3600))
        self._notices = Notices(config, lambda event: self._board.emit("agent", event), say)
        self._told = Told(config, announced_behind=alone)
        learn: list[Observer] = [self._seen.observe, self._notices.observe]
        if alone:
            learn.append(lambda record: self._told.observe(record.event))
        self._board = Board(joining.store, [*learn, *observers], say, joining.suffix)
        self._source = source_of(config.cluster)
        self._live = config.cluster.recovery == "live"
        self._opened = 0  # the newest generation that is known here
        self._committed = 0
        self._now = False  # exit at once, wait for nothing
        self._exit = 1  # the exit code known so far
        self._complained = ""  # the last complaint
        self._late: threading.Timer | None = None

    def run(self) -> int:
        """Run until the run is over or this node leaves it; return the exit code: 0, 1 or 130.

        Raises CannotGoOnError, and UserError for causes that the user can fix. Such causes are an
        address that is in use, no trustworthy checkpoint, or a UserError of a worker.
        """
        it = self._it
        process_log.start("agent", it.folder / "logs" / f"agent{it.suffix and '.'}{it.suffix}.log")
        try:
            return asyncio.run(self._main())
        finally:
            process_log.stop()
            if self._late is not None:
                self._late.cancel()

    # --- the outer frame ------------------------------------------------------------------------
    async def _main(self) -> int:
        it, cluster = self._it, self._it.config.cluster
        self._loop = asyncio.get_running_loop()
        self._rendezvous = Rendezvous()
        self._refusals = counting_refusals(self._board, lambda: self._opened > 0, self._say)
        metrics = bind(cluster.interface, cluster.metrics_port, "cluster.metrics_port")
        self._line, line_end = lifeline.pipe()
        settings = mover_settings(it.config, it.config_hash, it.dataset_version)
        self._mover = MoverLink(
            it.config, it.folder, it.secret, settings, self._of_mover, it.suffix,
            lambda: self._losing.present(),
        )  # fmt: skip
        self._reviving = Reviving(
            lambda: self._mover.revive(self._line, self._mover_gone),
            lambda: self._mover.alive, self._say, self._mover_back,
        )  # fmt: skip
        self._host = Host(
            self._mover, it.folder, it.secret, it.entry, preloads(it.config), self._line, self,
            mover_gone=self._mover_gone, template_gone=self._template_gone,
            say=self._say,
        )  # fmt: skip
        self._upload = LastUpload(self._mover, it.config.checkpoint.bucket_wait_seconds, self._say)
        run_folder = RunFolder(it.folder, it.store)
        self._losing = Losing(
            run_folder, lambda: self._leaving.why or "", self._time_left, self._part_with,
            self._say, alone=it.alone is not None,
        )  # fmt: skip
        self._furnish()
        try:
            self._exit = await self._serve(metrics)
            return self._exit
        except HoldfastError as error:
            self._exit = error.exit_code
            if self._late is not None:  # the caller may never get to print it
                self._say(str(error))
            raise
        finally:
            run_folder.close()
            if self._now:
                os.close(line_end)  # ends every child
            await self._reviving.stop()
            await self._host.end()
            await asyncio.to_thread(self._refusals.close)
            await self._board.flush(sync=True)
            if not self._now:
                os.close(line_end)
            os.close(self._line)

    def _furnish(self) -> None:
        """Make the parts that decide; see the module's docstring."""
        it, cluster, address = self._it, self._it.config.cluster, address_of(self._control)
        alone = it.alone is not None
        around = Surroundings(
            it.config, it.node, it.folder, it.secret, address, self._seen, it.places
        )
        self._station = Station(
            around, self._host, self._mover, self._board, self._say, self._open, self._began,
            self._ended,
        )  # fmt: skip
        desk = Desk(
            address, lambda: self._host.prepare(0), self._made, opened=lambda: self._opened,
            why=lambda: self._leaving.stopping, committed=lambda: self._saved,
        )  # fmt: skip
        self._office = Office(
            it, desk, self._planner, self._mover, self._board, self._say, self._told
        )
        silence = MISSED_BEATS * cluster.beat_seconds
        self._follower = Follower(
            it.node, address, it.store, it.secret, self._station, self._reign,
            places=it.places, told={"address": address},
            patience=Patience(silence, cluster.beat_seconds / 2, cluster.alone_seconds),
            beat=cluster.beat_seconds, complain=self._complain, own=it.alone,
            check=self._losing.check,
        )  # fmt: skip
        self._leaving = Leaving(
            it.config, it.node, alone, board=self._board, say=self._say, station=self._station,
            follower=self._follower, office=self._office, notices=self._notices,
            upload=self._upload, at_once=self._at_once,
        )  # fmt: skip

    async def _serve(self, metrics: socket.socket) -> int:
        listeners = [
            Listener(self._guard(), self._control),
            Listener(health.Health(self._health, self._render_metrics, self._refusals), metrics),
        ]
        served = [asyncio.create_task(listener.serve()) for listener in listeners]
        beat = self._it.config.cluster.heartbeat_seconds
        watches = [
            asyncio.create_task(
                watch_progress(beat, lambda: self._station.current, self._board.flush)
            ),
            asyncio.create_task(self._watch_term()),
        ]
        self._part = asyncio.create_task(self._take_part())
        self._catch_signals()
        every = self._it.config.cluster.notices_every_seconds
        watch = NoticeWatch(self._source, every, self._leaving.warned, self._say, self._write_down)
        self._leaving.understood = watch.signalled
        try:
            # A watch or a listener ends only by a bug of ours, which must not go unseen.
            await asyncio.wait({self._part, *served, *watches}, return_when=asyncio.FIRST_COMPLETED)
            others: list[asyncio.Task[Any]] = [*served, *watches]
            for task in others:
                if task.done() and not self._part.done():
                    task.result()
            return await self._part
        except asyncio.CancelledError:
            if not self._now:
                raise
            return LEFT_AT_ONCE
        finally:
            self._part.cancel()
            if self._leaving.why is not None and not self._now:
                await watch.acknowledge()
            watch.close()
            self._office.close()
            for task in watches:
                task.cancel()
            for listener in listeners:
                listener.close()
            await asyncio.wait(served, timeout=5.0)

    def _guard(self) -> Guard:
        outside = {"/orders": self._host.orders, NOTICE: self._noticed,
                   **self._follower.handlers}  # fmt: skip
        return Guard(
            {"/report": self._report, "/store": self._rendezvous.handle, **outside},
            self._it.secret, Verifier(self._it.secret, time.time), lambda: self._opened,
            outside=frozenset(outside), refusals=self._refusals,
        )  # fmt: skip

    # --- taking part ----------------------------------------------------------------------------
    async def _take_part(self) -> int:
        try:
            if await asyncio.to_thread(newest_generation, self._it.store):
                await self._recall()
            await self._host.prepare(self._it.places)
        except UserError:
            raise
        except HoldfastError as error:  # of the mover or the template
            self._say(str(error))
            return 1
        self._mover_back()
        try:
            await self._follow()
        except EndedError as error:
            return self._tell(end_of(str(error), error.kind, (), "", self._saved))
        if self._follower.fault is not None:
            raise self._follower.fault
        return await self._code()

    async def _follow(self) -> None:
        """Take part in the run until this node has left it. Raises EndedError, also if the node
        cannot wait for its run folder any longer."""
        following = asyncio.create_task(self._follower.run())
        losing = asyncio.create_task(self._losing.end())
        try:
            await asyncio.wait({following, losing}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
                return
            raise losing.result()
        finally:
            if not self._losing.answers:
                self._late = threading.Timer(CLEAN_SECONDS, lambda: os._exit(self._exit))
                self._late.daemon = True
                self._late.start()
            for task in (following, losing):
                task.cancel()
            await asyncio.wait({following, losing})

    def _complain(self, sentence: str) -> None:
        if sentence not in (WAITED, self._complained):  # do not repeat it
            self._complained = sentence
            self._say(sentence)

    def _time_left(self) -> float:
        """Return the seconds until this node must have left; 0 if not known."""
        return self._notices.seconds_left() or self._follower.leaving

    def _part_with(self, seconds: float) -> None:
        """Leave the run; each other node checks its own run folder and may continue."""
        self._say(f"{GONE}: {self._it.node} leaves")
        self._follower.leaving = self._follower.leaving or seconds
        self._station.changed.set()

    async def _recall(self) -> None:
        """Learn the failures and save times of earlier sessions from the journal, if readable."""
        try:
            records = await asyncio.to_thread(read, self._it.store)
        except HoldfastError as error:
            self._say(f"the run's earlier failures cannot be read from the journal: {error}")
            return
        for record in records:
            self._seen.observe(record)
            self._notices.measured.observe(record)

    async def _code(self) -> int:
        """Return the exit code; the coordinator's agent has written the result to the journal."""
        end = await self._end()
        if end is None and self._losing.given_up:
            end = end_of(GONE, Over.FENCED, (), "", self._saved)
        if end is None:
            self._say(f"{self._it.node} has left the run ({self._leaving.why or 'as requested'})")
            return 0
        return self._tell(end)

    def _tell(self, end: End) -> int:
        self._office.last.say(end)
        if end.error is not None:
            raise end.error
        short = end.code == 0 and self._station.closing and not self._leaving.why
        return CannotGoOnError.exit_code if short else end.code

    async def _end(self) -> End | None:
        """Return the run's result; None if the run continues without this node."""
        over, coordinator = self._follower.over, self._follower.coordinator
        if over is None and self._it.alone is not None:
            try:
                await asyncio.to_thread(self._it.alone.check)
            except HoldfastError as error:
                return end_of(str(error), Over.FENCED, (), "", self._saved)
        if over is None:
            return None
        if coordinator is not None:
            return self._office.end(over[0])
        why = self._station.closing or self._leaving.why or "the workers left"
        done = self._station.held.done
        if not over[0] and done is None:  # this node had no part in the run
            return End(None, "", 0)
        return end_of(over[0], over[1], () if done is None else (done,), why, self._saved)

    # --- leading --------------------------------------------------------------------------------
    async def _reign(self, term: Term) -> Coordinator:
        return await self._office.reign(self._losing.kept(term))

    def _made(self, generation: int) -> None:
        """Open a generation whose object this agent has created."""
        self._open(generation)
        self._rendezvous.begin(generation)

    async def _watch_term(self) -> None:
        while True:
            await asyncio.sleep(TERM_SECONDS)
            coordinator, term = self._follower.coordinator, self._office.term
            if coordinator is None or term is None:
                continue
            try:
                await asyncio.to_thread(term.check)
            except FencedError as error:
                current = self._station.current
                if self._it.alone is not None and current is not None:
                    current.decide(
                        Failed(str(error), exit_codes.FENCED)
                    )  # no other part learns of it
                coordinator.fence()
            except HoldfastError:
                continue  # an unreachable run store does not stop the training

    @property
    def _saved(self) -> int:
        """The newest committed step that this agent knows of."""
        return max(self._committed, self._office.restored)

    # --- this node ------------------------------------------------------------------------------
    def _open(self, generation: int) -> None:
        """Refuse requests of generations older than this one from here on."""
        if generation > self._opened:
            self._opened = generation
            self._board.begin(generation)

    def _began(self, current: Generation) -> None:
        self._leaving.began(current)

    async def _ended(self, verdict: Verdict) -> Verdict:
        """Finish saves and uploads after this node's workers have ended, before it is reported."""
        if not isinstance(verdict, Finished | Left):
            return verdict
        generation = self._opened
        if isinstance(verdict, Left) and verdict.unsaved is None:
            verdict = replace(verdict, unsaved=await self._notices.not_kept(verdict.step))
        if verdict.unsaved is None:
            missing = await self._in_bucket(verdict, generation)
            verdict = replace(verdict, missing=missing)
        await self._mover.drain(generation)
        return verdict

    async def _in_bucket(self, verdict: Finished | Left, generation: int) -> str | None:
        """Wait for the bucket; return what it lacks at the end. An agent that leaves writes its
        stop into the journal first, because it may be killed while it waits."""

        async def written() -> None:
            why = self._leaving.stopping or self._station.closing or "the workers left"
            self._office.last.write(RunStopped(why, step=verdict.step))
            await self._board.flush(sync=True)

        leads = self._follower.coordinator is not None
        before = written if leads and isinstance(verdict, Left) else None
        return await self._upload.arrived(generation, before, self._notices.seconds_left)

    def _template_gone(self) -> None:
        if self._now:
            return
        if self._live:
            self._say("the template has exited; a new one is started while training continues")
            return
        self._say("the template has exited; its workers are killed and a new one is started")
        if self._station.current is not None:
            self._station.current.decide(Lost("template_lost", "the template ended"))

    def _mover_gone(self) -> None:
        if self._now:
            return
        if self._live:
            self._reviving.begin()
            return
        self._say("the mover has exited and its arenas are lost; a new one is started")
        if self._station.current is not None:
            self._station.current.decide(Lost("mover_lost", "the mover ended"))

    def _mover_back(self) -> None:
        peer = self._mover.peer  # the coordinator passes its address on
        self._follower.told["peer"] = None if peer is None else peer.to_json()

    def _of_mover(self, event: Event) -> None:
        if isinstance(event, CheckpointCommitted):
            self._committed = max(self._committed, event.step)
        if self._opened:
            self._board.emit("mover", event)

    def _write_down(self, event: Event) -> None:
        if self._opened:
            self._board.emit("agent", event)

    # --- events of processes (`process_manager`) ------------------------------------------------
    def joined(self, generation: int, rank: int, process: int) -> None:
        current = self._station.current
        if current is not None and current.number == generation:
            current.joined(rank, process)

    def exited(
        self, generation: int, rank: int, process: int, code: int, log: Path, doom: str
    ) -> None:
        current = self._station.current
        if current is not None and current.number == generation:
            current.exited(rank, process, code, log, doom)

    def held(self, generation: int, rank: int, held: Held) -> None:
        current = self._station.current
        if current is not None and current.number == generation:
            current.held(rank, held)
            self._station.held_one(rank, held)

    # --- requests -------------------------------------------------------------------------------
    async def _report(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        current = self._station.current
        if current is None or current.number != number:
            raise FencedError(f"generation {number} is over")
        rank = int(body["rank"])
        events, sync = current.report(body), bool(body["sync"])
        stored = True
        if events or sync:
            stored = await self._board.flush(f"rank{rank}", sync)
            stored = stored and not (sync and self._office.owing)
        current.answered(rank)
        self._station.stored()
        stop = bool(self._leaving.stopping or self._station.closing)
        told = self._notices.answer(rank, current.ranks[0])
        return {
            "stop": stop, "generation": number, "stored": stored, "pause": self._station.pausing,
            "parting": self._station.parting,
        } | told  # fmt: skip

    async def _noticed(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle `holdfast notice`; an unknown node name gets an answer, no protocol error."""
        coordinator, nodes = self._follower.coordinator, body.get("nodes")
        if coordinator is not None and isinstance(nodes, list):
            known = sorted(node.name for node in coordinator.reign.nodes)
            for name in nodes:
                if known and name not in known:
                    return {"refused": f"there is no node {name} in this run", "nodes": known}
        return await self._leaving.asked(number, body)

    def _health(self) -> dict[str, Any]:
        current = self._station.current
        return {
            "state": health.state(self._station.stage, bool(self._leaving.stopping)),
            "term": self._follower.seat.term,
            "standing": str(self._follower.seat.standing), "generation": self._opened,
            "step": self._saved if current is None else current.step,
            "committed": self._saved,
            "workers": 0 if current is None else len(current.members.alive),
        }  # fmt: skip

    # --- signals --------------------------------------------------------------------------------
    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Only a process's main thread may set handlers; otherwise our caller has its own.
            with suppress(ValueError, RuntimeError):
                self._loop.add_signal_handler(number, self._leaving.signalled, number)

    def _at_once(self, missing: str) -> None:
        """Exit without waiting for anything. missing: what is not saved then, "" for nothing."""
        if self._late is not None:  # the clean-up needs a disk that may not answer
            os._exit(LEFT_AT_ONCE)
        self._now = True
        self._office.close()
        if missing:
            event = RunStopped(missing, step=self._saved)
            self._office.last.write(event)
            self._office.last.say(End(event, f"stopped after step {event.step} ({missing})", 0))
        self._part.cancel()


def check_node_name(node: str) -> None:
    """Raises UserError if a name cannot be part of the names of files and events."""
    if not node or not all(c.isalnum() or c in "._-" for c in node):
        raise UserError(
            f"{node!r} cannot be a node's name", where="cluster.node",
            remedy="use letters, digits, dots, dashes and underscores",
        )  # fmt: skip
