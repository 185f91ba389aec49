"""The result of a run: its event in the journal, the line for the user, and the exit code.

Every agent derives the result from the same facts: the coordinator's verdict, and each node's
report of how its workers ended. Only the coordinator's agent writes the event into the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast.elastic.event_log import EventLog, Say
from holdfast.elastic.protocol.generation_outcome import FinishedOutcome, LeftOutcome
from holdfast.errors import CannotGoOnError, HoldfastError, RunFolderError, UserError
from holdfast.events import Event, RunFailed, RunFinished, RunStopped
from holdfast.wire.secret import Secret
from holdfast.wire.term import holder_probe, secret_of


class EndReason(StrEnum):
    """Why there is no next generation, though not every step is done."""

    FAILED = "failed"  # a restart would not help
    USER_ERROR = "mend"  # the user can fix the cause
    NO_USABLE_STATE = "stateless"  # no state to begin from can be trusted
    TOO_FEW = "too few"  # fewer nodes than the run needs
    FENCED = "fenced"  # another trainer owns the run folder, or it is lost: not our journal
    STOPPED = "stopped"  # the run was asked to stop, and lost a worker while it saved
    LEFT = "left"  # the run was asked to stop before a step was done, and loses nothing
    REPLACED = "replaced"  # another agent took this agent's name, and the run continues with it


class RunEndedError(HoldfastError):
    """The run has no next generation, or none with this node."""

    def __init__(self, sentence: str, reason: EndReason = EndReason.FAILED) -> None:
        self.reason = reason
        super().__init__(sentence)


class ReplacedError(RunEndedError):
    """Another agent has this agent's name, perhaps because this node was restarted."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"another agent has joined as {name}, and the run continues with that one. If both "
            "are to take part, give each its own name (cluster.node=NAME)",
            EndReason.REPLACED,
        )


def single_node_run_error(holder: Mapping[str, Any], where: str) -> RunFolderError:
    """Return the error for a node that joins a run of one node, which admits no other."""
    return RunFolderError(
        f"process {holder.get('pid')} on {holder.get('node')} trains this run without other nodes",
        where=where,
        remedy="stop it, start it with cluster.node=NAME; then other nodes can join",
    )


def refuse_join(holder: Mapping[str, Any], secret: Secret) -> None:
    """Raises RunFolderError if the run at work would never admit this node. That is so for a run of
    one node, and if only one of run and node speaks TLS. holder: of its newest term. secret: as
    this node uses it."""
    uses_tls = bool(holder.get("tls"))
    if uses_tls == secret.uses_tls and not holder.get("alone"):
        return
    if not holder_probe(secret_of(holder, secret))(str(holder.get("address", ""))):
        return  # it has ended, and this node may lead
    if holder.get("alone"):
        raise single_node_run_error(holder, "cluster.node")
    raise RunFolderError(
        f"the run at work {'speaks' if uses_tls else 'does not speak'} TLS, and this node "
        f"{'does not' if uses_tls else 'does'}",
        where="cluster.tls",
        remedy=f"start this node with cluster.tls={str(uses_tls).lower()}",
    )


@dataclass(frozen=True)
class RunResult:
    """Result of a run. event: None if another trainer owns the journal. message: the line for the
    user, "" for none. exit_code: the exit code. error: raised instead of an exit with
    `exit_code`."""

    event: Event | None
    message: str
    exit_code: int
    error: UserError | None = None

    @property
    def is_resumable(self) -> bool:
        """Return True if the same command resumes the run."""
        return isinstance(self.event, RunStopped)


