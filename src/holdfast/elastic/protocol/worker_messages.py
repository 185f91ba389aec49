"""Messages between a worker and its agent: the worker's reports, and the answers to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from holdfast.core.device_progress import GroupProgress
from holdfast.core.json_parsing import JsonMessage, Key
from holdfast.events import Event
from holdfast.policy.saving.tier_durations import TierDurations

REPORT_PATH = "/report"

STEP_PHASES = ("compute", "reduce", "vote")
"""Phases of a step; the time between two steps may be long."""
SCRIPT_END = "finish"
"""The phase in which a script runs what comes after its loop."""

MAX_POLL_WAIT_S = 20.0
"""Seconds after which an unfinished wait is answered, so that no connection looks dead."""


@dataclass(frozen=True)
class WorkerOutcome(JsonMessage):
    """How a worker is about to end.

    kind: "finished" or "left", after `step`. unsaved_reason: why the state after that step is not
    durable; None if it is.
    """

    kind: str
    step: int
    unsaved_reason: Annotated[str | None, Key("unsaved")] = None


@dataclass(frozen=True)
class WorkerReport(JsonMessage):
    """A worker's events and progress.

    step, phase      where training is
    progress_count   how often it made progress within the step
    first_number     number of the first event; the agent drops what it has seen
    stream_id        names the numbering, which is the process's own; "": there is one of the rank
    is_sync          the events are to be durable before the answer
    has_callbacks    the worker may do something else before it reports again
    is_asleep        training sleeps where ranks wait for each other
    compute_time     seconds of computing, and microbatches, in all; None: not reported
    load             of these, seconds without a processor; elements of the data; None likewise
    step_time        seconds of steps from their arithmetic to their vote, and steps; None likewise
    cpu_s            CPU seconds that the worker's reports took
    outcome          None: it does not end yet
    device_progress  how far its device is with exchanges; empty while training makes progress
    arrivals         how often bytes of other ranks had come since the report before, while training
                     made no progress: a transfer moves
    """

    absent_if_default = frozenset(
        {
            *("stream_id", "compute_time", "load", "step_time", "device_progress", "outcome"),
            "arrivals",
        }
    )
    required = frozenset({"first_number", "events", "is_sync"})
    rank: int
    step: int
    phase: str
    progress_count: Annotated[int, Key("marks")]
    first_number: Annotated[int, Key("first")] = 0
    events: tuple[Event, ...] = ()
    stream_id: Annotated[str, Key("voice")] = ""
    is_sync: Annotated[bool, Key("sync")] = False
    has_callbacks: Annotated[bool, Key("calls")] = False
    is_asleep: Annotated[bool, Key("asleep")] = False
    compute_time: Annotated[tuple[float, int] | None, Key("pace")] = None
    load: tuple[float, float] | None = None
    step_time: Annotated[tuple[float, int] | None, Key("worked")] = None
    cpu_s: Annotated[float, Key("own")] = 0.0
    outcome: WorkerOutcome | None = None
    device_progress: Annotated[tuple[GroupProgress, ...], Key("device")] = ()
    arrivals: int = 0


@dataclass(frozen=True)
class SaveRequest(JsonMessage):
    """The newest request for a save, into these tiers. number: 0 for none."""

    number: Annotated[int, Key("request")] = 0
    tiers: Annotated[tuple[int, ...], Key("into")] = ()


@dataclass(frozen=True)
class WorkerReply(JsonMessage):
    """The agent's answer to a report, with its requests.

    is_stored            the events are in the journal, and durable if the report asked for that
    pause_generation     the generation whose workers are to end their step and wait; 0: none
    is_node_leaving      pausing: a node leaves then, with the state that its workers hold
    is_peer_copy_enough  stopping: a snapshot that peers get is enough
    is_in_danger         this node may be lost soon: its part of each snapshot goes to peers
    save                 None for a rank that does not pass such requests on
    tier_durations       seconds of saves and restores by tier; None for ranks that need not know
    durable_below        all events of this rank with a lower number are durable
    profile              number of the newest request for a profile of this rank, and its steps
    """

    absent_if_default = frozenset({"durable_below", "is_in_danger", "profile"})
    merged = frozenset({"save", "tier_durations"})
    required = frozenset({"should_stop", "newest_generation", "is_stored"})
    should_stop: Annotated[bool, Key("stop")] = False
    newest_generation: Annotated[int, Key("generation")] = 0
    is_stored: Annotated[bool, Key("stored")] = False
    pause_generation: Annotated[int, Key("pause")] = 0
    is_node_leaving: Annotated[bool, Key("parting")] = False
    is_peer_copy_enough: Annotated[bool, Key("brief")] = False
    save: SaveRequest | None = None
    tier_durations: TierDurations | None = None
    durable_below: Annotated[int, Key("durable")] = 0
    is_in_danger: Annotated[bool, Key("danger")] = False
    profile: tuple[int, int] = (0, 0)
