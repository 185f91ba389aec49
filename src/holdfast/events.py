"""Every typed event of the journal.

The `Record` around an event says who wrote it, and when. Records merge by (generation, step,
writer, sequence); `time` is compared only between records of one writer. Metrics, reports, the
goodput ledger and the data audit derive from these and nothing else. A newer program reads all
older versions, and drops keys that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

JOURNAL_VERSION = 1
_KINDS: dict[str, type[Event]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Event:
    """Base of all events, each a frozen dataclass of its own kind."""

    step: int = field(default=0, kw_only=True)  # that it belongs to; 0: before the first
    kind: ClassVar[str]  # its name in the journal: part of the format, never changed
    absent_if_empty: ClassVar[Set[str]]  # newer fields: older files lack them
    names: ClassVar[Set[str]]  # of its fields

    def __init_subclass__(cls, *, kind: str, absent_if_empty: Set[str] = frozenset()) -> None:
        if kind in _KINDS:
            raise TypeError(f"event kind {kind!r} is taken by {_KINDS[kind].__name__}")
        cls.kind, cls.absent_if_empty, _KINDS[kind] = kind, absent_if_empty, cls
        cls.names = {each.name for each in fields(dataclass(frozen=True)(cls))}

    @property
    def body(self) -> dict[str, Any]:
        """Its fields by name, to be written and not to be changed: what they hold is no copy."""
        return {k: v for k, v in vars(self).items() if v or k not in self.absent_if_empty}

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "event": self.body}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Event:
        """Parse an event. Raises KeyError for an unknown kind."""
        return event_from_json(value["kind"], value["event"])


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
class RunStarted(Event, kind="run_started", absent_if_empty={"plan", "tags"}):
    """An agent opened the run folder; `resumed` when it had been opened before."""

    run: str
    config_hash: str
    dataset_version: str
    resumed: bool = False
    plan: str = ""  # where a planned layout came from; "" if the run file gives it
    tags: dict[str, str] = field(default_factory=dict)  # whom the session's cost belongs to


class RunBranched(Event, kind="run_branched"):
    """This run continues another one, which dealt the samples of all steps up to `step`."""

    parent: str  # name of the parent run
    parent_id: str  # its run id, "" for one of an older version
    folder: str  # path of its run folder when the branch was made
    key: str  # of the commit object that was copied
    changed: list[str]  # keys with other values than the parent's, as key=value


class GenerationStarted(Event, kind="generation_started", absent_if_empty={"cause"}):
    """Membership `generation` of the record begins from the state after `step`."""

    topology: dict[str, Any]
    reason: str  # start, resume, worker_lost, hang, non_finite, ...
    restored_from: str | None = None  # key of the commit object, None for initial weights
    rung: int = -1  # of the recovery ladder (docs/internals/elastic.md); -1: nothing was recovered
    came_from: list[int | None] | None = None  # live: by rank, whose state it went on with
    cause: str = ""  # what ended the generation before, for people


class WorkerStarted(Event, kind="worker_started"):
    rank: int
    pid: int
    node: str


class WorkerReady(Event, kind="worker_ready", absent_if_empty={"device", "processor", "threads"}):
    """The worker restored its state and is about to compute step `step` + 1."""

    rank: int
    seconds: float  # from fork to ready
    device: str = ""  # with backends, versions and transport: "cuda:1, nccl 2.28.9, NVLink"
    processor: str = ""  # what the bits depend on: "x86_64 AVX512, torch 2.11.0"
    threads: int = 0  # of a CPU; 0: an older version wrote this


NOT_HEARD = "not heard"
"""The beginning of the cause of a node that the coordinator gave up because it fell silent."""


class WorkerLost(Event, kind="worker_lost"):
    rank: int
    pid: int  # 0: not known
    cause: str  # "SIGKILL", "exit 1", "no progress for 30 s", ...
    noticed_by: str  # exit, peer, halt; heartbeat: of its node; of one that stands still: stopped,
    # silent, behind, device, progress
    node: str = ""  # where it sat


class WorkerPaced(Event, kind="worker_paced", absent_if_empty={"waited_share", "work_ratio"}):
    """A worker is judged otherwise beside those who do the same work."""

    node: str
    pid: int
    pace: str  # well, slow: it gets fewer microbatches; standby, out: none; trial: it is back
    slower: float  # times, for a microbatch
    why: str
    waited_share: float = 0.0  # of the additional seconds: waiting for a processor
    work_ratio: float = 0.0  # elements of its microbatches, relative to the rest; 0: not known


class WorkerHeld(Event, kind="worker_held"):
    """A worker has stopped in the midst of its generation, lives, and waits for the next one."""

    rank: int
    applied: int  # its state is that after this step
    whole: int | None  # the step of which it holds the whole gradient
    why: str


class StopRequested(Event, kind="stop_requested"):
    reason: str  # SIGINT, SIGTERM


class NoticeReceived(Event, kind="notice_received"):
    """These nodes will be gone `seconds` from now; leave: the run is to end by then."""

    seconds: float
    nodes: list[str]
    leave: bool
    source: str  # SIGTERM, notice


class PredictedMove(Event, kind="predicted_move"):
    """A node's workers move to other nodes, because it is likely to be lost within `seconds`."""

    node: str
    seconds: float
    reason: str


