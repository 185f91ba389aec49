"""Every typed event of the journal.

The `Record` around an event says who wrote it, and when. Records merge by (generation, step,
writer, sequence); `time` is compared only between records of one writer. Metrics, reports, the
goodput ledger and the data audit derive from these and nothing else. A newer program reads all
older versions, and drops keys that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

JOURNAL_VERSION = 1
_KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True)
class Event:
    """Base of all events. `step` is the step an event belongs to; 0 is before the first."""

    step: int = field(default=0, kw_only=True)
    kind: ClassVar[str]  # its name in the journal: part of the format, never changed
    absent_if_empty: ClassVar[frozenset[str]] = frozenset()  # newer fields: older files lack them

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" not in vars(cls):
            raise TypeError(f"event {cls.__name__} needs a kind of its own")
        if cls.kind in _KINDS:
            raise TypeError(f"event kind {cls.kind!r} is taken by {_KINDS[cls.kind].__name__}")
        _KINDS[cls.kind] = cls

    @property
    def body(self) -> dict[str, Any]:
        """Its fields by name, to be written and not to be changed: what they hold is no copy."""
        return {k: v for k, v in vars(self).items() if v or k not in self.absent_if_empty}


@dataclass(frozen=True)
class Record:
    """One line of the journal."""

    generation: int
    writer: str
    sequence: int
    time: float  # seconds since the epoch, on the writer's clock
    event: Event

    @property
    def order(self) -> tuple[int, int, str, int]:
        return (self.generation, self.event.step, self.writer, self.sequence)


# --- the run's life -------------------------------------------------------------------------
@dataclass(frozen=True)
class RunStarted(Event):
    """An agent opened the run folder; `resumed` when it had been opened before."""

    kind: ClassVar[str] = "run_started"
    absent_if_empty = frozenset({"plan"})
    run: str
    config_hash: str
    dataset_version: str
    resumed: bool = False
    plan: str = ""  # where a planned layout came from; "" if the run file gives it


@dataclass(frozen=True)
class RunBranched(Event):
    """This run continues another one, which dealt the samples of all steps up to `step`."""

    kind: ClassVar[str] = "run_branched"
    parent: str  # name of the parent run
    parent_id: str  # its run id, "" for one of an older version
    folder: str  # path of its run folder when the branch was made
    key: str  # of the commit object that was copied
    changed: list[str]  # keys with other values than the parent's, as key=value


@dataclass(frozen=True)
class GenerationStarted(Event):
    """Membership `generation` of the record begins from the state after `step`."""

    kind: ClassVar[str] = "generation_started"
    absent_if_empty = frozenset({"cause"})
    topology: dict[str, Any]
    reason: str  # start, resume, worker_lost, hang, non_finite, ...
    restored_from: str | None = None  # key of the commit object, None for initial weights
    rung: int = -1  # of the recovery ladder (docs/internals/elastic.md); -1: nothing was recovered
    came_from: list[int | None] | None = None  # live: by rank, whose state it went on with
    cause: str = ""  # what ended the generation before, for people


@dataclass(frozen=True)
class WorkerStarted(Event):
    kind: ClassVar[str] = "worker_started"
    rank: int
    pid: int
    node: str


@dataclass(frozen=True)
class WorkerReady(Event):
    """The worker restored its state and is about to compute step `step` + 1."""

    kind: ClassVar[str] = "worker_ready"
    absent_if_empty = frozenset({"device"})
    rank: int
    seconds: float  # from fork to ready
    device: str = ""  # with backends, versions and transport: "cuda:1, nccl 2.28.9, NVLink"


@dataclass(frozen=True)
class WorkerLost(Event):
    kind: ClassVar[str] = "worker_lost"
    rank: int
    pid: int  # 0: not known
    cause: str  # "SIGKILL", "exit 1", "no progress for 30 s", ...
    noticed_by: str  # exit, peer, halt; heartbeat: of its node; of one that stands still: stopped,
    # silent, behind, device, progress
    node: str = ""  # where it sat


@dataclass(frozen=True)
class WorkerPaced(Event):
    """A worker is judged otherwise beside those who do the same work."""

    kind: ClassVar[str] = "worker_paced"
    node: str
    pid: int
    pace: str  # well, slow: it gets fewer microbatches; standby, out: none; trial: it is back
    slower: float  # times, for a microbatch
    why: str


@dataclass(frozen=True)
class WorkerHeld(Event):
    """A worker has stopped in the midst of its generation, lives, and waits for the next one."""

    kind: ClassVar[str] = "worker_held"
    rank: int
    applied: int  # its state is that after this step
    whole: int | None  # the step of which it holds the whole gradient
    why: str


@dataclass(frozen=True)
class StopRequested(Event):
    kind: ClassVar[str] = "stop_requested"
    reason: str  # SIGINT, SIGTERM


@dataclass(frozen=True)
class NoticeReceived(Event):
    """These nodes will be gone `seconds` from now; leave: the run is to end by then."""

    kind: ClassVar[str] = "notice_received"
    seconds: float
    nodes: list[str]
    leave: bool
    source: str  # SIGTERM, notice


@dataclass(frozen=True)
class NoticesUnheard(Event):
    """Whoever is asked about the end of this machine does not answer; said once until it does."""

    kind: ClassVar[str] = "notices_unheard"
    reason: str


@dataclass(frozen=True)
class EmergencyPlanned(Event):
    """Which tiers will have the state in time, the surest first; [] where none will."""

    kind: ClassVar[str] = "emergency_planned"
    tiers: list[int]
    seconds: float  # the deadline
    bytes: int  # what is at risk
    reason: str


@dataclass(frozen=True)
class RequestsRefused(Event):
    """Listeners refused requests since the writer's last such event, latecomers' among them."""

    kind: ClassVar[str] = "requests_refused"
    counts: dict[str, dict[str, int]]  # listener -> reason -> how many


@dataclass(frozen=True)
class RunStopped(Event):
    """Left early, resumable; the state after `step` is committed, or peers have it."""

    kind: ClassVar[str] = "run_stopped"
    reason: str


@dataclass(frozen=True)
class RunFinished(Event):
    """Every step of the run file is done and committed."""

    kind: ClassVar[str] = "run_finished"
    absent_if_empty = frozenset({"script_error"})
    script_error: str = ""  # what went wrong in a script after its loop


@dataclass(frozen=True)
class RunFailed(Event):
    kind: ClassVar[str] = "run_failed"
    reason: str


# --- training -------------------------------------------------------------------------------
@dataclass(frozen=True)
class StepDone(Event):
    """Step `step` is applied everywhere. Written by rank 0. Seconds are of rank 0."""

    kind: ClassVar[str] = "step_done"
    absent_if_empty = frozenset({"skipped_at"})
    loss: float  # nats per token, mean over the global batch
    tokens: float  # of the global batch that carry loss; a task's weights may be fractions
    grad_norm: float  # before clipping
    learning_rate: float
    seconds: float  # whole step
    samples: int = 0
    phases: dict[str, float] = field(default_factory=dict)  # data, compute, reduce, apply, capture
    skipped_at: float = 0.0  # fp16: the loss scale of gradients that overflowed; 0: not skipped


@dataclass(frozen=True)
class MemoryUsed(Event):
    """Memory of a rank's process after step `step`; written a few times a minute."""

    kind: ClassVar[str] = "memory_used"
    rank: int
    bytes: int  # of the process alone: neither files nor memory that it shares, as an arena
    device_bytes: int = 0  # the most that tensors took on its device so far; 0: it has none


