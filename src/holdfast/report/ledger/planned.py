"""What the plan predicted for a generation, and what its steps took."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from holdfast.events import GenerationStarted, MemoryUsed, Record, StepDone, StepPredicted
from holdfast.layout import AXES, Topology
from holdfast.report.formatting import format_duration

_FIRST_STEPS = 2
"""Steps of a generation that are left out if it has more: they allocate and compile."""
_NEWEST_STEPS = 500  # Steps of a generation that are compared

PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "passes": ("compute", ("compute", "recompute", "tp", "cp", "ep", "shards", "bubble")),
    "gradients": ("reduce", ("gradients",)),
    "update": ("apply", ("update", "parameters")),
    "data": ("data", ("data",)),
    "checkpoint": ("capture", ("checkpoint",)),
}
"""Part -> its phase in a step's record, and its parts in a plan."""


@dataclass(frozen=True)
class ComparedPart:
    """Seconds of a step, by the plan and as measured. Measured: the median of the steps."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class PlanComparison:
    """Of the newest generation that has a plan and has done steps.

    within: what the plan has inside of the passes, which no record of a step tells apart.
    predicted_bytes: on the fullest device. measured_bytes: the same; of the fullest process if its
    device is a CPU (`is_process`), with Python and torch in it. 0: no sample yet.
    """

    generation: int
    steps: int
    source: str
    predicted_s: float
    measured_s: float
    parts: tuple[ComparedPart, ...]
    within: Mapping[str, float]
    predicted_bytes: int
    measured_bytes: int
    is_process: bool

    @property
    def error(self) -> float:
        """Of the step's time: 0.1 if the plan was 10 % too long."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error}

    def sentence(self) -> str:
        """One line for people."""
        return (
            f"planned {format_duration(self.predicted_s)} a step ({self.source}), measured "
            f"{format_duration(self.measured_s)} ({self.error:+.0%})"
        )


@dataclass(frozen=True)
class Morph:
    """A change of layout while the run continues. Losses are of training: of the last step before
    and of the first one after."""

    generation: int
    layout: str  # in words
    previous: str
    step: int  # the last one before
    loss_before: float
    loss_after: float
    plan: PlanComparison | None  # None: no model covers the run

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"plan": self.plan.to_json() if self.plan else None}

    def sentence(self) -> str:
        """One line for people."""
        planned = f"{self.plan.sentence()}; " if self.plan else ""
        return (
            f"generation {self.generation}: {self.layout} after {self.previous}; {planned}"
            f"loss {self.loss_before:.6g} in step {self.step}, {self.loss_after:.6g} in the next"
        )


class PlanBook:
    """Reads plans and what followed from records."""

    def __init__(self) -> None:
        self._plans: dict[int, StepPredicted] = {}
        self._steps: dict[int, deque[tuple[float, Mapping[str, float]]]] = {}
        self._memory: dict[int, tuple[int, int]] = {}  # most bytes of a device, of a process
        self._layouts: dict[int, str] = {}  # in words
        self._losses: dict[int, dict[int, float]] = {}  # by step

    def observe(self, record: Record) -> None:
        event, number = record.event, record.generation
        if isinstance(event, StepPredicted):
            self._plans[number] = event
        elif isinstance(event, StepDone):
            steps = self._steps.setdefault(number, deque(maxlen=_NEWEST_STEPS + _FIRST_STEPS))
            steps.append((event.seconds, event.phases))
            self._losses.setdefault(number, {})[event.step] = event.loss
        elif isinstance(event, GenerationStarted):
            self._layouts[number] = words_of_topology(event.topology)
        elif isinstance(event, MemoryUsed):
            device, process = self._memory.get(number, (0, 0))
            self._memory[number] = max(device, event.device_bytes), max(process, event.bytes)

    def morphs(self) -> tuple[Morph, ...]:
        """The changes of layout after which steps were done."""
        found, before = [], 0
        for number in sorted(self._losses.keys() & self._layouts.keys()):
            if before and self._layouts[number] != self._layouts[before]:
                first = min(self._losses[number])
                losses = self._losses[before]
                last = max((step for step in losses if step < first), default=0)
                if last:
                    plan = self._comparison_of(number) if number in self._plans else None
                    layouts = self._layouts[number], self._layouts[before]
                    after = self._losses[number][first]
                    found.append(Morph(number, *layouts, last, losses[last], after, plan))
            before = number
        return tuple(found)

    def comparison(self) -> PlanComparison | None:
        """None if no generation has both."""
        both = self._plans.keys() & self._steps.keys()
        return self._comparison_of(max(both)) if both else None

    def _comparison_of(self, number: int) -> PlanComparison:
        plan, steps = self._plans[number], list(self._steps[number])
        steps = steps[_FIRST_STEPS:] or steps
        device, process = self._memory.get(number, (0, 0))
        return PlanComparison(
            number,
            len(steps),
            plan.source,
            plan.seconds,
            median(seconds for seconds, _ in steps),
            tuple(
                ComparedPart(
                    name,
                    sum(plan.parts.get(key, 0.0) for key in keys),
                    median(phases.get(phase, 0.0) for _, phases in steps),
                )
                for name, (phase, keys) in PARTS.items()
            ),
            {key: s for key, s in plan.parts.items() if key in PARTS["passes"][1] and s > 0},
            plan.bytes,
            device or process,
            not device,
        )


def words_of_topology(value: dict[str, Any]) -> str:
    """Return the replicas of a topology, from its JSON: "2 x pp 2, 1 x one rank"."""
    try:
        replicas = Topology.from_json(value).replicas
    except (KeyError, TypeError, ValueError):
        return ""
    counts, found = Counter(replica.mesh_shape for replica in replicas), []
    for mesh, number in counts.items():
        cut = [f"{axis} {degree}" for axis, degree in zip(AXES, mesh, strict=True) if degree > 1]
        found.append(f"{number} x {', '.join(cut) or 'one rank'}")
    return " + ".join(found)
