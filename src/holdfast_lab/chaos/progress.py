"""The state of a run by its journal so far, for the process that disturbs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.events import (
    Event,
    FaultInjected,
    GenerationStarted,
    Record,
    RunFailed,
    RunFinished,
    StepDone,
)
from holdfast.wire.journal import JournalTail
from holdfast.wire.store.run_store import RunStore


@dataclass
class JournalView:
    """Kept up to date by `look`. generation: the newest that was started; nodes: who takes part in
    it; world: its ranks. reached_steps: by generation, the newest step that was done in it."""

    generation: int = 0
    nodes: tuple[str, ...] = ()
    world: int = 0
    start_step: int = 0
    reached_steps: dict[int, int] = field(default_factory=dict)
    is_finished: bool = False
    failure_reason: str | None = None
    injected: dict[int, Record] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def apply_record(self, record: Record) -> None:
        self.records.append(record)
        match record.event:
            case GenerationStarted() as event if record.generation > self.generation:
                self.generation, self.start_step = record.generation, event.step
                named = tuple(str(node) for node in event.topology.get("nodes", ()))
                self.nodes, self.world = tuple(dict.fromkeys(named)), len(named)
            case StepDone(step=step):
                now = self.reached_steps.get(record.generation, 0)
                self.reached_steps[record.generation] = max(now, step)
            case RunFinished():
                self.is_finished = True
            case RunFailed(reason=reason):
                self.failure_reason = reason
            case FaultInjected(number=number):
                self.injected.setdefault(number, record)
            case _:
                pass

    @property
    def step(self) -> int:
        """The newest step of the newest generation."""
        return max(self.start_step, self.reached_steps.get(self.generation, 0))

    def has_since(self, number: int, matches: Callable[[Event], bool]) -> bool:
        """Whether, after a fault was injected, something appeared in the journal."""
        record = self.injected.get(number)
        if record is None:
            return False
        begin = self.records.index(record)
        return any(matches(later.event) for later in self.records[begin:])


class JournalWatcher:
    """Reads what is new in a run's journal into a `View`."""

    def __init__(self, store: RunStore) -> None:
        self._journal_tail = JournalTail(store)
        self.view = JournalView()

    def read_new(self) -> JournalView:
        for record in self._journal_tail.read_new():
            self.view.apply_record(record)
        return self.view