@dataclass(frozen=True)
class StateDiffers(Event):
    """After the update of a step, ranks do not hold what the others hold of the same state."""

    kind: ClassVar[str] = "state_differs"
    ranks: list[int]  # who differs from most; where there is no majority, all who differ
    tensors: list[str]
    sure: bool  # there was a majority


@dataclass(frozen=True)
class StepTraced(Event):
    """What a rank did in a step: [track, name, start, stop], seconds of its node's steady clock."""

    kind: ClassVar[str] = "step_traced"
    rank: int
    spans: list[list[Any]]


@dataclass(frozen=True)
class BatchFed(Event):
    """The data ledger of one rank for one step: what was really fed to the model.

    Each entry is {"microbatch": j, "source": name or "", "start": p, "stop": q, "hash": hex,
    "skipped": reason or ""}: positions [p, q) of the global sample order, and the xxh3 of the
    tokens as the model received them.
    """

    kind: ClassVar[str] = "batch_fed"
    rank: int
    entries: list[dict[str, Any]]


@dataclass(frozen=True)
class Evaluated(Event):
    kind: ClassVar[str] = "evaluated"
    loss: float  # nats per token, or as a task counts
    bits_per_byte: float | None  # None: the data is no text
    tokens: float
    seconds: float


@dataclass(frozen=True)
class NonFinite(Event):
    """A loss or a gradient of step `step` is NaN or infinite: nothing of it is applied."""

    kind: ClassVar[str] = "non_finite"
    rank: int  # where it was seen first
    parameter: str
    node: str = ""  # of that rank
    microbatches: list[int] = field(default_factory=list)  # that may have caused it
    again: bool = True  # they were bad once more when they were computed anew in the same place