class PredictionFailed(Event, kind="prediction_failed"):
    """The time of an alarm is over, and its node is still there; moved: its workers had moved."""

    node: str
    moved: bool


class NoticesUnheard(Event, kind="notices_unheard"):
    """Whoever is asked about the end of this machine does not answer; said once until it does."""

    reason: str


class EmergencyPlanned(Event, kind="emergency_planned"):
    """Which tiers will have the state in time, the surest first; [] where none will."""

    tiers: list[int]
    seconds: float  # the deadline
    bytes: int  # what is at risk
    reason: str


class RequestsRefused(Event, kind="requests_refused", absent_if_empty={"requests"}):
    """Listeners refused requests since the writer's last such event, latecomers' among them."""

    counts: dict[str, dict[str, int]]  # listener -> reason -> how many
    # listener -> reason -> the newest, "POST /path"; only paths of the listener's own table
    requests: dict[str, dict[str, str]] = field(default_factory=dict)


class RunStopped(Event, kind="run_stopped"):
    """Left early, resumable; the state after `step` is committed, or peers have it."""

    reason: str


class RunFinished(Event, kind="run_finished", absent_if_empty={"script_error"}):
    """Every step of the run file is done and committed."""

    script_error: str = ""  # what went wrong in a script after its loop


class RunFailed(Event, kind="run_failed"):
    reason: str


# --- training -------------------------------------------------------------------------------
class StepDone(
    Event, kind="step_done", absent_if_empty={"skipped_at", "exchanges", "metrics", "counts"}
):
    """Step `step` is applied everywhere. Written by rank 0. Seconds are of rank 0."""

    loss: float  # nats per token, mean over the global batch
    tokens: float  # of the global batch that carry loss; a task's weights may be fractions
    grad_norm: float  # before clipping
    learning_rate: float
    seconds: float  # whole step
    samples: int = 0
    phases: dict[str, float] = field(default_factory=dict)  # data, compute, reduce, apply, capture
    skipped_at: float = 0.0  # fp16: the loss scale of gradients that overflowed; 0: not skipped
    exchanges: dict[str, list[float]] = field(default_factory=dict)
    """Kind of exchange -> [seconds under way, seconds for which the passes waited]; CPUs only."""
    metrics: dict[str, float] = field(default_factory=dict)  # means of an objective's sums
    counts: str = ""  # what `tokens` counts, if it is neither tokens nor samples: pairs, rows

    @property
    def unit(self) -> str:
        """What `tokens` counts: samples, if each counts for one."""
        if self.counts:
            return self.counts
        return "samples" if self.tokens == self.samples else "tokens"


class MemoryUsed(Event, kind="memory_used", absent_if_empty={"transfers"}):
    """Memory of a rank's process after step `step`; written a few times a minute."""

    rank: int
    bytes: int  # of the process alone: neither files nor memory that it shares, as an arena
    device_bytes: int = 0  # the most that tensors took on its device so far; 0: it has none
    # Since the last sample, by kind: [bytes, seconds of copies, seconds that the rank waited].
    transfers: dict[str, list[float]] = field(default_factory=dict)


class StateDiffers(Event, kind="state_differs"):
    """After the update of a step, ranks do not hold what the others hold of the same state."""

    ranks: list[int]  # who differs from most; where there is no majority, all who differ
    tensors: list[str]
    sure: bool  # there was a majority


class WeightsDigest(Event, kind="weights_digest"):
    """SHA-256 of the weights after step `step`, of the part that a rank owns in its generation
    (`training.engine.weights_digest`). Written every train.digest_every steps."""

    rank: int
    sha256: str


