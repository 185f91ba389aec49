"""The order in which a run happened, on one clock.

Records merge by (generation, step, writer, sequence), which is the right order for a curve and the
wrong one for a story: a loss is noticed at no particular step. The agent stamps every record of a
generation when it receives it, so inside a generation its clock gives the order; generations
follow each other whatever their clocks say.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.events import Record


def in_order(records: Iterable[Record]) -> list[Record]:
    """Generation by generation, each by the agent's clock, and each writer's records always in
    the order of their numbers, even where that clock was set back."""
    newest: dict[tuple[int, str], float] = {}
    placed: list[tuple[tuple[int, float, str, int], Record]] = []
    for record in sorted(records, key=lambda r: (r.generation, r.writer, r.sequence)):
        segment = (record.generation, record.writer)
        time = newest[segment] = max(newest.get(segment, record.time), record.time)
        placed.append(((record.generation, time, record.writer, record.sequence), record))
    return [record for _, record in sorted(placed, key=lambda pair: pair[0])]