def run_result(
    end_message: str,
    end_reason: str,
    node_outcomes: Sequence[FinishedOutcome | LeftOutcome],
    stop_reason: str,
    committed_step: int,
    last_save: str = "",
) -> RunResult:
    """Return the result of a run.

    end_message: why the run is over, "" if the workers ended normally. node_outcomes: their
    results, node by node. stop_reason: the reason to stop. committed_step: the newest committed
    step. last_save: the `EndReason` of a run whose last generation only saved, for `stop_reason`.
    """
    if last_save and not end_message and node_outcomes:
        step = node_outcomes[0].step
        lost = next((end.unsaved_reason for end in node_outcomes if end.unsaved_reason), None)
        saved = unsaved_sentence(step, lost, committed_step) if lost else saved_sentence(step)
        said = f"{stop_reason}; {saved}"
        return _aborted_result(said, last_save, committed_step)
    if end_message:
        return _aborted_result(end_message, end_reason, committed_step)
    if not node_outcomes:
        said = "no node reported how its workers ended"
        return RunResult(RunFailed(said, step=committed_step), said, 1)
    step, finished = node_outcomes[0].step, isinstance(node_outcomes[0], FinishedOutcome)
    unsaved = next(
        (end.unsaved_reason for end in node_outcomes if end.unsaved_reason is not None), None
    )
    missing = next(
        (end.missing_upload for end in node_outcomes if end.missing_upload is not None), None
    )
    if unsaved is not None:
        return _stopped_result(committed_step, unsaved_sentence(step, unsaved, committed_step), 1)
    if not finished:
        return _stopped_result(
            step, stop_reason if missing is None else f"{stop_reason}; {missing}", 0
        )
    if missing is not None:
        return _stopped_result(step, missing, 1)
    failed = (end.script_error for end in node_outcomes if isinstance(end, FinishedOutcome))
    said = next((said for said in failed if said is not None), "")
    error = UserError(said) if said else None
    event = RunFinished(said, step=step)
    return RunResult(event, "", error.exit_code if error else 0, error)


def saved_sentence(step: int) -> str:
    return f"the state after step {step} is saved"


def unsaved_sentence(step: int, reason: str, committed_step: int) -> str:
    """Return why the state after `step` is not saved, and which steps are lost with it."""
    lost = f"; steps {committed_step + 1} to {step} are lost" if step > committed_step else ""
    return f"the state after step {step} could not be saved: {reason}{lost}"


def _aborted_result(end_message: str, end_reason: str, committed_step: int) -> RunResult:
    failed = RunFailed(end_message, step=committed_step)
    match end_reason:
        case EndReason.STOPPED:
            return _stopped_result(committed_step, end_message, 1)
        case EndReason.LEFT:
            return _stopped_result(committed_step, end_message, 0)
        case EndReason.TOO_FEW:
            return _stopped_result(committed_step, end_message, CannotGoOnError.exit_code)
        case EndReason.FENCED:
            return RunResult(None, end_message, 1)
        case EndReason.REPLACED:
            return RunResult(None, "", UserError.exit_code, UserError(end_message))
        case EndReason.USER_ERROR:
            return RunResult(failed, "", UserError.exit_code, UserError(end_message))
        case EndReason.NO_USABLE_STATE:
            return RunResult(failed, "", CannotGoOnError.exit_code, CannotGoOnError(end_message))
    return RunResult(failed, end_message, 1)


def _stopped_result(step: int, reason: str, exit_code: int) -> RunResult:
    return RunResult(
        RunStopped(reason, step=step), f"stopped after step {step} ({reason})", exit_code
    )


class ResultReporter:
    """Reports the result once: to the user, and to the journal if that is this agent's duty."""

    def __init__(self, event_log: EventLog, say: Say, resume_command: str) -> None:
        """resume_command: the command that resumes the run."""
        self.say_last = say
        """Prints the line with which a node leaves the run, after all other lines."""
        self._event_log, self._resume_command = event_log, resume_command
        self._written_event: Event | None = None

    def write_event(self, event: Event | None) -> None:
        """Emit the run's last event; after a wait for the bucket a second one replaces it."""
        if event is not None and event != self._written_event:
            self._written_event = event
            self._event_log.emit("agent", event)

    def print_result(self, result: RunResult) -> None:
        if result.message:
            tail = f"; resume with: {self._resume_command}" if result.is_resumable else ""
            self.say_last(result.message + tail)
