"""How a run ends: what the journal is told of it, what the person, and the exit code.

Every agent works it out from the same words: the verdict of the one that coordinates, and what the
nodes said of their workers' end. Only the coordinator's agent writes it into the journal.
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

    FAILED = "failed"  # a restart would not mend it
    MEND = "mend"  # the person can mend it
    STATELESS = "stateless"  # nothing that could be begun from can be trusted
    TOO_FEW = "too few"  # fewer nodes than the run is to have
    FENCED = "fenced"  # another trainer has the run folder, or nobody: the journal is not ours
    STOPPED = "stopped"  # it was to stop, and something was lost while it saved
    REPLACED = "replaced"  # another agent has this one's name: the run goes on with that one


class EndedError(HoldfastError):
    """There is to be no next generation, or none with this node."""

    def __init__(self, sentence: str, kind: Over = Over.FAILED) -> None:
        self.kind = kind
        super().__init__(sentence)


def trains_alone(holder: Mapping[str, Any], where: str) -> RunFolderError:
    """Whoever holds the term takes in no other node."""
    return RunFolderError(
        f"process {holder.get('pid')} on {holder.get('node')} trains this run without other nodes",
        where=where, remedy="stop it, and start it with cluster.node=NAME; then others can join",
    )  # fmt: skip


@dataclass(frozen=True)
class End:
    """event: None, where the journal is not ours. said: "" where nothing is to be said."""

    event: Event | None
    said: str
    code: int
    error: UserError | None = None

    @property
    def stopped(self) -> bool:
        """Whether the same command takes the run up again."""
        return isinstance(self.event, RunStopped)


def end_of(
    verdict: str, kind: str, ends: Sequence[Finished | Left], why: str, committed: int
) -> End:
    """verdict: why the run is over, "" where the workers ended as they should. ends: how, node by
    node. why: the reason to stop. committed: the newest committed step."""
    if verdict:
        return _cut_short(verdict, kind, committed)
    if not ends:
        said = "no node said how it ended"
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
    """Tells the end once: into the journal, where that is this agent's to do, and to the person."""

    def __init__(self, board: Board, say: Say, resume: str) -> None:
        """resume: the command that takes the run up again."""
        self._board, self._say, self._resume = board, say, resume
        self._written: Event | None = None

    def write(self, event: Event | None) -> None:
        """Again with more to say, where the bucket was waited for: the last one counts."""
        if event is not None and event != self._written:
            self._written = event
            self._board.emit("agent", event)

    def say(self, end: End) -> None:
        if end.said:
            tail = f"; resume with: {self._resume}" if end.stopped else ""
            self._say(end.said + tail)
