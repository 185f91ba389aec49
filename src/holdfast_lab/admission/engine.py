"""The events of the admission study: submissions, ends, time-outs of groups, second attempts.

Between two events all rates are constant, so ledgers and ends are closed-form. Pure: the same
setup, policy and random numbers give the same outcome.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from holdfast.errors import DataError
from holdfast_lab.admission.board import Board, JobState, Moment, Observer, Phase
from holdfast_lab.admission.fabric import Fabric
from holdfast_lab.admission.jobs import Job, Rules, Team
from holdfast_lab.admission.policies import Admission
from holdfast_lab.admission.step_time import JitterProfile, StepModel
from holdfast_lab.engine.clock import Process, run_process


@dataclass(frozen=True)
class Setup:
    """What all policies of a comparison share. slow: factor of each slow node by its number."""

    fabric: Fabric
    teams: tuple[Team, ...]
    jobs: tuple[Job, ...]
    jitter: JitterProfile
    slow: dict[int, float] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True)
class Run:
    """One policy's way through all jobs."""

    policy: str
    setup: Setup
    states: tuple[JobState, ...]
    observer: Observer
    end_s: float


def admit_jobs(setup: Setup, policy: Admission, draw: Random) -> Run:
    """Admit all jobs and let them end. Raises DataError for a job that could never run."""
    return _Admissions(setup, policy, draw).run()


class _Admissions(Process[None]):
    def __init__(self, setup: Setup, policy: Admission, draw: Random) -> None:
        check_jobs(setup.jobs, setup.teams, setup.fabric)
        model = StepModel(setup.fabric, setup.jitter, setup.slow)
        states = [
            JobState(number, job, job.seconds / model.ideal_s(job), job.estimate_s)
            for number, job in enumerate(setup.jobs)
        ]
        teams = {team.name: team for team in setup.teams}
        self.setup, self._policy, self._draw = setup, policy, draw
        self.board = Board(setup.fabric, teams, states, setup.rules, model)
        self.observer = Observer(self.board)

    def run(self) -> Run:
        run_process(self)
        states = tuple(self.board.states)
        end = max((state.done_s for state in states), default=0.0)
        return Run(self._policy.name, self.setup, states, self.observer, end)

    def next_change(self, end: float) -> float:
        return self.board.events[0][0] if self.board.events else end

    def elapse(self, until: float) -> bool:
        if not self.board.events:
            return True
        self.observer.advance(until)
        self.board.now = self.now = until
        return False

    def act(self) -> None:
        """Handle all events of this instant, and let the policy decide once."""
        board, is_news = self.board, False
        while board.events and board.events[0][0] <= self.now:
            is_news |= _handle(board, heapq.heappop(board.events))
        if is_news:
            # Ask the policy; once more if an eviction has left unused devices.
            waiting = self.board.waiting
            before = sum(state.evictions for state in waiting.values())
            self._policy.admit(self.board, self._draw)
            if sum(state.evictions for state in waiting.values()) > before:
                self._policy.admit(self.board, self._draw)
            self.observer.look()


def _handle(board: Board, event: tuple[float, str, int, int]) -> bool:
    """Return False for an event that a later one has made void."""
    _, moment, number, epoch = event
    state = board.states[number]
    if moment == Moment.SUBMIT:
        board.submit(state)
        return True
    if moment == Moment.RETRY:
        return state.phase is Phase.WAITING
    if epoch != state.epoch:
        return False
    if moment == Moment.FINISH:
        board.finish(state)
    elif state.phase is Phase.GATHERING:
        board.give_up(state)
    else:
        return False
    return True


def check_jobs(jobs: Sequence[Job], teams: Sequence[Team], fabric: Fabric) -> None:
    """Raises DataError for the first job that no policy could ever start, or for no job at all."""
    if not jobs:
        raise DataError(
            "no job is submitted",
            where="admission",
            remedy="give a larger --load or more --days, or name the jobs with --jobs",
        )
    known = {team.name: team for team in teams}
    total = sum(team.quota for team in teams)
    for job in jobs:
        team = known.get(job.team)
        if team is None:
            raise DataError(
                f"job {job.name} is of team {job.team}, which has no quota",
                where="admission",
                remedy=f"give one with --team {job.team}=DEVICES",
            )
        slots = sum(node.devices // job.devices for node in fabric.nodes)
        if slots < job.pods:
            raise DataError(
                f"job {job.name} needs {job.pods} pods of {job.devices} devices, and the cluster "
                f"has room for {slots}",
                where="admission",
                remedy="give a larger --cluster, or leave the job out",
            )
        allowed = min(total, int(min(team.quota + team.borrow, total)))
        if job.size > allowed:
            raise DataError(
                f"job {job.name} needs {job.size} devices, and team {job.team} may use {allowed}",
                where="admission",
                remedy=f"give it more with --team {job.team}=DEVICES, or leave the job out",
            )
