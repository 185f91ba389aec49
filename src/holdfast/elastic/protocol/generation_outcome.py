"""The outcome of a generation, and a node's report of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.policy.recovery.survivors import Held


@dataclass(frozen=True)
class Finished:
    """Every step of the run file is done; committed, unless `unsaved_reason` gives a reason.

    missing_upload: what the bucket does not have.
    """

    step: int
    unsaved: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Left:
    """The workers left on request; saved, unless `unsaved_reason` gives a reason.

    missing_upload: as in `FinishedOutcome`.
    """

    step: int
    unsaved: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Lost:
    """A process died, hung or failed; another generation may repair that."""

    # Reason of the next GenerationStarted: worker_lost, error, peer_lost, hang, mover_lost,
    # template_lost, rot; "": unknown.
    reason: str
    cause: str  # a phrase for people
    rotten: str | None = None  # what is wrong with the checkpoint that the generation began from
    ranks: frozenset[int] = frozenset()  # who were lost, or cannot go on with their peers


@dataclass(frozen=True)
class Failed:
    """A failure that a restart would not repair."""

    sentence: str
    exit_code: int = 1


Verdict = Finished | Left | Lost | Failed


@dataclass(frozen=True)
class NodeOutcome:
    """A node's report to the coordinator, once its workers have stopped.

    processes: by process, the states of the workers that wait.
    ending: the generation's outcome on this node, without ranks; None: halted, or still training.
    """

    processes: Mapping[int, Held] = field(default_factory=dict)
    ending: Verdict | None = None

    @property
    def lost(self) -> Lost | None:
        return self.ending if isinstance(self.ending, Lost) else None

    @property
    def done(self) -> Finished | Left | None:
        return self.ending if isinstance(self.ending, Finished | Left) else None

    def to_json(self) -> dict[str, Any]:
        processes = {str(pid): held.to_json() for pid, held in self.processes.items()}
        return {"processes": processes, **_ending_json(self.ending)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> NodeOutcome:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        processes = dict(value.get("processes", {}))
        held = {int(pid): Held.from_json(one) for pid, one in processes.items()}
        return NodeOutcome(held, _ending(value))


def _ending_json(ending: Verdict | None) -> dict[str, Any]:
    match ending:
        case Finished(step, unsaved, missing) | Left(step, unsaved, missing):
            kind = "finished" if isinstance(ending, Finished) else "left"
            return {"kind": kind, "step": step, "unsaved": unsaved, "missing": missing}
        case Failed(sentence, code):
            return {"failed": sentence, "code": code}
        case Lost("", cause, None):
            return {"cause": cause}
        case Lost(reason, cause, rotten):
            return {"reason": reason, "cause": cause, "rotten": rotten}
    return {}


def _ending(value: Mapping[str, Any]) -> Verdict | None:
    if "kind" in value:
        ended = Finished if value["kind"] == "finished" else Left
        return ended(int(value["step"]), value.get("unsaved"), value.get("missing"))
    if "failed" in value:
        return Failed(str(value["failed"]), int(value.get("code", 1)))
    if "cause" in value:
        return Lost(str(value.get("reason", "")), str(value["cause"]), value.get("rotten"))
    return None
