"""Which records of a journal still count.

A generation begins from the state after some step. What an older generation did beyond that
step was lost with it and done again; those records stay in the journal (they are the visible
cost of a failure) but are not part of the run's history.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.events import GenerationStarted, Record


def starts(records: Iterable[Record]) -> dict[int, int]:
    """generation -> the step from whose state it began."""
    return {r.generation: r.event.step for r in records if isinstance(r.event, GenerationStarted)}


def effective_bound(starts_by_generation: dict[int, int]) -> dict[int, float]:
    """generation -> the last step of it that still counts (infinity for the newest)."""
    bound: float = float("inf")
    out: dict[int, float] = {}
    for generation in sorted(starts_by_generation, reverse=True):
        out[generation] = bound
        bound = min(bound, starts_by_generation[generation])
    return out


def split(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """(effective, superseded), each in the order given. Records outside any started generation
    are effective."""
    everything = list(records)
    bounds = effective_bound(starts(everything))
    effective: list[Record] = []
    superseded: list[Record] = []
    for record in everything:
        inside = record.event.step <= bounds.get(record.generation, float("inf"))
        (effective if inside else superseded).append(record)
    return effective, superseded
