"""What is integrated over the time of a study: use, demand, fragments, deadlocks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from holdfast_lab.admission.board import Board, Phase


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
