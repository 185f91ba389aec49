"""The records of a run by generation, with the place of each rank: what the detectors look at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.events import (
    Event,
    GenerationStarted,
    NoticeReceived,
    Record,
    RunFailed,
    StepDone,
    WorkerStarted,
)
from holdfast.layout import Topology
from holdfast.report.causes.finding import Evidence, Finding, Mode

E = TypeVar("E", bound=Event)


@dataclass
class GenerationStory:
    """The records of one generation, in the order of `ordering.order_records`."""

    number: int
    start: Record | None = None
    records: list[Record] = field(default_factory=list)
    end: Record | None = None  # the next generation's start, or the run's failure
    has_done_steps: bool = False  # the run, before this generation
    pids: dict[tuple[str, int], int] = field(default_factory=dict)  # (node, process) -> rank
    notices: dict[str, Record] = field(default_factory=dict)  # node -> the newest notice so far

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the node of each rank."""
        event = self.start.event if self.start is not None else None
        return (
            tuple(event.topology.get("nodes", ())) if isinstance(event, GenerationStarted) else ()
        )

    @property
    def topology(self) -> Topology | None:
        """Return the placed replicas; None if the journal does not have them, as a simulated
        one."""
        event = self.start.event if self.start is not None else None
        if not isinstance(event, GenerationStarted) or "replicas" not in event.topology:
            return None
        return Topology.from_json(event.topology)

    def node_of(self, rank: int | None) -> str:
        """Return the node of a rank; "" if it is not known."""
        return self.nodes[rank] if rank is not None and 0 <= rank < len(self.nodes) else ""

    def of(self, kind: type[E]) -> list[tuple[Record, E]]:
        """Return the records of one kind of event, with their events."""
        return [(r, r.event) for r in self.records if isinstance(r.event, kind)]


def tell_generations(ordered: Iterable[Record]) -> list[GenerationStory]:
    """Return the generations of a run. ordered: as `ordering.order_records` gives them."""
    stories: dict[int, GenerationStory] = {}
    notices: dict[str, Record] = {}
    before: GenerationStory | None = None
    has_done_steps = False
    for record in ordered:
        event = record.event
        story = stories.get(record.generation)
        if story is None:
            story = stories[record.generation] = GenerationStory(
                record.generation, has_done_steps=has_done_steps, notices=notices
            )
        story.records.append(record)
        if isinstance(event, StepDone):
            has_done_steps = True
        elif isinstance(event, NoticeReceived):
            notices = notices | dict.fromkeys(event.nodes, record)
            story.notices = notices
        elif isinstance(event, WorkerStarted):
            story.pids[event.node, event.pid] = event.rank
        elif isinstance(event, GenerationStarted) and story.start is None:
            story.start = record
            if before is not None:
                before.end = before.end or record
                _keep_processes(before, story, event)
            before = story
        elif isinstance(event, RunFailed):
            (before or story).end = record
    return [stories[number] for number in sorted(stories)]


def _keep_processes(
    before: GenerationStory, story: GenerationStory, event: GenerationStarted
) -> None:
    """Give the processes that continue their ranks in the new generation."""
    ranks = {old: rank for rank, old in enumerate(event.came_from or ()) if old is not None}
    for place, old in before.pids.items():
        if old in ranks and story.node_of(ranks[old]) == place[0]:
            story.pids.setdefault(place, ranks[old])


def make_finding(
    story: GenerationStory,
    mode: Mode,
    cause: str,
    rank: int | None,
    record: Record,
    evidence: tuple[Evidence, ...],
    *,
    node: str | None = None,
    step: int | None = None,
    is_certain: bool = True,
) -> Finding:
    """Return a finding of this generation. node: None: that of the rank. step: None: that of the
    record."""
    return Finding(
        mode,
        cause,
        rank,
        story.node_of(rank) if node is None else node,
        story.number,
        record.event.step if step is None else step,
        record.time,
        evidence,
        is_certain,
    )
