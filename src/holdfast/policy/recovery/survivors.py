"""The state that the survivors of a generation hold together, and the start of the next one.

    live      they hold every box, after one step: the state stays where it is
    restored  only lost processes held some box, or the survivors' steps are too far apart: all
              read the newest step that is complete in memory, or otherwise in the run store

The agents' reports decide this before the next generation begins. The processes then agree on the
step once more among themselves (`policy/recovery/step_resolution.py`), as one of them may be lost
meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Self

from holdfast.core.json_parsing import JsonMessage, ParsedJson
from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.state_table import StateTable, local_boxes
from holdfast.layout import Topology


@dataclass(frozen=True)
class RejectedStep(JsonMessage):
    """A step that all ranks found bad alike, and did not apply."""

    step: int
    what: str  # a phrase
    dealt: tuple[tuple[int, ...], ...]  # the microbatches of each replica
    suspects: tuple[int, ...]  # those of them that may have caused it
    again: bool | None = None  # computed again in the same place, they were bad; None: they weren't
    bearable: bool = False  # it may be applied anyway


@dataclass(frozen=True)
class HeldState(JsonMessage):
    """One worker's own report of what it holds."""

    generation: int
    rank: int
    applied: int  # the step after which its state is
    whole: int | None = None  # the step of which it holds the complete reduced gradient, if any
    torn: bool = False  # it has no usable state
    kind: str = "halt"  # why it stopped: peer, halt, error, script, non_finite, `rotten`, paused
    text: str = ""  # the same in a sentence
    state: tuple[int, int] | None = None  # generation and rank whose boxes it holds
    bad: RejectedStep | None = None  # the step because of which it stopped

    @classmethod
    def from_json(cls, value: ParsedJson) -> Self:
        """As of `JsonMessage`. Without a state, that of its own place counts."""
        held = super().from_json({"state": (value["generation"], value["rank"]), **value})
        torn = held.torn or held.state is None
        return replace(held, torn=torn, state=None if torn else held.state)


@dataclass(frozen=True)
class ResumePoint:
    """The survivors continue live. Some survivor's state is that after `step`, and none is after a
    later one. The remaining ranks have that state, or the gradient that leads there."""

    step: int
    ranks: frozenset[int]


def resume_point(
    topology: Topology, table: StateTable, held_states: Mapping[int, HeldState]
) -> ResumePoint | str:
    """Return the standpoint from which the survivors of `topology` can continue, or why they
    cannot.

    held_states: by the rank whose boxes these are. A rank that is behind the newest step and cannot
    follow is not counted. The reason is a phrase.
    """
    able = {rank: one for rank, one in held_states.items() if not one.torn}
    if not able:
        return "nobody is left who holds a state"
    step = max(one.applied for one in able.values())
    ranks = frozenset(
        rank
        for rank, one in able.items()
        if one.applied == step or (one.applied == step - 1 and one.whole == step)
    )
    missing = first_missing_tensor(topology, table, ranks)
    if missing is not None:
        return f"nobody who is left holds the whole of {missing}"
    return ResumePoint(step, ranks)


def first_missing_tensor(
    topology: Topology, table: StateTable, ranks: Collection[int]
) -> str | None:
    """Return a tensor that these ranks do not hold completely together; None if they hold all
    state."""
    present = set(ranks)
    are_alike = not any(spec.of_learners for spec in table)  # the replicas
    if are_alike and any(present.issuperset(replica.ranks) for replica in topology.replicas):
        return None  # nearly always so, and cheap
    unlike = {  # ranks at one place of like replicas hold the same boxes
        (replica.kind, place, 0 if are_alike else replica.index): rank
        for replica in topology.replicas
        for place, rank in enumerate(replica.ranks)
        if rank in present
    }
    boxes = [local_boxes(topology, table, rank) for rank in sorted(unlike.values())]
    for row, spec in enumerate(table):
        parts = {held[row] for held in boxes if held[row].size}
        if next(missing_pieces(whole_box(spec.name, spec.shape), parts), None):
            return spec.name
    return None


def missing_pieces(wanted: Box, parts: Collection[Box]) -> Iterator[Box]:
    """Yield the pieces of `wanted` that none of the parts, which may overlap, holds.

    It is cut along all their edges, so that each cell lies inside or outside of each of them.
    """
    edges = [
        sorted({edge for each in (wanted, *parts) for edge in (each.offsets[dim], each.stops[dim])})
        for dim in range(len(wanted.lengths))
    ]
    for cell in product(*(pairwise(edge) for edge in edges)):
        piece = Box(wanted.name, tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        if piece.size and not any(part.contains(piece) for part in parts):
            yield piece
