"""The faults that `holdfast chaos` knows: the action, the conditions and the required result of
each.

There are three kinds. A worker breaks itself at a named point of a step
(`elastic/worker/fault_injection.py`). Or it waits at that point until an action on a real process,
disk or line was done (`actions.py`). So these too happen at a named moment. Or both happen at once,
or one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

IN_STEP = ("forward", "backward", "computed", "reduced", "voted", "applying", "applied")
QUIET = ("begin", "computed", "reduced", "applied")
UNVOTED = ("begin", "computed", "reduced")
"""Points at which all other workers wait for this one, before they make its state durable."""
COMMIT = ("reduced", "voted", "applying", "applied")


@dataclass(frozen=True)
class Part:
    """One thing that happens. deed: of a worker, or with `outside` of `actions.DEEDS`. points:
    where it may be; a second part that is outside, and at no point of a recovery, is done with the
    first. other: on another rank than the part before it. later: in a later attempt of the same
    step."""

    deed: str
    points: tuple[str, ...]
    outside: bool = False
    other: bool = True
    later: bool = False


NOWHERE = (
    "coordinator", "everything", "workers", "run-store", "run-store-long", "rotten-checkpoint",
    "rotten-disk", "cut-checkpoint", "lost-checkpoint", "replayed-checkpoint",
)  # fmt: skip
"""What is done from outside, and to no node that could be chosen."""


@dataclass(frozen=True)
class Fault:
    """nodes, ranks: how many there must be. needs: "" or "pp", "shared" (some state is held by one
    rank only), "network". again: a new generation has to follow; if False, steps have to. weight:
    how often it is drawn, relative to the other faults; 0: only if it is named. saves: it is for a
    step whose state is to be durable. shows: events of which the journal must have one after it, or
    it had no effect."""

    name: str
    text: str
    parts: tuple[Part, ...]
    nodes: int = 1
    ranks: int = 2
    needs: str = ""
    again: bool = True
    weight: int = 4
    saves: bool = False
    shows: tuple[str, ...] = ()

    @property
    def aimed(self) -> bool:
        """Whether it can be said which node it hits."""
        return self.parts[0].outside and self.parts[0].deed not in NOWHERE


def _worker(
    name: str, text: str, deed: str, points: tuple[str, ...] = IN_STEP, **more: object
) -> Fault:
    return Fault(name, text, (Part(deed, points),), **more)  # type: ignore[arg-type]


def _outside(
    name: str, text: str, points: tuple[str, ...] = QUIET, *, deed: str = "", **more: object
) -> Fault:
    return Fault(name, text, (Part(deed or name, points, True),), **more)  # type: ignore[arg-type]


_KILL = Part("kill", IN_STEP)
_RECOVERY = ("agreeing", "regrouping", "moving")
_COMPUTING = ("forward", "backward", "computed")
_REJECTED = ("source_rejected", "checkpoint_rejected")

_ALL = (
    # --- in a worker --------------------------------------------------------------------------
    _worker("kill", "a worker is killed (SIGKILL)", "kill", weight=10),
    _worker("stop", "a worker stands still (SIGSTOP)", "stop", ("forward", "computed"), weight=4),
    _worker("raise", "a worker raises inside the step", "raise", weight=8),
    _worker("memory", "the allocator refuses a worker inside the step", "memory",
            ("forward", "backward", "computed")),
    _worker("exit", "a worker ends by itself, with a code", "exit", ("forward", "reduced")),
    _worker("hang", "a worker never comes to the collective that all others are in", "hang",
            ("computed", "forward"), weight=3),
    _worker("hang-inside", "a worker waits inside a collective for what nobody sends",
            "hang inside", ("computed",), weight=3),
    _worker("hold-gil", "a worker stands still and holds the interpreter's lock", "hold the GIL",
            ("forward", "computed"), weight=3),
    _worker("gradient", "a gradient of one worker becomes NaN", "not finite", ("backward",),
            ranks=1),
    _worker("clock", "the wall clock of a worker jumps by an hour", "clock", QUIET, again=False),
    _worker("pipeline", "a worker is killed before it hands on to another stage", "kill",
            ("sending",), needs="pp", weight=6),
    _worker("capture", "a worker is killed while its state is copied into memory", "kill",
            ("capture",)),
    # --- to a node ----------------------------------------------------------------------------
    _outside("agent", "the agent of a node is killed, and with it all that it started; it comes "
             "back", nodes=2, weight=5),
    Fault("two-agents", "the agents of two nodes are killed at once",
          (Part("agent", QUIET, True), Part("agent", QUIET, True)), nodes=3, weight=2),
    _outside("coordinator", "as agent, the node that leads", nodes=2, weight=4),
    _outside("commit", "as coordinator, while a step is committed: its gradient is whole, voted "
             "on, or applied by some", COMMIT, deed="coordinator", nodes=2, weight=2),
    _outside("mover", "the mover of a node is killed", again=False),
    _outside("mover-stop", "the mover of a node stands still for a while", again=False),
    _outside("template", "the template of a node is killed", again=False),
    _outside("leave", "a node is told to go (SIGTERM), and comes back", nodes=2, weight=3),
    _outside("notice", "a node's cloud says that it goes; it comes back", nodes=2, weight=3),
    _outside("notice-kill", "a node's cloud says that it goes, and it is killed soon after",
             nodes=2, weight=3),
    _outside("zombie", "a whole node stands still until it is given up, and wakes with its old "
             "sockets", nodes=2, weight=2),
    _outside("workers", "all workers are killed at once; agents and what memory holds stay",
             weight=3),
    _outside("everything", "all nodes are killed at once", weight=1),
    # --- to bytes -----------------------------------------------------------------------------
    _outside("slow-disk", "the mover of a node gets a tenth of its time", UNVOTED, again=False,
             saves=True),
    _outside("full-disk", "the mover of a node can write no file any more, for a while", UNVOTED,
             again=False, saves=True, shows=("checkpoint_failed",)),
    _outside("run-store", "the run folder is out of reach for a while", again=False),
    _outside("run-store-long", "the run folder is out of reach for two minutes", again=False,
             weight=0),
    _outside("rotten-memory", "bytes of a node's snapshots in memory are changed, and all workers "
             "are killed", weight=3, shows=_REJECTED),
    Fault("rotten-checkpoint", "the newest checkpoint is changed, and all nodes are killed",
          (Part("rotten-checkpoint", QUIET, True),), weight=1, shows=_REJECTED),
    _outside("cut-checkpoint", "half of each file of the newest checkpoint is cut off, and all "
             "nodes are killed", weight=0, shows=_REJECTED),
    _outside("lost-checkpoint", "the files of the newest checkpoint are deleted, and all nodes are "
             "killed", weight=0, shows=_REJECTED),
    _outside("replayed-checkpoint", "the files of the newest checkpoint get an older step's bytes, "
             "and all nodes are killed", weight=0, shows=_REJECTED),
    _outside("rotten-disk", "the newest checkpoint is changed, and all workers are killed: memory "
             "still has the state", weight=0),
    # --- to the line --------------------------------------------------------------------------
    _outside("partition", "a node is cut off until it is given up, and comes back", nodes=3,
             needs="network", weight=2),
    _outside("delay", "the packets of a node come late", needs="network", again=False, weight=2),
    _outside("loss", "some of a node's packets are lost", needs="network", again=False, weight=2),
    # --- several ------------------------------------------------------------------------------
    Fault("two", "two workers are killed in the same step", (_KILL, _KILL), ranks=3, weight=4),
    Fault("two-kinds", "a worker raises and another one is killed in the same step",
          (Part("raise", IN_STEP), _KILL), ranks=3),
    Fault("again", "a worker is killed, and another one when the others are in that step again",
          (Part("kill", _COMPUTING), Part("kill", _COMPUTING, later=True)), ranks=3),
    Fault("recovery", "a worker is killed, and another one while they recover",
          (_KILL, Part("kill", _RECOVERY)), ranks=3, weight=5),
    Fault("restore", "all workers are killed, and one again while it reads a snapshot",
          (Part("workers", QUIET, True), Part("kill", ("restoring",))), weight=3),
    Fault("recovery-coordinator", "a worker is killed, and the node that leads while they recover",
          (_KILL, Part("coordinator", _RECOVERY, True)), nodes=3, ranks=3, weight=2),
    Fault("recovery-raise", "a worker is killed, and another one raises while they recover",
          (_KILL, Part("raise", _RECOVERY)), ranks=3),
)  # fmt: skip

FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL}
