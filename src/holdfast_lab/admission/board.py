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