class OuterRound(
    Event, kind="outer_round", absent_if_empty={"inner_s", "codec_s", "waited_s", "fates"}
):
    """A rank's part of round `step` of a run with `outer`, after its update. Each rank writes it;
    `sha256` is the same on all of them, and for any number of workers in mode fixed."""

    rank: int
    sha256: str  # of all weights
    learners: list[int]  # that this rank computed; none: it only tells of the weights
    sent_bytes: int  # of the learners' changes and their sums, that left this rank
    inner_s: float = 0.0  # of the inner steps of all its learners
    codec_s: float = 0.0  # of encoding its learners' changes, and decoding all
    waited_s: float = 0.0  # for coded changes of other ranks
    # In mode free the ledger of the round: `core.data.learner_fates.LearnerFate` of each learner.
    fates: list[dict[str, Any]] = field(default_factory=list)


class SiteLinkMeasured(Event, kind="site_link_measured"):
    """The link between two of `cluster.sites`, measured when a generation started."""

    site: str
    other: str
    mbit_s: float  # of the slower direction, with both in use
    latency_ms: float  # one way


class LearnerChecked(Event, kind="learner_checked", absent_if_empty={"overruled"}):
    """A rank has computed the round of another rank's learner again. The checker writes it. If it
    found something else, a third rank does so too, and its verdict counts."""

    learner: int
    rank: int  # that computed it first
    checker: int  # -1: none
    verdict: str  # equal, differs, other_state, no_checker (`parallel/outer/trust.py`)
    overruled: list[int] = field(default_factory=list)  # the rank that found something else before


class ChangeLeftOut(Event, kind="change_left_out"):
    """The change of a learner does not count in the round."""

    learner: int
    rank: int  # that computed it
    node: str
    reason: str  # a phrase
    count: int  # changes of this learner that were left out so far


class ServerUpdates(Event, kind="server_updates"):
    """The updates of step `step` of a run with `server`. One rank writes them."""

    is_synchronous: bool
    width: int  # microbatches of a synchronous update
    # By server, in the order in which it applied them: [number of the update in the run, worker,
    # microbatch, updates that its weights lacked, tokens].
    updates: list[list[list[int]]]
    straggling: float  # time that lockstep would lose, as a part of the computation


class UpdatesAdapted(Event, kind="updates_adapted"):
    """From the next step on, a run with `server` makes other updates."""

    is_synchronous: bool
    width: int  # microbatches of a synchronous update
    straggling: float  # of this step
    noise_scale: float  # B_simple, in samples; 0: not known


class StepTraced(Event, kind="step_traced"):
    """What a rank did in a step: [track, name, start, stop], seconds of its node's steady clock."""

    rank: int
    spans: list[list[Any]]


class StepsProfiled(Event, kind="steps_profiled"):
    """A rank's profile of the steps from `first` to `step` is in a file of its node."""

    rank: int
    first: int
    path: str
    request: int = 0  # number of the request; 0: the run file asked for it
    problem: str = ""  # why there is no file; "": there is one


class BatchFed(Event, kind="batch_fed"):
    """The data ledger of one rank for one step: what was really fed to the model.

    Each entry is {"microbatch": j, "source": name or "", "start": p, "stop": q, "hash": hex,
    "skipped": reason or ""}: positions [p, q) of the global sample order, and the xxh3 of the
    tokens as the model received them.
    """

    rank: int
    entries: list[dict[str, Any]]


class Evaluated(Event, kind="evaluated", absent_if_empty={"metrics"}):
    loss: float  # nats per token, or as a task counts
    bits_per_byte: float | None  # None: the data is no text
    tokens: float
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)  # as in `StepDone`


class TaskEvaluated(Event, kind="task_evaluated", absent_if_empty={"metrics"}):
    """The checkpoint of `step` has a result of a task. Written at any time, even after the run."""

    task: str
    metric: str  # that `score` is of: exact_match, accuracy, nats_per_token, ...
    score: float
    items: int  # rows of the task
    higher_is_better: bool
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)  # further numbers, by name


class NonFinite(Event, kind="non_finite"):
    """A loss or a gradient of step `step` is NaN or infinite: nothing of it is applied."""

    rank: int  # where it was seen first
    parameter: str
    node: str = ""  # of that rank
    microbatches: list[int] = field(default_factory=list)  # that may have caused it
    again: bool = True  # they were bad once more when they were computed anew in the same place


class Blamed(Event, kind="blamed"):
    """Who is to blame for something bad in step `step`, as far as that can be said."""

    blame: str  # data: these microbatches are left out; device; unknown
    microbatches: list[int]
    devices: list[str]  # on which it was bad, first of all
    why: str


