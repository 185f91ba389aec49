"""The result of a run: its event in the journal, the line for the user, and the exit code.

Every agent derives the result from the same facts: the coordinator's verdict, and each node's
report of how its workers ended. Only the coordinator's agent writes the event into the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast.elastic.event_log import Board, Say
from holdfast.elastic.protocol.generation_outcome import Finished, Left
from holdfast.errors import CannotGoOnError, HoldfastError, RunFolderError, UserError
from holdfast.events import Event, RunFailed, RunFinished, RunStopped


class Over(StrEnum):
    """Why there is no next generation, though not every step is done."""

    FAILED = "failed"  # a restart would not help
    MEND = "mend"  # the user can fix the cause
    STATELESS = "stateless"  # no state to begin from can be trusted
    TOO_FEW = "too few"  # fewer nodes than the run needs
    FENCED = "fenced"  # another trainer owns the run folder, or it is lost: not our journal
    STOPPED = "stopped"  # the run was asked to stop, and lost a worker while it saved
    REPLACED = "replaced"  # another agent took this agent's name, and the run continues with it


class EndedError(HoldfastError):
    """The run has no next generation, or none with this node."""

    def __init__(self, sentence: str, kind: Over = Over.FAILED) -> None:
        self.kind = kind
        super().__init__(sentence)


def trains_alone(holder: Mapping[str, Any], where: str) -> RunFolderError:
    """Return the error for a node that joins a run of one node, which admits no other."""
    return RunFolderError(
        f"process {holder.get('pid')} on {holder.get('node')} trains this run without other nodes",
        where=where, remedy="stop it, start it with cluster.node=NAME; then other nodes can join",
    )  # fmt: skip


@dataclass(frozen=True)
class End:
    """Result of a run. event: None if another trainer owns the journal. said: the line for the
    user, "" for none. code: the exit code. error: raised instead of an exit with `code`."""

    event: Event | None
    said: str
    code: int
    error: UserError | None = None

    @property
    def stopped(self) -> bool:
        """Return True if the same command resumes the run."""
        return isinstance(self.event, RunStopped)


def end_of(
    verdict: str, kind: str, ends: Sequence[Finished | Left], why: str, committed: int
) -> End:
    """Return the result of a run.

    verdict: why the run is over, "" if the workers ended normally. ends: their results, node by
    node. why: the reason to stop. committed: the newest committed step."""
    if verdict:
        return _cut_short(verdict, kind, committed)
    if not ends:
        said = "no node reported how its workers ended"
        return End(RunFailed(said, step=committed), said, 1)
    step, finished = ends[0].step, isinstance(ends[0], Finished)
    unsaved = next((end.unsaved for end in ends if end.unsaved is not None), None)
    missing = next((end.missing for end in ends if end.missing is not None), None)
    if unsaved is not None:
        return _stopped(committed, f"the state after step {step} could not be saved: {unsaved}", 1)
    if not finished:
        return _stopped(step, why if missing is None else f"{why}; {missing}", 0)
    if missing is not None:
        return _stopped(step, missing, 1)
    return End(RunFinished(step=step), "", 0)


def _cut_short(verdict: str, kind: str, committed: int) -> End:
    failed = RunFailed(verdict, step=committed)
    match kind:
        case Over.STOPPED:
            return _stopped(committed, verdict, 1)
        case Over.TOO_FEW:
            return _stopped(committed, verdict, CannotGoOnError.exit_code)
        case Over.FENCED:
            return End(None, verdict, 1)
        case Over.REPLACED:
            return End(None, "", UserError.exit_code, UserError(verdict))
        case Over.MEND:
            return End(failed, "", UserError.exit_code, UserError(verdict))
        case Over.STATELESS:
            return End(failed, "", CannotGoOnError.exit_code, CannotGoOnError(verdict))
    return End(failed, verdict, 1)


def _stopped(step: int, reason: str, code: int) -> End:
    return End(RunStopped(reason, step=step), f"stopped after step {step} ({reason})", code)


class Last:
    """Reports the result once: to the user, and to the journal if that is this agent's duty."""

    def __init__(self, board: Board, say: Say, resume: str) -> None:
        """resume: the command that resumes the run."""
        self._board, self._say, self._resume = board, say, resume
        self._written: Event | None = None

    def write(self, event: Event | None) -> None:
        """Emit the run's last event; after a wait for the bucket a second one replaces it."""
        if event is not None and event != self._written:
            self._written = event
            self._board.emit("agent", event)

    def say(self, end: End) -> None:
        if end.said:
            tail = f"; resume with: {self._resume}" if end.stopped else ""
            self._say(end.said + tail)
