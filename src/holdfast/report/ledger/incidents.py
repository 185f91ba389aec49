"""Incidents: what broke, what it cost, and when the run was itself again.

An incident opens when a worker is lost or stops, or when a session ends without a word. It closes
with the first step of a newer generation. Its length is the RTO: seconds from the moment at which
the agent noticed the loss to the first committed step after it. The repeated steps are its RPO.
Its parts:

    before    from the last step to the start of the generation that broke, where that one did no
              step: an earlier incident took that time
    detect    from then on, or from the last step, to the first word of it: at most so long was it
              not noticed
    agree     until the next generation was decided
    restore   until its last worker had its state
    step      until its first step was done
    replay    until a step was done that had not been done before; where none was lost, no part

A planned change of membership (a node came, or left in time) stalls training too, and is kept in
the same way. So is a session that resumes from an older state than the one before it reached.

Only rank 0 reports a step. That it was done may be known before, or without it: a worker that
stops reports the step of its state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast.events import (
    CheckpointRestored,
    GenerationStarted,
    NonFinite,
    Record,
    RestorePointFound,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    StepDone,
    WorkerHeld,
    WorkerLost,
    WorkerReady,
)

_ENDS = (RunStopped, RunFinished, RunFailed)
_PLANNED_REASONS = {
    "notice": "left in time",
    "node_joined": "joined",
    "worker_joined": "joined",
    "slow_worker": "",
}
_PAUSED_TEXT = "paused after step "  # a worker's reason if it has ended its step, as ordered
_RESUMED_KIND = "resumed"  # kind of an incident: a session continued from an older state

RECOVERY_RUNGS = {
    0: "the other workers continued",
    1: "the same processes continued",
    2: "a standby took the place",
    3: "a spare node took the place",
    4: "the workers that were left took another layout",
    5: "workers joined",
    6: "new processes, from the run store",
}
"""The recovery ladder, in a few words each."""


def describe_rung(rung: int) -> str:
    """Return how a loss was survived, the plain words first."""
    return f"{RECOVERY_RUNGS.get(rung, 'no recovery')} (rung {rung})"


@dataclass(frozen=True)
class WorkerLoss:
    """One worker that was lost."""

    rank: int
    cause: str  # "SIGKILL", "exit 1", "no progress for 30 s", ...
    noticed_by: str  # exit, progress, peer, heartbeat, ...
    node: str = ""  # where it sat

    @property
    def description(self) -> str:
        """The lost worker, for people."""
        if self.node and self.noticed_by == "heartbeat":
            return f"{self.node} lost"
        return f"rank {self.rank} of {self.node} lost" if self.node else f"rank {self.rank} lost"


@dataclass(frozen=True)
class Incident:
    """Times are seconds since the run's start on the agent's clock."""

    generation: int  # the one that broke
    kind: str  # worker_lost, session_lost, resumed, or the reason of the next generation
    began: float
    reached: int  # last step done before
    losses: tuple[WorkerLoss, ...] = ()
    note: str = ""
    restarted: float | None = None  # the next generation was decided
    ready: float | None = None  # its last worker had restored its state
    recovered: float | None = None  # its first step was done
    restart_step: int | None = None  # it began from the state after this step
    rung: int = -1  # of the recovery ladder that the next generation took; -1: none
    came: tuple[str, ...] = ()  # nodes that the next generation has and the broken one had not
    gone: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()  # nodes that were there, and got a worker more; once for each
    stood: float | None = None  # the last step before was done, or the session began
    since: float | None = None  # the same, or the start of the generation that broke, if later
    caught_up: float | None = None  # a step was done that had not been done before
    found: float = 0.0  # seconds to find and open that state
    state: CheckpointRestored | None = None  # how its slowest rank read it

    @property
    def seconds(self) -> float | None:
        """From the loss to the first new step; None while it lasts."""
        return None if self.recovered is None else self.recovered - self.began

    @property
    def steps_lost(self) -> int:
        """Steps that were done and had to be done again."""
        return 0 if self.restart_step is None else max(0, self.reached - self.restart_step)

    @property
    def is_planned(self) -> bool:
        """Nothing broke: a node came, or left in time. Workers pause for it before it is known
        which."""
        paused = self.kind == "held" and self.note.startswith(_PAUSED_TEXT)
        return not self.losses and (self.kind in _PLANNED_REASONS or paused)

    @property
    def stood_still_s(self) -> float | None:
        """From the last step before to the first one after."""
        if self.stood is None or self.recovered is None:
            return None
        return self.recovered - self.stood

    @property
    def phases(self) -> dict[str, float]:
        """Parts of the recovery; see the module."""
        out = {}
        if self.stood is not None and self.since is not None:
            if self.since > self.stood:
                out["before"] = self.since - self.stood
            out["detect"] = self.began - self.since
        marks = [("agree", self.restarted), ("restore", self.ready), ("step", self.recovered)]
        last = self.began
        for name, mark in marks:
            if mark is not None:
                out[name], last = mark - last, mark
        if self.steps_lost and self.caught_up is not None:
            out["replay"] = self.caught_up - last
        return out

    @property
    def source(self) -> str:
        """Sources of the state and the time it took, in one phrase; "" before it was read."""
        if self.state is None:
            return ""
        times = {"find": self.found, **self.state.phases}
        spent = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in times.items())
        return f"from {' and '.join(self.state.sources) or 'the run store'}: {spent}"

    @property
    def title(self) -> str:
        """One line for people."""
        if self.losses:
            first = self.losses[0]
            more = f" and {len(self.losses) - 1} more" if len(self.losses) > 1 else ""
            return f"{first.description}{more} ({first.cause})"
        if self.kind == "session_lost":
            return "the session ended without a word"
        if self.kind == "slow_worker" and self.is_planned:
            return "a slow worker gets another share of the work"
        if self.kind == "notice" and self.is_planned and self.restarted is not None:
            # If all nodes are to leave, one last generation saves what they hold.
            who = ", ".join(self.gone)
            return f"{who} {_PLANNED_REASONS[self.kind]}" if who else "all nodes were told to go"
        if self.is_planned and (who := ", ".join(self.came) or _describe_growth(self.grown)):
            return f"{who} {_PLANNED_REASONS[self.kind]}"
        if self.kind == _RESUMED_KIND:
            return f"resumed from the state after step {self.restart_step}"
        return self.note or self.kind.replace("_", " ")


def _describe_growth(nodes: Iterable[str]) -> str:
    """Return the workers that came, if no node did."""
    found = Counter(nodes)
    return ", ".join(
        f"a worker of {name}" if many == 1 else f"{many} workers of {name}"
        for name, many in sorted(found.items())
    )


class IncidentBook:
    """Feed it records in the order they happened, with the run's time; read `incidents`."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self._open: Incident | None = None
        self._cut: int | None = None  # the one whose generation broke, though perhaps after a step
        self._generation = 0
        self._step = 0
        self._step_at: float | None = None  # when the newest step was known to be done
        self._since: float | None = None  # the same, or when the newest generation was decided
        self._behind: int | None = None  # the incident, if any, whose steps are being done again
        self._nodes: tuple[str, ...] = ()  # of the newest generation, by rank
        self._in_session = False
        self._is_run_over = False  # the session has ended, and no other one has begun
        self._fresh = False  # a session has begun, and no generation in it
        self._last_elapsed = 0.0
        self._note = ""

    @property
    def current(self) -> Incident | None:
        """The incident that is not over, if there is one."""
        return self._open

    def observe(self, record: Record, elapsed: float) -> Incident | None:
        """Returns the incident that this record ended, if it did."""
        event = record.event
        ended: Incident | None = None
        if isinstance(event, WorkerLost):
            self._record_loss(record.generation, event, elapsed)
        elif isinstance(event, WorkerHeld):
            ended = self._record_stop(record.generation, event, elapsed)
        elif isinstance(event, NonFinite):
            self._note = f"{event.parameter} not finite on rank {event.rank}, step {event.step}"
        elif isinstance(event, RunStarted):
            if self._in_session:  # its agent was killed, or its machine went away
                self._break_off()
                self._begin("session_lost", self._generation, self._last_elapsed)
            self._in_session = True
            self._open_session(elapsed)
        elif isinstance(event, _ENDS):
            self._in_session, self._is_run_over = False, True
            self._open = self._cut = None  # what the run did not get over, it ended with
        elif isinstance(event, GenerationStarted):
            ended = self._restart(record.generation, event, elapsed)
        elif isinstance(event, RestorePointFound):
            self._update(found=event.seconds)
        elif isinstance(event, CheckpointRestored):
            slowest = self._open.state if self._open is not None else None
            if slowest is None or event.seconds > slowest.seconds:
                self._update(state=event)
        elif isinstance(event, WorkerReady):
            self._update(ready=elapsed)
        elif isinstance(event, StepDone):
            ended = self._take_step(record.generation, event.step, elapsed)
        self._last_elapsed = elapsed
        return ended

    # --- a session ------------------------------------------------------------------------------

    def _open_session(self, elapsed: float) -> None:
        self._is_run_over, self._fresh = False, True
        self._step_at = self._since = elapsed  # a pause between two sessions is no incident's

    def _begin(self, kind: str, generation: int, elapsed: float) -> None:
        if self._open is None:
            self._open = Incident(
                generation,
                kind,
                elapsed,
                self._step,
                note=self._note,
                stood=self._step_at,
                since=self._since,
            )
            self.incidents.append(self._open)
            self._note = ""

    # --- a worker stops -------------------------------------------------------------------------
    def _record_loss(self, generation: int, event: WorkerLost, elapsed: float) -> None:
        if self._is_run_over or generation < 1:
            return  # a session that was about to begin found no worker of the one before
        late = self._open is not None and self._open.generation == generation
        if generation < self._generation and not late:
            return  # a node that was cut off tells it now
        if not late:
            self._break_off()
        self._begin("worker_lost", generation, elapsed)
        assert self._open is not None
        loss = WorkerLoss(event.rank, event.cause, event.noticed_by, event.node)
        self._update(kind="worker_lost", losses=(*self._open.losses, loss))

    def _record_stop(self, generation: int, event: WorkerHeld, elapsed: float) -> Incident | None:
        """A worker stopped, perhaps before it is known whether a worker is lost, and which."""
        if self._is_run_over or generation < self._generation:
            return None  # a node that was cut off tells it now
        ended = self._recover(generation, event.applied, elapsed)
        if ended is not None or (self._open is None and event.why.startswith(_PAUSED_TEXT)):
            if event.applied > self._step:  # rank 0 has not told of it yet
                self._record_step(event.applied, elapsed)
        else:
            ended = self._recover_late(event.applied)
        self._break_off()
        if self._open is None:
            self._begin("held", generation, elapsed)
            self._update(note=event.why)
        return ended

    def _break_off(self) -> None:
        """The generation that should have ended the incident broke too: one more. It may yet be
        heard that it had done a step."""
        if self._open is not None and self._open.restarted is not None:
            self._open, self._cut = None, len(self.incidents) - 1

    # --- a generation begins --------------------------------------------------------------------
    def _restart(
        self, generation: int, event: GenerationStarted, elapsed: float
    ) -> Incident | None:
        if self._is_run_over:  # a journal that lacks the session's beginning
            self._open_session(elapsed)
        ended = self._recover(self._generation, event.step, elapsed)
        if ended is not None:  # the one before did a step that no rank has reported yet
            self._record_step(event.step, elapsed)
        if self._open is None and self._generation:
            # Open an incident if no event has said yet that the generation before is over.
            if not self._fresh:
                if event.reason not in ("start", "resume"):
                    self._begin(event.reason, self._generation, elapsed)
            elif event.step < self._step:
                # The session before ended as it should; what it did last was not saved.
                self._begin(
                    _RESUMED_KIND, self._generation, elapsed if self._since is None else self._since
                )
                self._update(stood=None, since=None)
        nodes = tuple(event.topology.get("nodes", ()))
        if self._open is not None and generation > self._open.generation:
            kind = event.reason if self._open.kind == "held" else self._open.kind
            before, now = set(self._nodes), set(nodes)
            more = (Counter(nodes) - Counter(self._nodes)).elements()
            self._update(
                kind=kind,
                restarted=elapsed,
                restart_step=event.step,
                rung=event.rung,
                came=tuple(sorted(now - before)),
                gone=tuple(sorted(before - now)),
                grown=tuple(sorted(name for name in more if name in before)),
            )
        self._nodes, self._since = nodes, elapsed
        if self._step_at is None or (self._fresh and self._open is None):
            self._step_at = elapsed
        self._generation = max(self._generation, generation)
        self._step, self._fresh = event.step, False
        return ended

    # --- steps ----------------------------------------------------------------------------------
    def _take_step(self, generation: int, step: int, elapsed: float) -> Incident | None:
        if self._open is not None and self._is_late_step(generation, step):
            # A report that came in after the loss was noticed.
            self._step = max(self._step, step)
            self._catch_up(step, elapsed)
            self._update(reached=max(self._open.reached, step))
            return self._recover_late(step)
        self._record_step(step, elapsed)
        return self._recover(generation, step, elapsed)

    def _is_late_step(self, generation: int, step: int) -> bool:
        """Return True if a step was done before the incident: reported in its generation, or in
        the next one by a survivor."""
        assert self._open is not None
        again = self._open.restarted is not None and step <= (self._open.restart_step or 0)
        return generation == self._open.generation or again

    def _record_step(self, step: int, elapsed: float) -> None:
        self._step = max(self._step, step)
        self._step_at = self._since = elapsed
        self._cut = None
        self._catch_up(step, elapsed)

    def _catch_up(self, step: int, elapsed: float) -> None:
        """The steps of an incident that is over have been done again."""
        if self._behind is not None and step > self.incidents[self._behind].reached:
            behind = self.incidents[self._behind]
            self.incidents[self._behind] = replace(behind, caught_up=elapsed)
            self._behind = None

    def _recover(self, generation: int, step: int, elapsed: float) -> Incident | None:
        """A newer generation has done a step."""
        if self._open is None or self._open.restarted is None:
            return None
        if generation <= self._open.generation or step <= (self._open.restart_step or 0):
            return None
        self._open, self._cut = None, None
        return self._close(len(self.incidents) - 1, step, elapsed)

    def _recover_late(self, step: int) -> Incident | None:
        """Close the incident late: the generation that broke had done a step before it broke, but
        had not reported it."""
        cut = self._cut
        if cut is None or self._open is None or step <= (self.incidents[cut].restart_step or 0):
            return None
        self._cut = None
        self._update(reached=max(self._open.reached, step))
        return self._close(cut, step, self._open.began)

    def _close(self, index: int, step: int, elapsed: float) -> Incident:
        ended = self.incidents[index] = replace(self.incidents[index], recovered=elapsed)
        if ended.steps_lost and step <= ended.reached:
            self._behind = index
        return ended

    def _update(self, **changes: object) -> None:
        if self._open is None:
            return
        self._open = replace(self._open, **changes)  # type: ignore[arg-type]
        self.incidents[-1] = self._open
