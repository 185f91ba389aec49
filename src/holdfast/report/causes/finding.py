"""What `holdfast explain` finds: a failure mode, its place, and the records that show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast.events import Record


class Mode(StrEnum):
    """The ten failure modes, three more that happen, and what is not explained."""

    STARTUP_CRASH = "startup-crash"
    STRAGGLER = "straggler"
    NETWORK_TIMEOUT = "network-timeout"
    CHECKPOINT_CORRUPTION = "checkpoint-corruption"
    DIVERGENCE = "divergence"
    OUT_OF_MEMORY = "out-of-memory"
    PREEMPTION = "preemption"
    CONTENTION = "contention"
    WRONG_TOPOLOGY = "wrong-topology"
    DATA_SKEW = "data-skew"
    WORKER_CRASH = "worker-crash"
    HANG = "hang"
    RUN_LOST = "run-lost"
    NOT_KNOWN = "not-known"


@dataclass(frozen=True)
class ModeText:
    """What a mode is called, its runbook, and what would tell if the journal says too little."""

    title: str
    runbook: str  # a page of docs/runbooks
    would_tell: str


MODES: dict[Mode, ModeText] = {
    Mode.STARTUP_CRASH: ModeText("start-up crash", "restart-loop", "the worker's log"),
    Mode.STRAGGLER: ModeText("straggler", "worker-slow", "the node's clock rates and heat"),
    Mode.NETWORK_TIMEOUT: ModeText("network time-out", "network-fault", "whether the node answers"),
    Mode.CHECKPOINT_CORRUPTION: ModeText(
        "checkpoint corruption", "checkpoint-corrupt", "'holdfast checkpoint verify'"
    ),
    Mode.DIVERGENCE: ModeText("divergence", "step-not-finite", "the losses before it"),
    Mode.OUT_OF_MEMORY: ModeText("out of memory", "worker-lost", "the kernel's log of the node"),
    Mode.PREEMPTION: ModeText("preemption", "node-preempted", "the scheduler's events of the node"),
    Mode.CONTENTION: ModeText("contention", "worker-slow", "the other processes of the node"),
    Mode.WRONG_TOPOLOGY: ModeText("wrong topology", "worker-slow", "'holdfast layout'"),
    Mode.DATA_SKEW: ModeText("data skew", "worker-slow", "the lengths of the samples"),
    Mode.WORKER_CRASH: ModeText("worker crash", "worker-lost", "the kernel's log of the node"),
    Mode.HANG: ModeText("hang", "worker-lost", "a stack of the process, taken while it hangs"),
    Mode.RUN_LOST: ModeText("run lost", "run-lost", "the scheduler's and the kernels' logs"),
    Mode.NOT_KNOWN: ModeText("not known", "restart-loop", "the logs of the agents"),
}


@dataclass(frozen=True)
class Evidence:
    """A record of the journal, or a line of a log, that shows something."""

    place: str  # "generation/writer/number" of a record, "FILE" of a line
    text: str
    time: float | None = None  # seconds since the epoch, on the writer's clock; None: a log's line


@dataclass(frozen=True)
class Finding:
    """Something that went wrong, once."""

    mode: Mode
    cause: str  # a sentence
    rank: int | None  # None: no single rank
    node: str  # "": no single node
    generation: int
    step: int
    time: float  # of the record that showed it, seconds since the epoch
    evidence: tuple[Evidence, ...]
    is_certain: bool = True  # False: the evidence is short; `MODES` says what would tell

    @property
    def sentence(self) -> str:
        """The finding for people, without its evidence."""
        text = f"{MODES[self.mode].title}: {self.cause}"
        if not self.is_certain:
            text += f" That is not certain. What would tell: {MODES[self.mode].would_tell}."
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the finding for programs."""
        return {
            "mode": str(self.mode),
            "cause": self.cause,
            "is_certain": self.is_certain,
            "would_tell": "" if self.is_certain else MODES[self.mode].would_tell,
            "runbook": f"runbooks/{MODES[self.mode].runbook}.md",
            "rank": self.rank,
            "node": self.node,
            "generation": self.generation,
            "step": self.step,
            "time": self.time,
            "evidence": [vars(item) for item in self.evidence],
        }


LogReader = Callable[[int, int], Sequence[Evidence]]
"""Returns the last lines of the log of (generation, rank); none if there is no log."""


def evidence_of(record: Record, text: str) -> Evidence:
    """Return a record as evidence."""
    place = f"{record.generation}/{record.writer}/{record.sequence}"
    return Evidence(place, text, record.time)


def no_logs(generation: int, rank: int) -> Sequence[Evidence]:
    """Return no lines: a `LogReader` for a journal alone."""
    return ()
