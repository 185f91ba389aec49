"""The agent of one node of a run on several: it joins with the run store and the secret alone.

control (HTTP)   from its workers: /report, /orders; from other agents: /join, /beat, /term;
                 from the generation's workers on all nodes, where it leads: /store
health (HTTP)    /healthz, /metrics
follower         whose orders it follows, and whether it leads (`following.py`)
station          what the orders mean for this node's processes (`station.py`)
lead             where it leads: what each generation is (`leading.py`)
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restore import listing, step_of
from holdfast.config.run import RunConfig
from holdfast.elastic import exits, health
from holdfast.elastic.board import Board, Observer, Say
from holdfast.elastic.boot import DEFAULT_ENTRY
from holdfast.elastic.clouds import Warned, source_of
from holdfast.elastic.coordinator import Coordinator, Known
from holdfast.elastic.following import Follower
from holdfast.elastic.host import Host
from holdfast.elastic.leading import Lead, Leading
from holdfast.elastic.mover_link import MoverLink
from holdfast.elastic.notice_watch import NoticeWatch
from holdfast.elastic.opening import mover_settings
from holdfast.elastic.reigning import reign_over
from holdfast.elastic.rendezvous import Rendezvous
from holdfast.elastic.standing_in import Told
from holdfast.elastic.station import Station, Surroundings
from holdfast.elastic.verdict import Failed, Verdict
from holdfast.elastic.watching import counting_refusals, watch_progress
from holdfast.errors import FencedError, HoldfastError, UserError
from holdfast.events import (
    Event,
    NoticeReceived,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
)
from holdfast.plan.interface import Planner
from holdfast.policy.hazard import Hazard
from holdfast.policy.membership import Phase, Reign, Rules
from holdfast.policy.restart import Restarts, give_up
from holdfast.policy.seen import Seen
from holdfast.policy.succession import Patience
from holdfast.policy.survivors import Held
from holdfast.wire import lifeline
from holdfast.wire.auth import Verifier
from holdfast.wire.journal import Follower as JournalFollower
from holdfast.wire.runstore import RunStore
from holdfast.wire.secret import Secret
from holdfast.wire.server import Guard, Listener, address_of, bind
from holdfast.wire.term import Term, newest_generation, object_of

MISSED_BEATS = 3
TERM_SECONDS = 2.0
LEAVE_SECONDS = 20.0
"""Within which a node that was told to go is done without."""


@dataclass(frozen=True)
class Joining:
    """What an agent joins with. folder: the run folder that `store` stands for."""

    config: RunConfig
    store: RunStore
    secret: Secret
    folder: Path
    node: str
    config_hash: str
    dataset_version: str
    entry: str = DEFAULT_ENTRY


class NodeAgent:
    """One node's agent, from joining to exit code."""

    def __init__(
        self, joining: Joining, control: socket.socket, planner: Planner, *,
        observers: Sequence[Observer] = (), render_metrics: Callable[[], bytes] = lambda: b"",
        say: Say = print,
    ) -> None:  # fmt: skip
        self._it, self._control, self._planner = joining, control, planner
        self._render_metrics, self._say = render_metrics, say
        self._seen = Seen(Hazard.prior(joining.config.checkpoint.node_mtbf_hours * 3600))
        self._board = Board(joining.store, [self._seen.observe, *observers], say, joining.node)
        self._source = source_of(joining.config.cluster)
        self._opened = 0  # the newest generation that is known here
        self._session = False  # whether this session's beginning is in the journal
        self._stop: str | None = None
        self._outcome: Verdict | None = None
        self._restarts = Restarts()
        self._journal, self._told = JournalFollower(joining.store), Told(joining.config)
        self._lead: Lead | None = None
        self._term: Term | None = None

    def run(self) -> int:
        """Until the run is over, or this node leaves it. The exit code."""
        return asyncio.run(self._main())

    async def _main(self) -> int:
        it, cluster = self._it, self._it.config.cluster
        self._loop = asyncio.get_running_loop()
        self._rendezvous = Rendezvous()
        self._refusals = counting_refusals(self._board, lambda: self._opened > 0, self._say)
        metrics = bind(cluster.interface, cluster.metrics_port, "cluster.metrics_port")
        self._line, line_end = lifeline.pipe()
        settings = mover_settings(it.config, it.config_hash, it.dataset_version)
        self._mover = MoverLink(it.config, it.folder, it.secret, settings, self._of_mover, it.node)
        self._host = Host(
            self._mover, it.folder, it.secret, it.entry, self._line, self,
            mover_gone=self._mover_gone, template_gone=lambda: None,
        )  # fmt: skip
        address = address_of(self._control)
        around = Surroundings(it.config, it.node, it.folder, it.secret, address, self._seen)
        self._station = Station(
            around, self._host, self._mover, self._board, self._say, self._open, self._ended
        )
        try:
            places = cluster.places or it.config.layout.workers
            await self._host.prepare(places)  # the mover's address is told to the others
            self._follower = self._following(address)
            return await self._serve(metrics)
        finally:
            await self._host.end()
            await asyncio.to_thread(self._refusals.close)
            await self._board.flush(sync=True)
            os.close(line_end)
            os.close(self._line)

    def _following(self, address: str) -> Follower:
        it, cluster = self._it, self._it.config.cluster
        peer = self._mover.peer
        told = {"address": address, "peer": None if peer is None else peer.to_json()}
        silence = MISSED_BEATS * cluster.beat_seconds
        return Follower(
            it.node, address, it.store, it.secret, self._station, self._reign,
            places=cluster.places or it.config.layout.workers, told=told,
            patience=Patience(silence, cluster.beat_seconds / 2, cluster.alone_seconds),
            beat=cluster.beat_seconds, complain=self._say,
        )  # fmt: skip

    async def _serve(self, metrics: socket.socket) -> int:
        handlers = {
            "/report": self._report, "/orders": self._host.orders,
            "/store": self._rendezvous.handle, **self._follower.handlers,
        }  # fmt: skip
        guard = Guard(
            handlers, self._it.secret, Verifier(self._it.secret, time.time), lambda: self._opened,
            outside=frozenset({"/orders", *self._follower.handlers}), refusals=self._refusals,
        )  # fmt: skip
        listeners = [
            Listener(guard.application, self._control),
            Listener(
                health.application(self._health, self._render_metrics, self._refusals), metrics
            ),
        ]
        served = [asyncio.create_task(listener.serve()) for listener in listeners]
        beat = self._it.config.cluster.heartbeat_seconds
        watches = [
            asyncio.create_task(
                watch_progress(beat, lambda: self._station.current, self._board.flush)
            ),
            asyncio.create_task(self._watch_term()),
        ]
        following = asyncio.create_task(self._follower.run())
        every = self._it.config.cluster.notices_every_seconds
        self._watch = NoticeWatch(self._source, every, self._warned, self._say, self._write_down)
        self._catch_signals()
        try:
            await asyncio.wait({following, *served, *watches}, return_when=asyncio.FIRST_COMPLETED)
            others: list[asyncio.Task[Any]] = [*served, *watches]
            for task in others:
                if task.done() and not following.done():
                    task.result()
            return self._code(await following)
        finally:
            following.cancel()
            if self._stop is not None:
                await self._watch.acknowledge()
            self._watch.close()
            for task in watches:
                task.cancel()
            for listener in listeners:
                listener.close()
            await asyncio.wait(served, timeout=5.0)

    def _code(self, verdict: str) -> int:
        """The exit code; the coordinator's agent has written the end into the journal."""
        if verdict:
            self._say(verdict)
            return 1
        unsaved = getattr(self._outcome, "unsaved", None)
        if unsaved is not None:
            self._say(f"the last state could not be saved: {unsaved}")
            return 1
        if self._stop is not None:
            self._say(f"{self._it.node} has left the run ({self._stop})")
        return 0

    # --- leading --------------------------------------------------------------------------------
    async def _reign(self, term: Term) -> Coordinator:
        it, cluster = self._it, self._it.config.cluster
        self._term = term
        await self._host.prepare(0)  # the mover that chooses what is begun from
        lead = self._lead = Lead(
            Leading(it.config, self._planner, self._mover, address_of(self._control),
                    lambda event: self._board.emit("agent", event), self._made, self._durable)
        )  # fmt: skip
        newest = await asyncio.to_thread(newest_generation, it.store)
        if newest:
            with suppress(HoldfastError):
                lead.found(await asyncio.to_thread(object_of, it.store, newest))

        def fits(nodes: Any) -> tuple[str, ...]:
            return lead.fits(nodes) if len(nodes) >= cluster.min_nodes else ()

        rules = Rules(
            fits, MISSED_BEATS * cluster.beat_seconds, cluster.gather_seconds,
            cluster.settle_seconds, full=lead.full, more=lead.more,
        )  # fmt: skip
        self._say(f"{it.node} coordinates the run (term {term.number})")
        return await reign_over(
            term, it.store, rules, self._plan, lead.begin, changed=self._changed,
            complain=self._say,
        )  # fmt: skip

    def _durable(self) -> int:
        keys = listing(self._it.store)
        return step_of(keys[0]) if keys else 0

    async def _plan(
        self, reign: Reign, generation: int, names: frozenset[str], known: Mapping[str, Known]
    ) -> dict[str, Any]:
        assert self._lead is not None
        for one in known.values():
            if sentence := one.held.get("failed"):
                if self._follower.coordinator is not None:
                    self._follower.coordinator.done(str(sentence))
                raise FencedError("the run has failed")
        rotten = self._lead.rotten(known)
        value = await self._lead.plan(reign, generation, names, known)
        if rotten is not None:
            self._say(f"{rotten}; the next older one is tried")  # each goes once: this ends
        elif reign.reason in ("worker_lost", "halted") and (sentence := self._hopeless(known)):
            if self._follower.coordinator is not None:
                self._follower.coordinator.done(sentence)
            raise FencedError("the run has failed")
        return value

    def _hopeless(self, known: Mapping[str, Known]) -> str | None:
        """Why it makes no sense to go on, as a sentence, after one more loss of a worker."""
        assert self._lead is not None
        self._restarts = self._restarts.after_loss(self._lead.reached)
        causes = [str(one.held["cause"]) for one in known.values() if one.held.get("cause")]
        limit = self._it.config.cluster.max_restarts_without_progress
        return give_up(self._restarts, limit, causes[0] if causes else "not known")

    def _changed(self, old: Reign, new: Reign) -> None:
        if self._lead is not None:
            self._lead.tell_lost(new)
        if new.phase is Phase.ENDED and self._opened:
            self._write_end(new.verdict)
        if new.phase is Phase.TRAINING and old.phase is not Phase.TRAINING:
            self._standing_in = asyncio.create_task(self._stand_in())

    async def _stand_in(self) -> None:
        """Every worker of the generation has told what it had to tell: what is missing then of the
        steps that it stands after was to be told by those who are gone."""
        await self._board.flush()
        try:
            for record in await asyncio.to_thread(self._journal.new):
                self._told.observe(record.event)
            missing = self._told.missing()
            for event in await asyncio.to_thread(self._told.made, missing) if missing else ():
                self._board.emit("agent", event)
        except HoldfastError as error:
            self._say(f"the ledger of a lost node could not be made again: {error}")
        self._told.settled()

    def _write_end(self, verdict: str) -> None:
        """How the run ended, by what the nodes said of it: this one may have had no part in it."""
        coordinator = self._follower.coordinator
        known = () if coordinator is None else coordinator.known.values()
        ends = [one.held for one in known if "kind" in one.held]
        unsaved = next((end["unsaved"] for end in ends if end["unsaved"] is not None), None)
        if verdict or not ends:
            self._board.emit("agent", RunFailed(verdict or "no node said how it ended",
                                                step=self._step))  # fmt: skip
            return
        step = int(ends[0]["step"])
        if ends[0]["kind"] == "finished" and unsaved is None:
            self._board.emit("agent", RunFinished(step=step))
            return
        self._board.emit("agent", RunStopped(
            unsaved or self._stop or "the workers left", step=step))  # fmt: skip

    def _made(self, generation: int) -> None:
        """The object of a generation was made by this agent."""
        self._open(generation)
        self._rendezvous.begin(generation)
        if not self._session:
            self._session = True
            it = self._it
            self._board.emit("agent", RunStarted(
                it.config.name, it.config_hash, it.dataset_version, generation > 1))  # fmt: skip

    async def _watch_term(self) -> None:
        while True:
            await asyncio.sleep(TERM_SECONDS)
            coordinator, term = self._follower.coordinator, self._term
            if coordinator is None or term is None:
                continue
            try:
                await asyncio.to_thread(term.check)
            except FencedError:
                coordinator.fence()
            except HoldfastError:
                continue  # the run store is out of reach: that stops no training

    # --- this node ------------------------------------------------------------------------------
    def _open(self, generation: int) -> None:
        """From here on, requests of older generations are refused."""
        if generation > self._opened:
            self._opened = generation
            self._board.begin(generation)

    def _ended(self, verdict: Verdict) -> None:
        self._outcome = verdict
        if isinstance(verdict, Failed) and verdict.exit_code != exits.FENCED:
            self._say(verdict.sentence)

    @property
    def _step(self) -> int:
        return 0 if self._station.current is None else self._station.current.step

    def _mover_gone(self) -> None:
        self._say("the mover ended; a new one is started behind the training")
        self._reviving = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        with suppress(HoldfastError):
            await self._mover.revive(self._line, self._mover_gone)

    def _of_mover(self, event: Event) -> None:
        if self._opened:
            self._board.emit("mover", event)

    # --- news of processes (`host.News`) --------------------------------------------------------
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
        events, sync = current.report(body), bool(body["sync"])
        stored = True
        if events or sync:
            stored = await self._board.flush(f"rank{int(body['rank'])}", sync)
        current.answered(int(body["rank"]))
        self._station.stored()
        stop = self._stop is not None and self._alone
        return {"stop": stop, "generation": number, "stored": stored,
                "pause": self._station.pausing}  # fmt: skip

    @property
    def _alone(self) -> bool:
        """Whether no other node takes part: then leaving stops the run."""
        return len(self._follower.agents) <= 1

    def _health(self) -> dict[str, Any]:
        current = self._station.current
        return {
            "state": str(self._station.stage), "term": self._follower.seat.term,
            "standing": str(self._follower.seat.standing), "generation": self._opened,
            "step": self._step,
            "workers": 0 if current is None else len(current.members.alive),
        }  # fmt: skip

    # --- leaving --------------------------------------------------------------------------------
    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError, RuntimeError):
                self._loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: signal.Signals) -> None:
        if number is signal.SIGTERM and self._stop is None and self._watch.signalled(number):
            return  # its source says how much is left
        self._leave(number.name)

    def _warned(self, warned: Warned) -> None:
        """The cloud says when this machine is gone."""
        if not self._stop:
            self._write_down(
                NoticeReceived(warned.seconds, [self._it.node], warned.leave, warned.source,
                               step=self._step)
            )  # fmt: skip
            if warned.leave:
                self._leave(warned.source, warned.seconds)

    def _write_down(self, event: Event) -> None:
        if self._opened:
            self._board.emit("agent", event)

    def _leave(self, why: str, seconds: float = 0.0) -> None:
        """Leave the run, which goes on without this node, within `seconds`."""
        if self._stop is not None:
            if why == "SIGINT":
                self._follower.leave()
            return
        self._stop = why
        if self._alone:
            self._say(f"{why}: saving and leaving at the next step (Ctrl-C again: at once)")
            return
        self._say(f"{why}: the others go on without {self._it.node}")
        grace = seconds or self._it.config.cluster.grace_seconds or LEAVE_SECONDS
        self._follower.leaving = grace
        self._station.changed.set()


def check_node_name(node: str) -> None:
    """Raises UserError for one that cannot stand in names of files and of events."""
    if not node or not all(c.isalnum() or c in "._-" for c in node):
        raise UserError(
            f"{node!r} cannot be a node's name", where="cluster.node",
            remedy="use letters, digits, dots, dashes and underscores",
        )  # fmt: skip
