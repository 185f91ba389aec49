"""What the engine, a cost model and a policy say to each other. Pure.

A cost model says what machines can do. It knows the throughput on n nodes, the bytes of the state,
and the seconds of each part of a recovery. A policy says what a trainer does: which layout it
takes, what a loss costs it, when it saves. Many policies run over one cost model, so a comparison
of them is one of decisions. The engine (`loop.py`) keeps time, work, saves and money.

Seconds, bytes and tokens everywhere. Time is the time of the trace, from 0.

No code alters a Change, a Transition, a Decision or a plan once it is made. They are not frozen: a
frozen one takes three times as long to make, and a replay makes several for each event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, runtime_checkable

from holdfast.layout import Topology
from holdfast.policy.membership.state import MembershipRules
from holdfast.policy.recovery.state_parts import StateSizes
from holdfast.policy.saving.tiers import DISK

LABELS = ("productive", "checkpoint", "startup", "recovery", "rework", "stopped", "other")
"""What a second of a simulated run is spent on. The names are those of
`report/ledger/timeledger.py`, of which a simulation leaves out communication, data_wait and
evaluation: they are part of a step."""


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A layout at work.

    layout: a name for people. nodes: that it uses. replicas: complete copies of the model, on
    `nodes // replicas` nodes each. tokens_per_s: without failures and saves. step_s: 0 if steps do
    not matter. watts: of all its nodes while they train. nodes_per_replica: follows. topology: on
    nodes "0", "1", ...; None: a node is a rank. sizes: of the state by layer; None: one layer.
    """

    layout: str
    nodes: int
    tokens_per_s: float
    step_s: float = 0.0
    replicas: int = 1
    watts: float = 0.0
    nodes_per_replica: int = field(init=False, repr=False, compare=False)
    topology: Topology | None = field(default=None, repr=False, compare=False)
    sizes: StateSizes | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        each = max(1, self.nodes // self.replicas) if self.replicas > 1 else self.nodes or 1
        object.__setattr__(self, "nodes_per_replica", each)


@dataclass(frozen=True)
class Costs:
    """Constants of machines that every policy pays alike.

    state_bytes: of the complete training state. detection_s: until a loss is noticed. start_s: of
    processes, from nothing to the first step, without loading. regroup_s: until survivors have a
    new membership. communicator_s: until an accelerator's groups work again. store_bandwidth: of
    the run store, shared by all nodes. node_store_bandwidth: of one node to it. peer_bandwidth: of
    one node to another. save_pause_s: training waits for a save in the background. sent_share:
    of the time that a save's bytes take on the network, the part that training feels.
    staging_bytes: memory of one node for snapshots; inf: enough. usd_per_node_hour,
    grams_co2_per_kwh: where no event gives another one. busy_watts, idle_watts: of one node.
    """

    state_bytes: float = 0.0
    detection_s: float = MembershipRules.node_timeout_s
    start_s: float = 30.0
    regroup_s: float = 0.6
    communicator_s: float = 2.0
    store_bandwidth: float = inf
    node_store_bandwidth: float = 1e9
    peer_bandwidth: float = 1e9
    save_pause_s: float = 0.002
    sent_share: float = 0.1
    staging_bytes: float = inf
    usd_per_node_hour: float = 0.0
    grams_co2_per_kwh: float = 0.0
    busy_watts: float = 0.0
    idle_watts: float = 0.0

    def store_s(self, nodes: int, copies: int = 1) -> float:
        """Seconds in which so many nodes move the state to or from the run store, each its share.
        copies: times that all of it is read, once for each replica."""
        if not self.state_bytes:
            return 0.0
        bandwidth = min(self.store_bandwidth, max(1, nodes) * self.node_store_bandwidth)
        return copies * self.state_bytes / bandwidth

    def peer_s(self, nodes: int) -> float:
        """Seconds in which each node sends its share of the state to another one."""
        return self.state_bytes / max(1, nodes) / self.peer_bandwidth


class CostModel(Protocol):
    """What the machines can do. `point` is asked often: an implementation remembers."""

    @property
    def costs(self) -> Costs: ...

    @property
    def wanted(self) -> int:
        """Nodes beyond which the run does not grow."""
        ...

    def point(self, nodes: int) -> OperatingPoint | None:
        """The fastest layout on at most so many nodes; None: nothing fits, the run waits."""
        ...

    def shaped(self, replicas: int, nodes_per_replica: int) -> OperatingPoint | None:
        """The layout of so many replicas on so many nodes each; None: it does not fit."""
        ...


@dataclass(slots=True)
class Node:
    """A node that is there. slow: factor on the time of its steps, at least 1. leaves_s: when a
    notice says that it goes; inf without one. The engine alone changes it."""

    name: str
    zone: str = ""
    gpu: str = ""
    joined_s: float = 0.0
    devices: float = 1.0
    slow: float = 1.0
    leaves_s: float = inf


@dataclass(slots=True)
class Change:
    """What changed at one instant. lost: places in `View.used` of nodes that went, rising; a node
    that was not in use is not mentioned. joined, noticed, slowed: names. review: the policy
    had asked to be called at this time."""

    lost: tuple[int, ...] = ()
    joined: tuple[str, ...] = ()
    noticed: tuple[str, ...] = ()
    slowed: tuple[str, ...] = ()
    review: bool = False


class View(Protocol):
    """What a policy sees. It changes nothing of it."""

    @property
    def now(self) -> float: ...

    @property
    def nodes(self) -> Mapping[str, Node]:
        """Those that are there, the oldest first; lost ones are removed already."""
        ...

    @property
    def used(self) -> Sequence[str]:
        """Nodes of the layout in the order of ranks, those that were just lost included."""
        ...

    @property
    def point(self) -> OperatingPoint | None:
        """The layout at work, or the one that a pause leads to; None: the run waits."""
        ...

    @property
    def pause_left(self) -> float:
        """Seconds until the run trains again; 0 while it trains."""
        ...

    @property
    def tokens(self) -> float:
        """Trained and not lost."""
        ...

    @property
    def intensity(self) -> float:
        """Grams of CO2 a kilowatt-hour, the mean of the nodes that are there."""
        ...

    @property
    def unsaved_s(self) -> float:
        """Seconds of work since the newest save, of any tier."""
        ...


NOTHING, STEP, SAVE = "nothing", "step", "save"
"""What a transition loses: nothing, the unfinished step, or all since the newest usable save."""


@dataclass(slots=True)
class Transition:
    """The run takes another layout.

    point: the layout that follows; None: the run waits for nodes. pauses: (label, seconds), in
    order. loses: NOTHING, STEP or SAVE. tiers: whose saves survived, for SAVE; saves of other tiers
    are dropped. used: names of the nodes in the order of ranks; None: the engine keeps those in use
    and adds the oldest of the rest. read: bytes by tier that are read. reason: for people. rung: of
    the recovery ladder, -1 without one. A transition during a pause replaces what is left of it.
    """

    point: OperatingPoint | None
    pauses: tuple[tuple[str, float], ...] = ()
    loses: str = NOTHING
    tiers: tuple[int, ...] = (DISK,)
    used: tuple[str, ...] | None = None
    read: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""
    rung: int = -1


@dataclass(slots=True)
class Decision:
    """transition: None if the run continues as it is. After a loss of nodes in use it is required.
    review_s: seconds until the policy wants to be called with `Change(review=True)`."""

    transition: Transition | None = None
    review_s: float = inf


STAY = Decision()


@dataclass(slots=True)
class TierSave:
    """Saves into one tier. interval_s: seconds of training between them. blocked_s: training waits
    for each. durable_s: from its end until it may be used. bytes: of each."""

    tier: int
    interval_s: float
    blocked_s: float = 0.0
    durable_s: float = 0.0
    bytes: float = 0.0


@dataclass(slots=True)
class SavePlan:
    """tiers: those that are saved into. review_s: seconds until the policy is asked again; it is
    asked after every transition anyway."""

    tiers: tuple[TierSave, ...] = ()
    review_s: float = inf


class Policy(Protocol):
    """What a trainer decides. One object lives for one run, and may remember."""

    @property
    def name(self) -> str: ...

    def decide(self, view: View, change: Change) -> Decision:
        """Called at each instant at which nodes change, and when a review is due."""
        ...

    def saves(self, view: View) -> SavePlan:
        """Called when a pause begins, and when its own review is due. `view.point` is set."""
        ...

    def slowdown(self, view: View) -> float:
        """Factor by which steps take longer, at least 1, from `slow` of the nodes in use."""
        ...


@runtime_checkable
class PowerPolicy(Protocol):
    """A policy that also says what nodes draw. It is asked again at each of its reviews."""

    @property
    def is_idle_off(self) -> bool:
        """Return True if nodes that are not in use are powered down."""
        ...

    def watts(self, view: View) -> float:
        """Watts of the nodes in use while they train. `view.point` is set."""
        ...


PolicyMaker = Callable[[CostModel], Policy]
"""A policy for one run."""


def slowest(view: View) -> float:
    """Slowdown of a synchronous trainer that does nothing about slow nodes."""
    nodes = view.nodes
    return max([nodes[name].slow for name in view.used if name in nodes], default=1.0)