@dataclass(frozen=True)
class Blamed(Event):
    """Who is to blame for something bad in step `step`, as far as that can be said."""

    kind: ClassVar[str] = "blamed"
    blame: str  # data: these microbatches are left out; device; unknown
    microbatches: list[int]
    devices: list[str]  # on which it was bad, first of all
    why: str


@dataclass(frozen=True)
class SettingIgnored(Event):
    """A setting that is not honoured on this machine, said once."""

    kind: ClassVar[str] = "setting_ignored"
    key: str
    reason: str


@dataclass(frozen=True)
class AttentionChosen(Event):
    """How attention stays inside packed documents in a generation. Written by rank 0."""

    kind: ClassVar[str] = "attention_chosen"
    way: str  # blocks, varlen
    reason: str


@dataclass(frozen=True)
class FaultInjected(Event):
    """A fault that was ordered is about to happen. Written before it is brought about."""

    kind: ClassVar[str] = "fault_injected"
    number: int
    fault: str
    target: str  # "rank 2", "the mover of b", ...
    point: str  # of the step


# --- checkpoints ----------------------------------------------------------------------------
@dataclass(frozen=True)
class CheckpointCaptured(Event):
    kind: ClassVar[str] = "checkpoint_captured"
    rank: int
    seconds: float  # training was blocked for this long, in all
    bytes: int
    copy_seconds: float = 0.0  # from the begin of the copy to its header, computing meanwhile
    fence_seconds: float = 0.0  # of `seconds`: waiting for the rest of the copy before the vote
    durable: bool = True  # False: it stays in memory


@dataclass(frozen=True)
class SaveInterval(Event):
    """A new decision how often to save into a tier. Written by rank 0."""

    kind: ClassVar[str] = "save_interval"
    tier: int
    seconds: float  # 0: never on its own account
    reason: str


@dataclass(frozen=True)
class CheckpointSkipped(Event):
    kind: ClassVar[str] = "checkpoint_skipped"
    rank: int
    reason: str


@dataclass(frozen=True)
class CheckpointCommitted(Event):
    kind: ClassVar[str] = "checkpoint_committed"
    key: str
    bytes: int
    seconds: float  # from the first captured header to the commit object


@dataclass(frozen=True)
class CheckpointFailed(Event):
    kind: ClassVar[str] = "checkpoint_failed"
    reason: str
    generation: int = 0  # that captured it; a newer one than that made it fail, where it is older


@dataclass(frozen=True)
class CheckpointRestored(Event):
    kind: ClassVar[str] = "checkpoint_restored"
    rank: int
    key: str
    bytes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)  # open, plan: wall; read, verify, copy:
    # summed over the threads that did it side by side
    sources: dict[str, int] = field(default_factory=dict)  # bytes read, by source


@dataclass(frozen=True)
class RestorePointFound(Event):
    """The state after `step` is what the generation begins from."""

    kind: ClassVar[str] = "restore_point_found"
    key: str
    durable: bool  # False: it lies in memory alone
    seconds: float  # to find and open it


