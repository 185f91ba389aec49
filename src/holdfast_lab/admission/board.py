"""The state of a cluster with its queues, and the five things that an admission policy may do.

A policy starts a job, places one pod, evicts a job, changes an elastic one, or leaves all as it
is. The board keeps the account of each job up to the moment of a change. Pure: time is set by the
engine, and nothing here is random.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from holdfast_lab.admission.fabric import Fabric
from holdfast_lab.admission.jobs import Job, Rules, Team
from holdfast_lab.admission.step_time import PARTS, StepModel, StepTime

GROUP_WAIT, START, LOST = "group_wait", "start", "lost"
LABELS = (*PARTS, GROUP_WAIT, START, LOST)
"""group_wait: pods wait for the rest of their group. start: start-up and changes of an elastic
job. lost: training since the last checkpoint, which an eviction made worthless."""


@dataclass
class JobLedger:
    """seconds: device-seconds by label. The `unsaved` parts came after the last checkpoint."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LABELS, 0.0))
    unsaved_s: float = 0.0
    unsaved_steps: float = 0.0
    _unsaved: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))

    @property
    def held(self) -> float:
        return sum(self.seconds.values())

    @property
    def unsaved_device_s(self) -> float:
        return sum(self._unsaved)

    def train(self, seconds: float, step: StepTime, devices: int, save_s: float) -> float:
        """Count training; return the steps that were done."""
        scale = devices * seconds / step.seconds
        for label, part in zip(PARTS, step.parts, strict=True):
            self.seconds[label] += scale * part
        since = self.unsaved_s + seconds
        if since >= save_s:
            self.save()
            since %= save_s
            seconds = min(since, seconds)
        rest = devices * seconds / step.seconds
        self._unsaved = [a + rest * part for a, part in zip(self._unsaved, step.parts, strict=True)]
        self.unsaved_s = since
        self.unsaved_steps += seconds / step.seconds
        return scale / devices

    def save(self) -> None:
        """All training so far is safe."""
        self.unsaved_s, self.unsaved_steps = 0.0, 0.0
        self._unsaved = [0.0] * len(PARTS)

    def lose(self) -> float:
        """Count what came after the last checkpoint as lost; return its steps."""
        steps = self.unsaved_steps
        for label, part in zip(PARTS, self._unsaved, strict=True):
            self.seconds[label] -= part
            self.seconds[LOST] += part
        self.save()
        return steps


_LATE = 1.1
"""A job that outruns its estimate is expected to need a tenth of it more, again and again."""


class Phase(StrEnum):
    UNBORN = "unborn"  # not submitted
    WAITING = "waiting"  # no pod has a place
    GATHERING = "gathering"  # some pods have, and wait
    TRAINING = "training"
    DONE = "done"


class Moment(StrEnum):
    """Kinds of events, in the order in which those of one instant are handled."""

    FINISH = "a finish"
    TIMEOUT = "b timeout"
    SUBMIT = "c submit"
    RETRY = "d retry"


@dataclass
class JobState:
    """nodes: one entry for each placed pod. eligible_s: it may not start earlier. ready_s: the
    pause of a start or change ends. changed_s: up to here the ledger is kept. active_s: seconds of
    training. planned: expected seconds on all pods that are left, by its owner's estimate. epoch:
    older events are void."""

    number: int
    job: Job
    steps_left: float
    planned: float
    phase: Phase = Phase.UNBORN
    nodes: list[int] = field(default_factory=list)
    eligible_s: float = 0.0
    ready_s: float = 0.0
    changed_s: float = 0.0
    placed_s: float = 0.0
    started_s: float | None = None
    done_s: float = inf
    step: StepTime | None = None
    epoch: int = 0
    timeouts: int = 0
    evictions: int = 0
    resizes: int = 0
    active_s: float = 0.0
    ledger: JobLedger = field(default_factory=JobLedger)

    @property
    def held(self) -> int:
        return len(self.nodes) * self.job.devices

    @property
    def extra_pods(self) -> int:
        """Pods that an elastic job could give back now."""
        is_whole = self.phase is Phase.TRAINING
        return max(0, len(self.nodes) - self.job.least_pods) if is_whole else 0


