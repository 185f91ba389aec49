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

IN_STEP_POINTS = ("forward", "backward", "computed", "reduced", "voted", "applying", "applied")
QUIET_POINTS = ("begin", "computed", "reduced", "applied")
UNVOTED_POINTS = ("begin", "computed", "reduced")
"""Points at which all other workers wait for this one, before they make its state durable."""
COMMIT_POINTS = ("reduced", "voted", "applying", "applied")


@dataclass(frozen=True)
class FaultPart:
    """One thing that happens. action: of a worker, or with `is_outside` of `actions.FAULT_ACTIONS`.
    points: where it may be; a second part that is outside, and at no point of a recovery, is done
    with the first. on_other_rank: on another rank than the part before it. on_later_attempt: in a
    later attempt of the same step."""

    action: str
    points: tuple[str, ...]
    is_outside: bool = False
    on_other_rank: bool = True
    on_later_attempt: bool = False


UNAIMED_ACTIONS = (
    "coordinator",
    "everything",
    "workers",
    "run-store",
    "run-store-long",
    "rotten-checkpoint",
    "rotten-disk",
    "cut-checkpoint",
    "lost-checkpoint",
    "replayed-checkpoint",
)
"""What is done from outside, and to no node that could be chosen."""

FOLDER_ACTIONS = (
    "run-store",
    "run-store-long",
    "slow-disk",
    "full-disk",
    "rotten-checkpoint",
    "rotten-disk",
    "cut-checkpoint",
    "lost-checkpoint",
    "replayed-checkpoint",
)
"""What is done to the files of a run folder, or to the disk under it."""


@dataclass(frozen=True)
class Fault:
    """nodes, ranks: how many there must be. needs: "" or "pp", "shared" (some state is held by one
    rank only), "network". needs_new_generation: a new generation has to follow; if False, steps
    have to. weight: how often it is drawn, relative to the other faults; 0: only if it is named.
    needs_save_step: it is for a step whose state is to be durable. expected_events: events of which
    the journal must have one after it, or it had no effect."""

    name: str
    text: str
    parts: tuple[FaultPart, ...]
    nodes: int = 1
    ranks: int = 2
    needs: str = ""
    needs_new_generation: bool = True
    weight: int = 4
    needs_save_step: bool = False
    expected_events: tuple[str, ...] = ()

    @property
    def is_aimed(self) -> bool:
        """Whether it can be said which node it hits."""
        return self.parts[0].is_outside and self.parts[0].action not in UNAIMED_ACTIONS


def _worker_fault(
    name: str, text: str, action: str, points: tuple[str, ...] = IN_STEP_POINTS, **more: object
) -> Fault:
    return Fault(name, text, (FaultPart(action, points),), **more)  # type: ignore[arg-type]


def _outside_fault(
    name: str,
    text: str,
    points: tuple[str, ...] = QUIET_POINTS,
    *,
    action: str = "",
    **more: object,
) -> Fault:
    return Fault(name, text, (FaultPart(action or name, points, True),), **more)  # type: ignore[arg-type]


_KILL_WORKER = FaultPart("kill", IN_STEP_POINTS)
_RECOVERY_PART_POINTS = ("agreeing", "regrouping", "moving")
_COMPUTING_POINTS = ("forward", "backward", "computed")
_REJECTION_EVENTS = ("source_rejected", "checkpoint_rejected")

