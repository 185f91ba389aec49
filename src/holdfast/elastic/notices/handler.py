"""Handles a notice that a machine is about to end: chooses the save that will be complete in time.

A notice has a deadline in seconds, the nodes that end (none named: this one), and whether the run
must leave. There are three sources:

    - SIGTERM, if `cluster.grace_seconds` gives the time until the kill
    - the cloud's metadata service (`clouds.py`, `cluster.notices`)
    - the verb `/notice`, which `holdfast notice` sends, signed like every request

From the measured bandwidth of each tier `policy/saving/emergency.py` picks the tiers in which a
save will be complete in time:

    the run continues   rank 0 receives one request for a save into those tiers, after the next step
    a prediction        this node's part of the next snapshots goes to peers, or its workers move
                        to other nodes (`prediction.py`)
    the run leaves      a durable save, as always. If the disk would be too slow and a peer is not,
                        a snapshot for peers instead ("brief"), and the agent waits until they have
                        it

If no tier would be complete, the fastest is tried anyway: a bandwidth is a guess, too.

A durable save that a change of generation has cut off is requested again in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf

from holdfast.config.run import RunConfig
from holdfast.core.sharding.run_table import run_state_table
from holdfast.elastic.notices.prediction import DueResponse
from holdfast.elastic.protocol.notice_messages import Notice
from holdfast.elastic.protocol.worker_messages import SaveRequest, WorkerReply
from holdfast.events import (
    CheckpointCommitted,
    CheckpointFailed,
    EmergencyPlanned,
    Event,
    GenerationStarted,
    NoticeReceived,
    Record,
    SaveInterval,
    SnapshotKept,
)
from holdfast.layout import Topology
from holdfast.policy.prediction.response import ResponsePrices
from holdfast.policy.saving.emergency import (
    DEADLINE_MARGIN_SHARE,
    EmergencyPlan,
    SaveRoute,
    boxes_at_risk,
    plan_emergency,
)
from holdfast.policy.saving.tier_durations import TierMeasurements
from holdfast.policy.saving.tiers import (
    BUCKET,
    DISK,
    MEMORY,
    PEERS,
    PRIOR_SAVE_COST_S,
    TierSettings,
)
from holdfast.wire.waiting import wait_event

ASSUMED_BYTES_PER_SECOND = {PEERS: 100e6, DISK: 200e6, BUCKET: 50e6}
"""Bytes per second of a tier before the first measurement: a link of 1 Gbit/s, a slow disk."""
RECOVERY_S = 5.0
"""Seconds that the loss of a node is assumed to cost, without the work that is repeated."""
MOVE_S = 1.0
"""Seconds that a planned move is assumed to cost. Changes of layout took up to 0.7 s with 0.7 M
parameters on a CPU (`RUNG_S` in `plan/objective/recovery_costs.py`)."""
PREDICTION_SOURCE = "prediction"


class DeferredNotices:
    """Notices that came while no generation ran, kept for the next one.

    Pure: the caller gives the time, in seconds of any steady clock.
    """

    def __init__(self) -> None:
        self._notices: dict[tuple[str, tuple[str, ...], bool], tuple[float, Notice]] = {}

    def add(self, notice: Notice, now: float) -> None:
        """Keep a notice. Of two from one source about the same nodes the later counts."""
        self._notices[notice.source, notice.nodes, notice.must_leave] = (
            now + notice.seconds,
            notice,
        )

    def take_all(self, now: float) -> list[Notice]:
        """Return and forget all notices, with the seconds that are left.

        Notices that make the run leave come first, the soonest first. A mere warning is dropped
        when its time is over. A notice to leave stays valid, with at least a second left.
        """
        found = [
            replace(notice, seconds=max(1.0, end - now))
            for end, notice in self._notices.values()
            if notice.must_leave or end > now
        ]
        self._notices.clear()
        return sorted(found, key=lambda notice: (not notice.must_leave, notice.seconds))


class NoticeHandler:
    """The notices of a run, and the resulting requests to its workers. Lives in the agent's event
    loop."""

    def __init__(
        self, config: RunConfig, emit: Callable[[Event], object], say: Callable[[str], None]
    ) -> None:
        self.measurements = TierMeasurements()
        self._config, self._emit, self._say = config, emit, say
        self._folder_survives = config.checkpoint.folder_survives
        self._available_tiers = TierSettings.from_config(config.checkpoint).present
        self._request_number = 0
        self._requested_tiers: tuple[int, ...] = ()
        self._deadline: float | None = None
        self._is_peer_copy_enough = False
        self._danger_until = 0.0  # of this node, on the monotonic clock
        self._save_intervals_s: dict[int, float] = {}  # the run's own decisions, by tier
        self._peer_copy_step = -1  # the newest step of this generation that a peer has
        # the step of a durable save that a new generation cut off
        self._owed_save_step: int | None = None
        self._snapshot_kept = asyncio.Event()

    # --- what is done about it ------------------------------------------------------------------
    def handle_notice(self, notice: Notice, topology: Topology, step: int) -> EmergencyPlan:
        """Choose the tiers, record the choice and request the save. Raises ValueError for an
        unknown node."""
        nodes = notice.nodes or tuple(sorted(set(topology.nodes)))
        table = run_state_table(self._config)
        lost = boxes_at_risk(topology, table, nodes)
        plan = plan_emergency(notice.seconds, lost.bytes, self.save_routes(lost.bytes))
        self._emit(
            NoticeReceived(notice.seconds, list(nodes), notice.must_leave, notice.source, step=step)
        )
        self._emit(
            EmergencyPlanned(list(plan.tiers), notice.seconds, lost.bytes, plan.reason, step=step)
        )
        self._say(f"{', '.join(nodes)} will be gone in {notice.seconds:g} s: {plan.reason}")
        chosen = plan.tiers or self._quickest_tier(lost.bytes)
        if notice.must_leave:
            self._deadline = time.monotonic() + notice.seconds * (1 - DEADLINE_MARGIN_SHARE / 2)
            # A bucket that will have it gets it from a durable save, and keeps it for good.
            self._is_peer_copy_enough = PEERS in chosen and not {DISK, BUCKET} & set(chosen)
        else:
            self._request_number += 1
            # The bucket is fed from the run folder, wherever that is.
            fed = BUCKET in chosen and DISK not in chosen
            self._requested_tiers = (*chosen, DISK) if fed else tuple(chosen)
        return plan

    def handle_prediction(self, due: DueResponse, node: str, topology: Topology, step: int) -> None:
        """Save because this node may be lost soon. All ranks take a snapshot into their own memory,
        and only the ranks of this node send their parts to peers. Without peers, the run saves
        durably."""
        has_peers = self._has_peers(topology)
        self._request_number += 1
        self._requested_tiers = (MEMORY,) if has_peers else (DISK,)
        self._danger_until = time.monotonic() + due.left_s
        if not due.is_first:
            return
        lost = boxes_at_risk(topology, run_state_table(self._config), (node,))
        tiers = [PEERS] if has_peers else [DISK]
        self._emit(NoticeReceived(due.left_s, [node], False, PREDICTION_SOURCE, step=step))
        self._emit(EmergencyPlanned(tiers, due.left_s, lost.bytes, due.reason, step=step))
        self._say(f"{node} may be lost: {due.reason}")

    def _has_peers(self, topology: Topology) -> bool:
        """Return True if another machine keeps snapshots: one that is named, or another node."""
        return PEERS in self._available_tiers or len(set(topology.nodes)) > 1

    def response_prices(self, topology: Topology, has_replacement: bool = False) -> ResponsePrices:
        """What an early save costs and can gain, from what was measured. has_replacement: free
        places elsewhere can take this node's workers."""
        tier = PEERS if self._has_peers(topology) else DISK
        rules, step = self._config.checkpoint, self.measurements.usual_step_s
        every = self._save_intervals_s.get(tier, 0.0)
        if not every:
            fixed = rules.peer_every_steps if tier == PEERS else rules.by_steps
            every = step * fixed if isinstance(fixed, int) and fixed else rules.every_seconds
        move_s = MOVE_S + step if has_replacement else inf
        return ResponsePrices(PRIOR_SAVE_COST_S[tier], every or inf, RECOVERY_S, move_s)

    def save_routes(self, nbytes: int) -> tuple[SaveRoute, ...]:
        """Return the ways out of this machine, as measured.

        A save begins at the next step boundary, and the bucket is fed from the run store.
        """
        wait = self.measurements.usual_step_s
        speed = {
            tier: self.measurements.bytes_per_second(tier) or assumed
            for tier, assumed in ASSUMED_BYTES_PER_SECOND.items()
        }
        links = {
            PEERS: (wait, "network"),
            DISK: (wait, "disk"),
            BUCKET: (wait + nbytes / speed[DISK], "network"),
        }
        return tuple(
            SaveRoute(tier, speed[tier], seconds, tier != DISK or self._folder_survives, link)
            for tier, (seconds, link) in links.items()
            if tier in self._available_tiers
        )

    def _quickest_tier(self, nbytes: int) -> tuple[int, ...]:
        routes = self.save_routes(nbytes)
        surviving = [route for route in routes if route.survives_loss] or routes
        return (min(surviving, key=lambda route: route.seconds_for(nbytes)).tier,)

    # --- replies to the workers -----------------------------------------------------------------
    def add_requests(self, reply: WorkerReply, rank: int, first_rank: int = 0) -> WorkerReply:
        """Return a reply to a worker's report with this handler's requests.

        first_rank: the rank of this node that passes the requests on for all, with its vote.
        """
        save = SaveRequest(self._request_number, self._requested_tiers)
        return replace(
            reply,
            is_peer_copy_enough=self._is_peer_copy_enough,
            save=save if rank == first_rank else None,
            tier_durations=self.measurements.durations() if rank == 0 else None,
            is_in_danger=time.monotonic() < self._danger_until,
        )

    def begin_generation(self) -> None:
        """Begin a generation: peers' copies of older generations are not its state."""
        self._peer_copy_step = -1

    # --- leaving --------------------------------------------------------------------------------
    def time_left_s(self) -> float | None:
        """Return the seconds until this machine ends, minus a margin; None without a deadline."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def observe(self, record: Record) -> None:
        self.measurements.observe(record)
        if isinstance(record.event, GenerationStarted):
            self.begin_generation()
        elif isinstance(record.event, SnapshotKept):
            self._peer_copy_step = max(self._peer_copy_step, record.event.step)
            self._snapshot_kept.set()
        elif isinstance(record.event, SaveInterval):
            self._save_intervals_s[record.event.tier] = record.event.seconds
        elif isinstance(record.event, CheckpointFailed):
            if 0 < record.event.generation < record.generation:
                # Request a durable save in place of one that a new generation cut off:
                # its writer is fenced. Request it at once: if nodes come and go, the
                # next regular save may be cut off too.
                self._owed_save_step = record.event.step
                self._request_number += 1
                self._requested_tiers = tuple(dict.fromkeys((*self._requested_tiers, DISK)))
        elif isinstance(record.event, CheckpointCommitted):
            self._settle_owed_save(record.event.step)

    def _settle_owed_save(self, step: int) -> None:
        if self._owed_save_step is not None and step >= self._owed_save_step:
            self._owed_save_step, self._requested_tiers = None, ()

    async def wait_for_peer_copy(self, step: int) -> str | None:
        """Wait for a peer's copy of the state after `step`, if the run leaves with a snapshot for
        peers.

        Return why no peer has it when time is up; None otherwise.
        """
        if not self._is_peer_copy_enough or self._deadline is None:
            return None
        while self._peer_copy_step < step:
            self._snapshot_kept.clear()
            left = self._deadline - time.monotonic()
            if not await wait_event(self._snapshot_kept, max(0.0, left)):
                return "time was up before a peer had it"
        return None