class SettingIgnored(Event, kind="setting_ignored"):
    """A setting that is not honoured on this machine, said once."""

    key: str
    reason: str


class AttentionChosen(Event, kind="attention_chosen"):
    """How attention stays inside packed documents in a generation. Written by rank 0."""

    way: str  # blocks, varlen
    reason: str


class AttentionKernel(Event, kind="attention_kernel"):
    """The kernel that computes full attention in a generation. Written by rank 0."""

    kernel: str  # of torch.nn.attention.SDPBackend: flash_attention, cudnn_attention, math, ...
    device: str  # type of the device


class FaultInjected(Event, kind="fault_injected"):
    """A fault that was ordered is about to happen. Written before it is brought about."""

    number: int
    fault: str
    target: str  # "rank 2", "the mover of b", ...
    point: str  # of the step


# --- checkpoints ----------------------------------------------------------------------------
class CheckpointCaptured(Event, kind="checkpoint_captured"):
    rank: int
    seconds: float  # training was blocked for this long, in all
    bytes: int
    copy_seconds: float = 0.0  # from the begin of the copy to its header, computing meanwhile
    fence_seconds: float = 0.0  # of `seconds`: waiting for the rest of the copy before the vote
    durable: bool = True  # False: it stays in memory


class SaveInterval(Event, kind="save_interval"):
    """A new decision how often to save into a tier. Written by rank 0."""

    tier: int
    seconds: float  # 0: never on its own account
    reason: str


class CheckpointSkipped(Event, kind="checkpoint_skipped"):
    rank: int
    reason: str


class CheckpointCommitted(Event, kind="checkpoint_committed", absent_if_empty={"place"}):
    key: str
    bytes: int
    seconds: float  # from the first captured header to the commit object
    place: str = ""  # where it lies, if not in the run store


class CheckpointFailed(Event, kind="checkpoint_failed"):
    reason: str
    generation: int = 0  # that captured it; a newer one than that made it fail, where it is older


class SaveWaiting(Event, kind="save_waiting"):
    """The run store does not take the save of the last step or of a stop; written once a minute."""

    reason: str
    folder: str  # "": the reason says it
    remedy: str  # "": the wait ends by itself
    missing_bytes: int  # 0: not known


class CheckpointRestored(Event, kind="checkpoint_restored"):
    rank: int
    key: str
    bytes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)  # open, plan: wall; read, verify, copy:
    # summed over the threads that did it side by side
    sources: dict[str, int] = field(default_factory=dict)  # bytes read, by source


class RestorePointFound(Event, kind="restore_point_found"):
    """The state after `step` is what the generation begins from."""

    key: str
    durable: bool  # False: it lies in memory alone
    seconds: float  # to find and open it


class SourceRejected(Event, kind="source_rejected"):
    """A source had some bytes of a checkpoint not whole, and another one gave them."""

    rank: int  # that read; -1: whoever chose what to begin from
    source: str
    key: str
    reason: str


class SnapshotComplete(Event, kind="snapshot_complete"):
    """This node's memory holds the part of each of its ranks of the state after `step`, hashed."""

    bytes: int
    seconds: float  # from the first rank's announcement


class SnapshotDropped(Event, kind="snapshot_dropped"):
    """A snapshot in memory had to go before there was a newer one."""

    reason: str


class CheckpointRejected(Event, kind="checkpoint_rejected"):
    key: str
    reason: str


class CheckpointRemoved(Event, kind="checkpoint_removed"):
    key: str


class CheckpointUploaded(Event, kind="checkpoint_uploaded"):
    """The bucket holds a checkpoint too."""

    key: str
    bytes: int  # sent: what an earlier attempt had sent lay there already
    seconds: float


class UploadFailed(Event, kind="upload_failed"):
    """A checkpoint did not get into the bucket; said once until one has."""

    key: str
    reason: str


class SnapshotKept(Event, kind="snapshot_kept"):
    """Another machine's memory holds the state after `step`, as far as this node's ranks own it."""

    peer: str
    bytes: int
    seconds: float  # from its turn to the last answer
    spared: int = 0  # of `bytes`: what the peer held already, so that it did not travel
    skipped: int = 0  # steps that waited for this peer and gave way since it last kept one


class PeerFailed(Event, kind="peer_failed"):
    """A machine that was to keep snapshots did not; said once until it has kept one again."""

    peer: str
    reason: str


class SparesChanged(Event, kind="spares_changed"):
    """The coordinator has other spares than before."""

    nodes: list[str]  # that have joined and have no place in the generation


