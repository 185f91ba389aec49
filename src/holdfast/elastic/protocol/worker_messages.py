"""Messages between a worker and its agent: the worker's reports, and the answers to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.device_progress import GroupProgress, progress_from_json
from holdfast.core.json_parsing import JsonObject
from holdfast.events import Event, event_from_json
from holdfast.policy.saving.tier_durations import TierDurations

REPORT_PATH = "/report"

STEP_PHASES = ("compute", "reduce", "vote")
"""Phases of a step; the time between two steps may be long."""
SCRIPT_END = "finish"
"""The phase in which a script runs what comes after its loop."""


MAX_POLL_WAIT_S = 20.0
"""Seconds after which an unfinished wait is answered, so that no connection looks dead."""


@dataclass(frozen=True)
class WorkerOutcome:
    """How a worker is about to end.

    kind: "finished" or "left", after `step`. unsaved_reason: why the state after that step is not
    durable; None if it is.
    """

    kind: str
    step: int
    unsaved_reason: str | None = None

    def to_json(self) -> JsonObject:
        return {"kind": self.kind, "step": self.step, "unsaved": self.unsaved_reason}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> WorkerOutcome:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        return WorkerOutcome(str(value["kind"]), int(value["step"]), value["unsaved"])


@dataclass(frozen=True)
class WorkerReport:
    """A worker's events and progress.

    step, phase      where training is
    progress_count   how often it made progress within the step
    first_number     number of the first event; the agent drops what it has seen
    stream_id        names the numbering, which is the process's own; "": there is one of the rank
    is_sync          the events are to be durable before the answer
    has_callbacks    the worker may do something else before it reports again
    is_asleep        training sleeps where ranks wait for each other
    compute_time     seconds of computing, and microbatches, in all; None: not reported
    step_time        seconds of steps from their arithmetic to their vote, and steps; None likewise
    cpu_s            CPU seconds that the worker's reports took
    outcome          None: it does not end yet
    device_progress  how far its device is with exchanges; empty while training makes progress
    """

    rank: int
    step: int
    phase: str
    progress_count: int
    first_number: int = 0
    events: tuple[Event, ...] = ()
    stream_id: str = ""
    is_sync: bool = False
    has_callbacks: bool = False
    is_asleep: bool = False
    compute_time: tuple[float, int] | None = None
    step_time: tuple[float, int] | None = None
    cpu_s: float = 0.0
    outcome: WorkerOutcome | None = None
    device_progress: tuple[GroupProgress, ...] = ()

    def to_json(self) -> JsonObject:
        device = [each.to_json() for each in self.device_progress]
        compute, steps = self.compute_time, self.step_time
        return {
            "rank": self.rank,
            **({"voice": self.stream_id} if self.stream_id else {}),
            "step": self.step,
            "phase": self.phase,
            "marks": self.progress_count,
            "asleep": self.is_asleep,
            **({} if compute is None else {"pace": list(compute)}),
            **({} if steps is None else {"worked": list(steps)}),
            "own": self.cpu_s,
            "first": self.first_number,
            "events": [{"kind": event.kind, "event": event.body} for event in self.events],
            "sync": self.is_sync,
            "calls": self.has_callbacks,
            **({"device": device} if device else {}),
            **({} if self.outcome is None else {"outcome": self.outcome.to_json()}),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> WorkerReport:
        """Parse the message.

        Raises KeyError, TypeError and ValueError if it is malformed, or has an event of an unknown
        kind."""
        outcome = value.get("outcome")
        return WorkerReport(
            int(value["rank"]),
            int(value["step"]),
            str(value["phase"]),
            int(value["marks"]),
            int(value["first"]),
            tuple(event_from_json(str(one["kind"]), one["event"]) for one in value["events"]),
            str(value.get("voice", "")),
            bool(value["sync"]),
            bool(value.get("calls")),
            bool(value.get("asleep")),
            _time_and_count(value.get("pace")),
            _time_and_count(value.get("worked")),
            float(value.get("own", 0.0)),
            None if outcome is None else WorkerOutcome.from_json(outcome),
            progress_from_json(value.get("device", ())),
        )


def _time_and_count(pair: Any) -> tuple[float, int] | None:
    if pair is None:
        return None
    seconds, count = pair
    return float(seconds), int(count)


@dataclass(frozen=True)
class SaveRequest:
    """The newest request for a save, into these tiers. number: 0 for none."""

    number: int = 0
    tiers: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkerReply:
    """The agent's answer to a report, with its requests.

    is_stored            the events are in the journal, and durable if the report asked for that
    pause_generation     the generation whose workers are to end their step and wait; 0: none
    is_node_leaving      pausing: a node leaves then, with the state that its workers hold
    is_peer_copy_enough  stopping: a snapshot that peers get is enough
    is_in_danger         this node may be lost soon: its part of each snapshot goes to peers
    save                 None for a rank that does not pass such requests on
    tier_durations       seconds of saves and restores by tier; None for ranks that need not know
    durable_below        all events of this rank with a lower number are durable
    """

    should_stop: bool = False
    newest_generation: int = 0
    is_stored: bool = False
    pause_generation: int = 0
    is_node_leaving: bool = False
    is_peer_copy_enough: bool = False
    save: SaveRequest | None = None
    tier_durations: TierDurations | None = None
    durable_below: int = 0
    is_in_danger: bool = False

    def to_json(self) -> JsonObject:
        save, durations = self.save, self.tier_durations
        return {
            "stop": self.should_stop,
            "generation": self.newest_generation,
            "stored": self.is_stored,
            "pause": self.pause_generation,
            "parting": self.is_node_leaving,
            "brief": self.is_peer_copy_enough,
            **({"durable": self.durable_below} if self.durable_below else {}),
            **({"danger": True} if self.is_in_danger else {}),
            **({} if save is None else {"request": save.number, "into": list(save.tiers)}),
            **({} if durations is None else durations.to_json()),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> WorkerReply:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        durations = TierDurations.from_json(value) if "durations" in value else None
        return WorkerReply(
            bool(value["stop"]),
            int(value["generation"]),
            bool(value["stored"]),
            int(value.get("pause", 0)),
            bool(value.get("parting")),
            bool(value.get("brief")),
            SaveRequest(int(value["request"]), tuple(value.get("into", ())))
            if "request" in value
            else None,
            durations,
            int(value.get("durable", 0)),
            bool(value.get("danger")),
        )