@dataclass
class Board:
    """free: devices of each node. used: of each team."""

    fabric: Fabric
    teams: dict[str, Team]
    states: list[JobState]
    rules: Rules
    model: StepModel
    now: float = 0.0
    free: list[int] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)
    events: list[tuple[float, str, int, int]] = field(default_factory=list)
    waiting: dict[int, JobState] = field(default_factory=dict)
    active: dict[int, JobState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = [node.devices for node in self.fabric.nodes]
        self.used = dict.fromkeys(self.teams, 0)
        for state in self.states:
            self._push(state.job.submit_s, Moment.SUBMIT, state)

    # --- what a policy asks ---------------------------------------------------------------------
    def queue(self) -> list[JobState]:
        """Jobs that may start now: by priority, then by the time of submission."""
        return sorted(
            (state for state in self.waiting.values() if state.eligible_s <= self.now),
            key=lambda s: (-s.job.priority, s.job.submit_s, s.number),
        )

    def training(self) -> list[JobState]:
        return [state for state in self.active.values() if state.phase is Phase.TRAINING]

    def is_nominal(self, team: str, devices: int, used: dict[str, int] | None = None) -> bool:
        """Return True if a team stays within its quota with so many more devices."""
        return (used or self.used)[team] + devices <= self.teams[team].quota

    def may_use(self, team: str, devices: int, used: dict[str, int] | None = None) -> bool:
        """Return True if the quotas let a team use so many more: of its own, or idle ones."""
        if self.is_nominal(team, devices, used):
            return True
        held, quota = used or self.used, self.teams[team]
        is_idle = sum(held.values()) + devices <= sum(each.quota for each in self.teams.values())
        return is_idle and held[team] + devices <= quota.quota + quota.borrow

    def expected_end(self, state: JobState) -> float:
        """When a job is over if its owner's estimate is right, and its pods stay as they are."""
        spent = max(0.0, self.now - max(state.ready_s, state.changed_s))
        left = state.planned - spent * len(state.nodes) / state.job.pods
        if left <= 0:
            left = (_LATE - 1) * state.job.estimate_s
        return max(self.now, state.ready_s) + left * state.job.pods / max(1, len(state.nodes))

    # --- what a policy does ---------------------------------------------------------------------
    def start(self, state: JobState, nodes: Sequence[int]) -> None:
        """Give all pods their place at once."""
        state.placed_s = self.now
        self._take(state, nodes)
        self._train(state, self.rules.start_s)

    def place_pod(self, state: JobState, node: int) -> None:
        """Give one pod a place. The last one starts the job."""
        self._account(state)
        if state.phase is Phase.WAITING:
            state.phase = Phase.GATHERING
            state.placed_s = self.now
            self._push(self.now + self.rules.group_timeout_s, Moment.TIMEOUT, state)
        self._take(state, [node])
        if len(state.nodes) == state.job.pods:
            self._train(state, self.rules.start_s)

    def evict(self, state: JobState) -> None:
        """Take all devices away. The job goes back to its queue and keeps its place there."""
        if state.phase is Phase.TRAINING:
            state.evictions += 1
        self._withdraw(state)
        state.eligible_s = self.now

    def resize(self, state: JobState, nodes: Sequence[int]) -> None:
        """Let an elastic job continue on other pods; it loses no step."""
        self._account(state)
        state.resizes += 1
        self._release(state)
        self._take(state, nodes)
        self._train(state, self.rules.resize_s)

    # --- what the engine does -------------------------------------------------------------------
    def submit(self, state: JobState) -> None:
        state.phase = Phase.WAITING
        state.eligible_s = state.changed_s = self.now
        self.waiting[state.number] = state

    def give_up(self, state: JobState) -> None:
        """The group was not complete in time. The job tries again later, and later each time."""
        self._withdraw(state)
        pause = min(self.rules.max_backoff_s, self.rules.backoff_s * 2.0**state.timeouts)
        state.timeouts += 1
        state.eligible_s = self.now + pause
        self._push(state.eligible_s, Moment.RETRY, state)

    def finish(self, state: JobState) -> None:
        self._account(state)
        self._release(state)
        state.steps_left, state.phase, state.done_s = 0.0, Phase.DONE, self.now
        del self.active[state.number]

    def settle(self) -> None:
        """Bring all accounts up to now."""
        for state in self.active.values():
            if state.changed_s < self.now:
                self._account(state)

    # --- parts ----------------------------------------------------------------------------------
    def _push(self, at: float, moment: Moment, state: JobState) -> None:
        heapq.heappush(self.events, (at, moment.value, state.number, state.epoch))

    def _train(self, state: JobState, pause: float) -> None:
        state.phase = Phase.TRAINING
        state.epoch += 1
        state.step = self.model.step(state.job, state.nodes)
        if state.started_s is None:
            state.started_s = self.now
        # A change within a pause does not end the pause early.
        state.ready_s = max(self.now + pause, state.ready_s)
        self._push(state.ready_s + state.steps_left * state.step.seconds, Moment.FINISH, state)

    def _take(self, state: JobState, nodes: Iterable[int]) -> None:
        for node in nodes:
            self.free[node] -= state.job.devices
            if self.free[node] < 0:
                raise ValueError(f"node {node} has no room for a pod of {state.job.name}")
            state.nodes.append(node)
            self.used[state.job.team] += state.job.devices
        state.changed_s = self.now
        self.waiting.pop(state.number, None)
        self.active[state.number] = state

    def _release(self, state: JobState) -> None:
        for node in state.nodes:
            self.free[node] += state.job.devices
        self.used[state.job.team] -= state.held
        state.nodes = []

    def _withdraw(self, state: JobState) -> None:
        self._account(state)
        if state.phase is Phase.TRAINING and not self.rules.evicted_save:
            lost = state.ledger.lose()
            if state.step is not None:
                state.planned += lost * state.step.seconds * len(state.nodes) / state.job.pods
            state.steps_left += lost
        state.ledger.save()
        self._release(state)
        state.phase, state.step = Phase.WAITING, None
        state.epoch += 1
        state.ready_s = 0.0
        self.active.pop(state.number)
        self.waiting[state.number] = state

    def _account(self, state: JobState) -> None:
        since, state.changed_s = state.changed_s, self.now
        if state.phase is Phase.GATHERING:
            state.ledger.seconds[GROUP_WAIT] += state.held * (self.now - since)
        if state.phase is not Phase.TRAINING or state.step is None:
            return
        paused = max(0.0, min(self.now, state.ready_s) - since)
        state.ledger.seconds[START] += state.held * paused
        trained = self.now - since - paused
        if trained > 0:
            state.active_s += trained
            done = state.ledger.train(trained, state.step, state.held, self.rules.save_s)
            state.steps_left = max(0.0, state.steps_left - done)
            state.planned -= trained * len(state.nodes) / state.job.pods


# --- what is observed -----------------------------------------------------------------------------
@dataclass
class _Now:
    """Values that hold until the next event. entitled, served, team_used: devices by team."""

    used: int = 0
    free: int = 0
    fragments: float = 0.0
    stranded: int = 0
    deadlocked: int = 0
    entitled: dict[str, float] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    team_used: dict[str, int] = field(default_factory=dict)


@dataclass
class Observer:
    """Integrals in device-seconds. Those of devices and teams end with `horizon_s`.

    horizon_s: the last submission, the same for all policies; the end, if all jobs are submitted
    at once. used_s: devices held. free_s: devices free. fragment_s: of these, what a pod of these
    jobs cannot use, because its node has too few (Weng et al., ATC 2023, section 3). stranded_s:
    free devices that would suffice for a waiting job within its quotas. deadlock_s: held by groups
    that block each other. entitled_s, served_s: of each team the least of quota and demand, and
    what it had of it. team_used_s: devices that each team held, until the horizon.
    """

    board: Board
    horizon_s: float = 0.0
    used_s: float = 0.0
    free_s: float = 0.0
    fragment_s: float = 0.0
    stranded_s: float = 0.0
    deadlock_s: float = 0.0
    deadlocks: int = 0
    entitled_s: dict[str, float] = field(default_factory=dict)
    served_s: dict[str, float] = field(default_factory=dict)
    team_used_s: dict[str, float] = field(default_factory=dict)
    _now: _Now = field(default_factory=_Now)
    _pod_shares: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        jobs = [state.job for state in self.board.states]
        times = [job.submit_s for job in jobs]
        self.horizon_s = max(times) if len(set(times)) > 1 else inf
        self.entitled_s = dict.fromkeys(self.board.teams, 0.0)
        self.served_s = dict.fromkeys(self.board.teams, 0.0)
        self.team_used_s = dict.fromkeys(self.board.teams, 0.0)
        pods = sum(job.pods for job in jobs)
        for job in jobs:
            share = job.pods / pods
            self._pod_shares[job.devices] = self._pod_shares.get(job.devices, 0.0) + share

    def advance(self, at: float) -> None:
        """Count the time from the last event to this one."""
        now, seconds = self._now, at - self.board.now
        within = max(0.0, min(at, self.horizon_s) - self.board.now)
        self.used_s += now.used * within
        self.free_s += now.free * within
        self.fragment_s += now.fragments * within
        self.stranded_s += now.stranded * within
        self.deadlock_s += now.deadlocked * seconds
        for team in now.entitled:
            self.entitled_s[team] += now.entitled[team] * seconds
            self.served_s[team] += now.served[team] * seconds
            self.team_used_s[team] += now.team_used[team] * within

    def look(self) -> None:
        """Take what holds from now on."""
        board = self.board
        free = sum(board.free)
        was_deadlocked = self._now.deadlocked > 0
        demand = dict(board.used)
        for state in (*board.waiting.values(), *board.active.values()):
            demand[state.job.team] += (state.job.pods - len(state.nodes)) * state.job.devices
        entitled = {t: float(min(team.quota, demand[t])) for t, team in board.teams.items()}
        self._now = _Now(
            used=sum(board.used.values()),
            free=free,
            fragments=sum(
                share * sum(left for left in board.free if left < size)
                for size, share in self._pod_shares.items()
            ),
            stranded=free if self._is_stranded(free) else 0,
            deadlocked=deadlocked_devices(board),
            entitled=entitled,
            served={t: min(entitled[t], board.used[t]) for t in entitled},
            team_used=dict(board.used),
        )
        self.deadlocks += self._now.deadlocked > 0 and not was_deadlocked

    def _is_stranded(self, free: int) -> bool:
        return any(
            state.job.size <= free and self.board.may_use(state.job.team, state.job.size)
            for state in self.board.waiting.values()
        )


def deadlocked_devices(board: Board) -> int:
    """Devices of incomplete groups if none of them could be completed even after all jobs that
    train have ended. 0: some group can still be completed."""
    gathering = [each for each in board.active.values() if each.phase is Phase.GATHERING]
    if len(gathering) < 2:
        return 0
    free = [node.devices for node in board.fabric.nodes]
    for state in gathering:
        for node in state.nodes:
            free[node] -= state.job.devices
    for state in gathering:
        missing = state.job.pods - len(state.nodes)
        if sum(left // state.job.devices for left in free) >= missing:
            return 0
    return sum(state.held for state in gathering)
