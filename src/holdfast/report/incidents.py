"""Incidents: what broke, what it cost, and when the run was itself again.

An incident opens when a worker is lost or stops (or when a session ends without a word) and closes
with the first step of a newer generation. Its length is the RTO: seconds from the loss, as the
agent noticed it, to the first new committed step; the steps done again are its RPO.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Loss:
    """One worker that was lost."""

    rank: int
    cause: str  # "SIGKILL", "exit 1", "no progress for 30 s", ...
    noticed_by: str  # exit, progress, peer


@dataclass(frozen=True)
class Incident:
    """Times are seconds since the run's start on the agent's clock."""

    generation: int  # the one that broke
    kind: str  # worker_lost, session_lost, or the reason of the next generation
    began: float
    reached: int  # last step done before
    losses: tuple[Loss, ...] = ()
    note: str = ""
    restarted: float | None = None  # the next generation was decided
    ready: float | None = None  # its last worker had restored its state
    recovered: float | None = None  # its first step was done
    restart_step: int | None = None  # it began from the state after this step
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
    def phases(self) -> dict[str, float]:
        """Parts of the recovery: deciding, starting and restoring, the first step."""
        marks = [("decide", self.restarted), ("restore", self.ready), ("step", self.recovered)]
        out, last = {}, self.began
        for name, mark in marks:
            if mark is not None:
                out[name], last = mark - last, mark
        return out

    @property
    def source(self) -> str:
        """Where the state came from and what that took, in one phrase; "" before it was read."""
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
            return f"rank {first.rank} lost{more} ({first.cause})"
        if self.kind == "session_lost":
            return "the session ended without a word"
        return self.note or self.kind.replace("_", " ")


class IncidentBook:
    """Feed it records in the order they happened, with the run's time; read `incidents`."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self._open: Incident | None = None
        self._generation = 0
        self._step = 0
        self._in_session = False
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
            self._lose(record.generation, event, elapsed)
        elif isinstance(event, WorkerHeld):
            self._hold(record.generation, event, elapsed)
        elif isinstance(event, NonFinite):
            self._note = f"{event.parameter} not finite on rank {event.rank}, step {event.step}"
        elif isinstance(event, RunStarted):
            if self._in_session:  # its agent was killed, or its machine went away
                self._begin("session_lost", self._generation, self._last_elapsed)
            self._in_session = True
        elif isinstance(event, _ENDS):
            self._in_session = False
        elif isinstance(event, GenerationStarted):
            self._restart(record.generation, event, elapsed)
        elif isinstance(event, RestorePointFound):
            self._update(found=event.seconds)
        elif isinstance(event, CheckpointRestored):
            slowest = self._open.state if self._open is not None else None
            if slowest is None or event.seconds > slowest.seconds:
                self._update(state=event)
        elif isinstance(event, WorkerReady):
            self._update(ready=elapsed)
        elif isinstance(event, StepDone):
            self._step = max(self._step, event.step)
            if self._open is not None and self._late(record.generation, event.step):
                # A report that came in after the loss was noticed.
                self._update(reached=max(self._open.reached, event.step))
            else:
                ended = self._recover(record.generation, elapsed)
        self._last_elapsed = elapsed
        return ended

    def _late(self, generation: int, step: int) -> bool:
        """Whether a step was done before the incident: told in its generation, or in the next one,
        by somebody who lives on."""
        assert self._open is not None
        again = self._open.restarted is not None and step <= (self._open.restart_step or 0)
        return generation == self._open.generation or again

    def _begin(self, kind: str, generation: int, elapsed: float) -> None:
        if self._open is None:
            self._open = Incident(generation, kind, elapsed, self._step, note=self._note)
            self.incidents.append(self._open)
            self._note = ""

    def _lose(self, generation: int, event: WorkerLost, elapsed: float) -> None:
        again = self._open is not None and self._open.restarted is not None
        if again:  # the generation that should have ended the incident broke too: one more
            self._open = None
        self._begin("worker_lost", generation, elapsed)
        assert self._open is not None
        loss = Loss(event.rank, event.cause, event.noticed_by)
        self._update(kind="worker_lost", losses=(*self._open.losses, loss))

    def _hold(self, generation: int, event: WorkerHeld, elapsed: float) -> None:
        """Somebody stopped, perhaps before it is known who is lost, if anybody is."""
        if self._open is not None and self._open.restarted is not None:
            self._open = None  # the generation that should have ended the incident stopped too
        if self._open is None:
            self._begin("held", generation, elapsed)
            self._update(note=event.why)

    def _restart(self, generation: int, event: GenerationStarted, elapsed: float) -> None:
        if self._open is None and self._generation and event.reason not in ("start", "resume"):
            self._begin(event.reason, self._generation, elapsed)
        if self._open is not None and generation > self._open.generation:
            kind = event.reason if self._open.kind == "held" else self._open.kind
            self._update(kind=kind, restarted=elapsed, restart_step=event.step)
        self._generation = max(self._generation, generation)
        self._step = event.step

    def _recover(self, generation: int, elapsed: float) -> Incident | None:
        if self._open is None or self._open.restarted is None:
            return None
        if generation <= self._open.generation:
            return None
        self._update(recovered=elapsed)
        ended, self._open = self._open, None
        return ended

    def _update(self, **changes: object) -> None:
        if self._open is None:
            return
        self._open = replace(self._open, **changes)  # type: ignore[arg-type]
        self.incidents[-1] = self._open