@dataclass(frozen=True)
class SourceRejected(Event):
    """A source had some bytes of a checkpoint not whole, and another one gave them."""

    kind: ClassVar[str] = "source_rejected"
    rank: int  # that read; -1: whoever chose what to begin from
    source: str
    key: str
    reason: str


@dataclass(frozen=True)
class SnapshotComplete(Event):
    """This node's memory holds the part of each of its ranks of the state after `step`, hashed."""

    kind: ClassVar[str] = "snapshot_complete"
    bytes: int
    seconds: float  # from the first rank's announcement


@dataclass(frozen=True)
class SnapshotDropped(Event):
    """A snapshot in memory had to go before there was a newer one."""

    kind: ClassVar[str] = "snapshot_dropped"
    reason: str


@dataclass(frozen=True)
class CheckpointRejected(Event):
    kind: ClassVar[str] = "checkpoint_rejected"
    key: str
    reason: str


@dataclass(frozen=True)
class CheckpointRemoved(Event):
    kind: ClassVar[str] = "checkpoint_removed"
    key: str


@dataclass(frozen=True)
class CheckpointUploaded(Event):
    """The bucket holds a checkpoint too."""

    kind: ClassVar[str] = "checkpoint_uploaded"
    key: str
    bytes: int  # sent: what an earlier attempt had sent lay there already
    seconds: float


@dataclass(frozen=True)
class UploadFailed(Event):
    """A checkpoint did not get into the bucket; said once until one has."""

    kind: ClassVar[str] = "upload_failed"
    key: str
    reason: str


@dataclass(frozen=True)
class SnapshotKept(Event):
    """Another machine's memory holds the state after `step`, as far as this node's ranks own it."""

    kind: ClassVar[str] = "snapshot_kept"
    peer: str
    bytes: int
    seconds: float  # from its turn to the last answer
    spared: int = 0  # of `bytes`: what the peer held already, so that it did not travel
    skipped: int = 0  # steps that waited for this peer and gave way since it last kept one


@dataclass(frozen=True)
class PeerFailed(Event):
    """A machine that was to keep snapshots did not; said once until it has kept one again."""

    kind: ClassVar[str] = "peer_failed"
    peer: str
    reason: str


def to_json(record: Record) -> dict[str, Any]:
    """A flat, JSON-safe dictionary; the event's fields stand beside the envelope's."""
    kind, body = record.event.kind, record.event.body
    return {"v": JOURNAL_VERSION, "kind": kind, **vars(record), "event": body}


def from_json(value: dict[str, Any]) -> Record | None:
    """The record, or None for a kind that this version does not know."""
    if value["kind"] not in _KINDS:
        return None
    place = value["generation"], value["writer"], value["sequence"], value["time"]
    return Record(*place, event_from_json(value["kind"], value["event"]))


def event_from_json(kind: str, value: dict[str, Any]) -> Event:
    """An event from its fields. Raises KeyError for an unknown kind."""
    cls = _KINDS[kind]
    known = {f.name for f in fields(cls)}
    return cls(**{k: v for k, v in value.items() if k in known})


@dataclass(frozen=True)
class StepPredicted(Event):
    """A generation's plan, written when the generation starts."""

    kind: ClassVar[str] = "step_predicted"
    seconds: float  # of a step
    parts: dict[str, float]  # seconds by what they go to; they add up to `seconds`
    bytes: int  # on the fullest device
    source: str  # of the devices' speeds: "assumed", or "measured 2026-11-26"


@dataclass(frozen=True)
class ShardAwaited(Event):
    """A batch waits for a shard, since the dataset's address does not answer. Written once for each
    wait, and once more, without a reason, when the shard is here."""

    kind: ClassVar[str] = "shard_awaited"
    rank: int
    key: str
    reason: str = ""

    @property
    def text(self) -> str:
        if self.reason:
            return f"rank {self.rank} waits for {self.key} of the dataset: {self.reason}"
        return f"{self.key} of the dataset, which rank {self.rank} waited for, is here"
