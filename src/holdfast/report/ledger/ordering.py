"""The order in which a run happened, on one clock.

Records merge by (generation, step, writer, sequence). That is the right order for a curve and the
wrong one for a story: a loss is noticed at no particular step. The agent stamps every record of a
generation when it receives it, so inside a generation its clock gives the order. Generations
follow each other whatever their clocks say.

Each of several nodes has a clock. A node that was cut off may report on a generation after the
next one began without it. Such a record is placed at that beginning, where the steps of both
generations say that the clocks agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter, itemgetter

from holdfast.events import GenerationStarted, Record, StepDone

_PLACE = attrgetter("generation", "writer", "sequence")


def order_records(records: Iterable[Record]) -> list[Record]:
    """Return the records by generation, and each generation by the agent's clock. The records of
    a writer stay in the order of their numbers, even if that clock was set back."""
    everything = list(records)
    limits = _generation_ends(everything)
    newest: dict[tuple[int, str], float] = {}
    placed: list[tuple[tuple[int, float, str, int], Record]] = []
    for record in sorted(everything, key=_PLACE):
        segment = (record.generation, record.writer)
        time = newest[segment] = max(newest.get(segment, record.time), record.time)
        limit = limits.get(record.generation, time)
        if time > limit:
            time, record = limit, replace(record, time=limit)
        placed.append(((record.generation, time, record.writer, record.sequence), record))
    placed.sort(key=itemgetter(0))
    return [record for _, record in placed]


def _generation_ends(records: Sequence[Record]) -> dict[int, float]:
    """generation -> when the next one began, on a clock that seems to be the same."""
    begun: dict[int, float] = {}
    stepped: dict[int, float] = {}
    for record in records:
        if isinstance(record.event, GenerationStarted):
            begun.setdefault(record.generation, record.time)
        elif isinstance(record.event, StepDone):
            last = stepped.get(record.generation, record.time)
            stepped[record.generation] = max(last, record.time)
    return {
        one: begun[other]
        for one, other in pairwise(sorted(begun))
        if max(begun[one], stepped.get(one, begun[one])) <= begun[other]
    }
