"""Requests to the mover by its verbs, and its answers. `protocol` says how they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.checkpoint.bucket.pending_upload import PendingUpload
from holdfast.checkpoint.memory.arena import SlotHeader
from holdfast.checkpoint.peers.config import Peer
from holdfast.checkpoint.peers.source import BlobHolder
from holdfast.core.json_parsing import Json, JsonMessage, JsonObject
from holdfast.core.sharding.state_table import StateTable
from holdfast.layout import Topology


@dataclass(frozen=True)
class Request(JsonMessage):
    """Base of what is asked of a mover."""

    verb: ClassVar[str]


@dataclass(frozen=True)
class Nothing(JsonMessage):
    """The answer to a request that only says something."""


@dataclass(frozen=True)
class ExpectRequest(Request):
    """Begin a generation."""

    verb = "expect"
    absent_if_default = frozenset({"machines", "sources", "placement", "key"})
    topology: Topology
    table: StateTable
    start: int | None  # the step whose state the generation begins from
    stored: bool = True  # that state is a checkpoint in the run store
    machines: tuple[Peer, ...] | None = None  # movers that take part; None: this one alone
    sources: tuple[Peer, ...] | None = None  # more movers that may have the starting state
    placement: dict[str, list[str]] | None = None  # of copies, by owner
    key: str | None = None  # of a starting state that only memory holds


@dataclass(frozen=True)
class ArenaRequest(Request):
    """Make or find a rank's arena; its descriptor comes with the answer."""

    verb = "arena"
    absent_if_default = frozenset({"patience", "numa_node"})
    rank: int
    blob_bytes: int
    slots: int
    let_go: bool = False  # the process writes no more into the rank's older arenas
    numa_node: int | None = None  # where new memory should lie; None: anywhere
    patience: float | None = None  # seconds to wait for the announcement of the generation


@dataclass(frozen=True)
class CaptureRequest(Request):
    """A slot holds a rank's state after a step."""

    verb = "captured"
    rank: int
    step: int
    slot: int
    sequence: int  # of the write into the slot
    meta: JsonObject  # goes into the manifest
    durable: bool = True  # to be saved in the run store
    copied: bool | None = None  # to peers; None: as their rule says
    uploaded: bool = True  # to the bucket


@dataclass(frozen=True)
class SkipRequest(Request):
    """A rank has no snapshot of a step."""

    verb = "skipped"
    rank: int
    step: int
    reason: str


@dataclass(frozen=True)
class OrphanedSavesRequest(Request):
    """A rank had handed saves over to a mover that has ended."""

    verb = "unheard"
    rank: int
    steps: list[int]


@dataclass(frozen=True)
class FreeSlotRequest(Request):
    """Wait for a free slot of a rank."""

    verb = "wait_free"
    rank: int
    wait: float  # seconds


@dataclass(frozen=True)
class FreeSlotReply(JsonMessage):
    free: bool


@dataclass(frozen=True)
class SaveEndRequest(Request):
    """Wait for the end of a save."""

    verb = "settle"
    step: int
    wait: float  # seconds


@dataclass(frozen=True)
class SaveEndReply(JsonMessage):
    ended: bool
    reason: str | None  # why it is not committed, or why it waits; None: it is, or is under way


@dataclass(frozen=True)
class DrainRequest(Request):
    """Wait for the end of what is under way."""

    verb = "drain"
    wait: float  # seconds
    durable: bool = True  # also for saves whose step is complete in memory


@dataclass(frozen=True)
class DrainReply(JsonMessage):
    drained: bool


@dataclass(frozen=True)
class RestorePointRequest(Request):
    """Choose what a generation begins from."""

    verb = "newest"
    absent_if_default = frozenset({"machines"})
    drain: float  # seconds to wait for what is under way
    tried: dict[str, str] = field(default_factory=dict)  # keys that readers found corrupt, and why
    machines: tuple[Peer, ...] | None = None  # whose memory is searched too


@dataclass(frozen=True)
class RestorePoint(JsonMessage):
    """The state that a restart begins from."""

    key: str | None  # None: no checkpoint has ever been committed
    step: int
    generation: int
    meta: Mapping[str, Json]
    rejected: tuple[tuple[str, str], ...]  # (key, reason), newest first
    durable: bool = True  # False: it lies in memory alone
    seconds: float = 0.0  # to find and open it
    placement: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of copies, in force


@dataclass(frozen=True)
class HoldingsRequest(Request):
    """Which blobs of a checkpoint are in memory?"""

    verb = "holdings"
    key: str  # of the commit object


@dataclass(frozen=True)
class MappedBlob(JsonMessage):
    """A blob in this mover's memory."""

    key: str
    file: int  # place of its memory file among the descriptors that come with the answer
    slot: int
    header: SlotHeader


@dataclass(frozen=True)
class HoldingsReply(JsonMessage):
    commit: str  # the bytes of the commit object
    held: tuple[MappedBlob, ...]  # blobs in this mover's memory
    peers: tuple[BlobHolder, ...] = ()  # where the other blobs are


@dataclass(frozen=True)
class HoldersRequest(Request):
    """Which peers have these blobs?"""

    verb = "holders"
    keys: list[str]


@dataclass(frozen=True)
class HoldersReply(JsonMessage):
    peers: tuple[BlobHolder, ...]


@dataclass(frozen=True)
class DamageRequest(Request):
    """Read every byte of a checkpoint."""

    verb = "damage"
    key: str  # of the commit object


@dataclass(frozen=True)
class DamageReply(JsonMessage):
    problem: str | None  # None: the checkpoint is intact


@dataclass(frozen=True)
class EventsRequest(Request):
    """What has happened?"""

    verb = "events"
    since: int  # mark of the last answer; 0 at first
    wait: float  # seconds


@dataclass(frozen=True)
class EventsReply(JsonMessage):
    events: list[tuple[str, JsonObject]]  # kind and fields of each
    next: int  # mark for the next request


@dataclass(frozen=True)
class UploadRequest(Request):
    """Wait until the bucket has the newest checkpoint."""

    verb = "upload"
    wait: float  # seconds


@dataclass(frozen=True)
class UploadReply(JsonMessage):
    left: PendingUpload | None  # None: it has arrived, or there is no bucket


@dataclass(frozen=True)
class StatusRequest(Request):
    """Counts and states, for people and metrics."""

    verb = "status"


@dataclass(frozen=True)
class StatusReply(JsonMessage):
    absent_if_default = frozenset({"peers"})
    generation: int
    arenas: JsonObject  # by rank
    saves: JsonObject  # counts of saves
    memory: list[tuple[int, int]]  # (generation, step) of complete snapshots
    peers: JsonObject | None = None  # None: the mover has no listener for peers


REQUESTS: Mapping[str, type[Request]] = {kind.verb: kind for kind in Request.__subclasses__()}
"""By verb."""
