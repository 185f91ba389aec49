"""The outcome of a generation, and a node's report of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.json_parsing import JsonObject
from holdfast.policy.recovery.survivors import HeldState


@dataclass(frozen=True)
class FinishedOutcome:
    """Every step of the run file is done; committed, unless `unsaved_reason` gives a reason.

    missing_upload: what the bucket does not have. script_error: how a script failed after its loop.
    """

    step: int
    unsaved_reason: str | None = None
    missing_upload: str | None = None
    script_error: str | None = None


@dataclass(frozen=True)
class LeftOutcome:
    """The workers left on request; saved, unless `unsaved_reason` gives a reason.

    missing_upload: as in `FinishedOutcome`.
    """

    step: int
    unsaved_reason: str | None = None
    missing_upload: str | None = None


@dataclass(frozen=True)
class LostOutcome:
    """A process died, hung or failed; another generation may repair that."""

    # Reason of the next GenerationStarted: worker_lost, error, peer_lost, hang, rot, non_finite,
    # loss_jump; "": unknown.
    reason: str
    cause: str  # a phrase for people
    # what is wrong with the checkpoint that the generation began from
    corruption: str | None = None
    lost_ranks: frozenset[int] = (
        frozenset()
    )  # ranks that were lost, or cannot continue with their peers


@dataclass(frozen=True)
class FailedOutcome:
    """A failure that a restart would not repair."""

    sentence: str
    exit_code: int = 1


GenerationOutcome = FinishedOutcome | LeftOutcome | LostOutcome | FailedOutcome


@dataclass(frozen=True)
class NodeOutcome:
    """A node's report to the coordinator, once its workers have stopped.

    processes: by process, the states of the workers that wait.
    ending: the generation's outcome on this node, without ranks; None: halted, or still training.
    """

    processes: Mapping[int, HeldState] = field(default_factory=dict)
    ending: GenerationOutcome | None = None

    @property
    def lost(self) -> LostOutcome | None:
        return self.ending if isinstance(self.ending, LostOutcome) else None

    @property
    def done(self) -> FinishedOutcome | LeftOutcome | None:
        return self.ending if isinstance(self.ending, FinishedOutcome | LeftOutcome) else None

    def to_json(self) -> JsonObject:
        processes = {str(pid): held.to_json() for pid, held in self.processes.items()}
        return {"processes": processes, **_ending_json(self.ending)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> NodeOutcome:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        processes = dict(value.get("processes", {}))
        held = {int(pid): HeldState.from_json(one) for pid, one in processes.items()}
        return NodeOutcome(held, _ending(value))


def _ending_json(ending: GenerationOutcome | None) -> JsonObject:
    match ending:
        case FinishedOutcome(step, unsaved, missing, error):
            told: JsonObject = {
                "kind": "finished",
                "step": step,
                "unsaved": unsaved,
                "missing": missing,
            }
            return told if error is None else told | {"script": error}
        case LeftOutcome(step, unsaved, missing):
            return {"kind": "left", "step": step, "unsaved": unsaved, "missing": missing}
        case FailedOutcome(sentence, code):
            return {"failed": sentence, "code": code}
        case LostOutcome("", cause, None):
            return {"cause": cause}
        case LostOutcome(reason, cause, rotten):
            return {"reason": reason, "cause": cause, "rotten": rotten}
    return {}


def _ending(value: Mapping[str, Any]) -> GenerationOutcome | None:
    if "kind" in value:
        ended = int(value["step"]), value.get("unsaved"), value.get("missing")
        is_finished = value["kind"] == "finished"
        return FinishedOutcome(*ended, value.get("script")) if is_finished else LeftOutcome(*ended)
    if "failed" in value:
        return FailedOutcome(str(value["failed"]), int(value.get("code", 1)))
    if "cause" in value:
        return LostOutcome(str(value.get("reason", "")), str(value["cause"]), value.get("rotten"))
    return None