_ALL_FAULTS = (
    # --- in a worker --------------------------------------------------------------------------
    _worker_fault("kill", "a worker is killed (SIGKILL)", "kill", weight=10),
    _worker_fault(
        "stop", "a worker is suspended (SIGSTOP)", "stop", ("forward", "computed"), weight=4
    ),
    _worker_fault("raise", "a worker raises inside the step", "raise", weight=8),
    _worker_fault(
        "memory",
        "the allocator refuses a worker inside the step",
        "memory",
        ("forward", "backward", "computed"),
    ),
    _worker_fault("exit", "a worker ends by itself, with a code", "exit", ("forward", "reduced")),
    _worker_fault(
        "hang",
        "a worker never comes to the collective that all others are in",
        "hang",
        ("computed", "forward"),
        weight=3,
    ),
    _worker_fault(
        "hang-inside",
        "a worker waits inside a collective for data that no rank sends",
        "hang inside",
        ("computed",),
        weight=3,
    ),
    _worker_fault(
        "hold-gil",
        "a worker hangs and holds the interpreter's lock",
        "hold the GIL",
        ("forward", "computed"),
        weight=3,
    ),
    _worker_fault(
        "gradient", "a gradient of one worker becomes NaN", "not finite", ("backward",), ranks=1
    ),
    _worker_fault(
        "clock",
        "the wall clock of a worker jumps by an hour",
        "clock",
        QUIET_POINTS,
        needs_new_generation=False,
    ),
    _worker_fault(
        "pipeline",
        "a worker is killed before it hands on to another stage",
        "kill",
        ("sending",),
        needs="pp",
        weight=6,
    ),
    _worker_fault(
        "capture", "a worker is killed while its state is copied into memory", "kill", ("capture",)
    ),
    # --- to a node ----------------------------------------------------------------------------
    _outside_fault(
        "agent",
        "the agent of a node is killed, and with it all that it started; it comes back",
        nodes=2,
        weight=5,
    ),
    Fault(
        "two-agents",
        "the agents of two nodes are killed at once",
        (FaultPart("agent", QUIET_POINTS, True), FaultPart("agent", QUIET_POINTS, True)),
        nodes=3,
        weight=2,
    ),
    _outside_fault("coordinator", "as agent, the node that leads", nodes=2, weight=4),
    _outside_fault(
        "commit",
        "as coordinator, while a step is committed: its gradient is whole, voted "
        "on, or applied by some",
        COMMIT_POINTS,
        action="coordinator",
        nodes=2,
        weight=2,
    ),
    _outside_fault("mover", "the mover of a node is killed", needs_new_generation=False),
    _outside_fault(
        "mover-stop", "the mover of a node is suspended for a while", needs_new_generation=False
    ),
    _outside_fault("template", "the fork server of a node is killed", needs_new_generation=False),
    _outside_fault(
        "leave", "a node is asked to leave (SIGTERM), and comes back", nodes=2, weight=3
    ),
    _outside_fault("notice", "a node's cloud says that it goes; it comes back", nodes=2, weight=3),
    _outside_fault(
        "notice-kill",
        "a node's cloud says that it goes, and it is killed soon after",
        nodes=2,
        weight=3,
    ),
    _outside_fault(
        "zombie",
        "all of a node is suspended until it is given up, and wakes with its old sockets",
        nodes=2,
        weight=2,
    ),
    _outside_fault(
        "workers", "all workers are killed at once; agents and what memory holds stay", weight=3
    ),
    _outside_fault("everything", "all nodes are killed at once", weight=1),
    # --- to bytes -----------------------------------------------------------------------------
    _outside_fault(
        "slow-disk",
        "the mover of a node gets a tenth of its time",
        UNVOTED_POINTS,
        needs_new_generation=False,
        needs_save_step=True,
    ),
    _outside_fault(
        "full-disk",
        "the mover of a node can write no file any more, for a while",
        UNVOTED_POINTS,
        needs_new_generation=False,
        needs_save_step=True,
        expected_events=("checkpoint_failed",),
    ),
    _outside_fault(
        "run-store", "the run folder is out of reach for a while", needs_new_generation=False
    ),
    _outside_fault(
        "run-store-long",
        "the run folder is out of reach for two minutes",
        needs_new_generation=False,
        weight=0,
    ),
    _outside_fault(
        "rotten-memory",
        "bytes of a node's snapshots in memory are changed, and all workers are killed",
        weight=3,
        expected_events=_REJECTION_EVENTS,
    ),
    Fault(
        "rotten-checkpoint",
        "the newest checkpoint is changed, and all nodes are killed",
        (FaultPart("rotten-checkpoint", QUIET_POINTS, True),),
        weight=1,
        expected_events=_REJECTION_EVENTS,
    ),
    _outside_fault(
        "cut-checkpoint",
        "half of each file of the newest checkpoint is cut off, and all nodes are killed",
        weight=0,
        expected_events=_REJECTION_EVENTS,
    ),
    _outside_fault(
        "lost-checkpoint",
        "the files of the newest checkpoint are deleted, and all nodes are killed",
        weight=0,
        expected_events=_REJECTION_EVENTS,
    ),
    _outside_fault(
        "replayed-checkpoint",
        "the files of the newest checkpoint get an older step's bytes, and all nodes are killed",
        weight=0,
        expected_events=_REJECTION_EVENTS,
    ),
    _outside_fault(
        "rotten-disk",
        "the newest checkpoint is changed, and all workers are killed: memory still has the state",
        weight=0,
    ),
    # --- to the line --------------------------------------------------------------------------
    _outside_fault(
        "partition",
        "a node is cut off until it is given up, and comes back",
        nodes=3,
        needs="network",
        weight=2,
    ),
    _outside_fault(
        "delay",
        "the packets of a node come late",
        needs="network",
        needs_new_generation=False,
        weight=2,
    ),
    _outside_fault(
        "loss",
        "some of a node's packets are lost",
        needs="network",
        needs_new_generation=False,
        weight=2,
    ),
    # --- several ------------------------------------------------------------------------------
    Fault(
        "two",
        "two workers are killed in the same step",
        (_KILL_WORKER, _KILL_WORKER),
        ranks=3,
        weight=4,
    ),
    Fault(
        "two-kinds",
        "a worker raises and another one is killed in the same step",
        (FaultPart("raise", IN_STEP_POINTS), _KILL_WORKER),
        ranks=3,
    ),
    Fault(
        "again",
        "a worker is killed, and another one when the others are in that step again",
        (
            FaultPart("kill", _COMPUTING_POINTS),
            FaultPart("kill", _COMPUTING_POINTS, on_later_attempt=True),
        ),
        ranks=3,
    ),
    Fault(
        "recovery",
        "a worker is killed, and another one while they recover",
        (_KILL_WORKER, FaultPart("kill", _RECOVERY_PART_POINTS)),
        ranks=3,
        weight=5,
    ),
    Fault(
        "restore",
        "all workers are killed, and one again while it reads a snapshot",
        (FaultPart("workers", QUIET_POINTS, True), FaultPart("kill", ("restoring",))),
        weight=3,
    ),
    Fault(
        "recovery-coordinator",
        "a worker is killed, and the node that leads while they recover",
        (_KILL_WORKER, FaultPart("coordinator", _RECOVERY_PART_POINTS, True)),
        nodes=3,
        ranks=3,
        weight=2,
    ),
    Fault(
        "recovery-raise",
        "a worker is killed, and another one raises while they recover",
        (_KILL_WORKER, FaultPart("raise", _RECOVERY_PART_POINTS)),
        ranks=3,
    ),
)

FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _ALL_FAULTS}