class NodesPresent(Event, kind="nodes_present"):
    """The nodes that are in the run, spares too, and the price of each (`policy.spending`). The
    coordinator's agent writes it when a generation starts, and when the nodes have changed."""

    nodes: dict[str, dict[str, Any]]


class BudgetReached(Event, kind="budget_reached", absent_if_empty={"command"}):
    """A limit of the section `budget` is near, is passed, stops the run, or was raised."""

    action: str  # near, passed, stopped, raised
    limit: str  # max_cost (US dollars) or max_node_hours
    used: float
    most: float
    command: str = ""  # that raises it, if the run asks for that; a number follows

    @property
    def text(self) -> str:
        """What to tell the user."""
        unit = "US dollars" if self.limit == "max_cost" else "node-hours"
        if self.action == "raised":
            return f"budget.{self.limit} is now {self.most:g} {unit}"
        if self.action == "stopped":
            return ""  # the stop itself has the reason
        used = f"{self.used:.4g} of {self.most:g} {unit} are used (budget.{self.limit})"
        if self.command:
            return f"{used}. To let the run continue beyond that: {self.command} NUMBER"
        return f"{used}{': the run continues' if self.action == 'passed' else ''}"


class PauseBegun(Event, kind="pause_begun"):
    """The run saves and waits, by its section `pause`. The stop that follows has the reason."""

    value: float  # of the signal
    above: float  # the limit that it passed
    below: float  # value at which the run continues


class MajorityLacked(Event, kind="majority_lacked"):
    """A node misses the coordinator, and it reaches no majority of the last generation's nodes."""

    node: str
    reached: list[str]  # nodes that miss the coordinator too, this one included
    nodes: list[str]  # of the last generation; []: the node has a coordinator again
    seconds: float  # until it continues without the rest


class StepPredicted(Event, kind="step_predicted"):
    """A generation's plan, written when the generation starts."""

    seconds: float  # of a step
    parts: dict[str, float]  # seconds by what they go to; they add up to `seconds`
    bytes: int  # on the fullest device
    source: str  # of the devices' speeds: "assumed", or "measured 2026-11-26"


class ShardAwaited(Event, kind="shard_awaited"):
    """A batch waits for a shard, since the dataset's address does not answer. Written once for each
    wait, and once more, without a reason, when the shard is here."""

    rank: int
    key: str
    reason: str = ""

    @property
    def text(self) -> str:
        if self.reason:
            return f"rank {self.rank} waits for {self.key} of the dataset: {self.reason}"
        return f"{self.key} of the dataset, which rank {self.rank} waited for, is here"


class ReferenceProgress(Event, kind="reference_progress", absent_if_empty={"digest"}):
    """Log-probabilities under the reference model are computed, or are complete."""

    key: str  # the folder below `reference` of the dataset
    done: int  # pieces that are stored
    pieces: int
    seconds: float  # since this generation looked at them
    digest: str = ""  # of all pieces, once they are complete

    @property
    def text(self) -> str:
        what = f"reference log-probabilities {self.key}"
        if self.digest:
            return f"{what}: complete ({self.pieces:,} pieces, digest {self.digest})"
        return f"{what}: {self.done:,} of {self.pieces:,} pieces are stored, computing the rest"


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


def event_from_json(kind: str, value: Mapping[str, Any]) -> Event:
    """An event from its fields. Raises KeyError for an unknown kind."""
    cls = _KINDS[kind]
    return cls(**{k: v for k, v in value.items() if k in cls.names})


class RoleMissing(Event, kind="role_missing"):
    """No actor, or no scorer, answers. The trainers do its work until one does."""

    role: str  # actor or scorer
    rank: int  # that noticed it

    @property
    def text(self) -> str:
        """What to tell the user."""
        work = "generate" if self.role == "actor" else "rate completions"
        return (
            f"no {self.role} answers, so the trainers {work} themselves: the same bits, but later "
            f"(rollout.{self.role}s)"
        )


class RoleExited(Event, kind="role_exited"):
    """A process of an actor or a scorer has exited. Another one takes its place."""

    name: str
    node: str
    exit_code: int  # below 0: the signal that killed it
    tokens: int | None = None  # that an actor drew and had not handed in; None: not known


class CompletionsShown(Event, kind="completions"):
    """A group of completions that a step trains on, as an example."""

    prompt: int  # its number
    asked: str  # the prompt as text, cut
    replies: list[str]  # cut
    rewards: list[float]  # of the replies; none of a run without rewards
    is_filtered: bool = False  # nothing is learned from it
