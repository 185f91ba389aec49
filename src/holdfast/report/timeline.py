"""The order in which a run happened, on one clock.

Records merge by (generation, step, writer, sequence), which is the right order for a curve and the
wrong one for a story: a loss is noticed at no particular step. Within one generation the order in
which the agent wrote is the order in which things happened.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.events import GenerationStarted, Record, RunStarted

_ANCHORS = (RunStarted, GenerationStarted)


def in_order(records: Iterable[Record]) -> list[Record]:
    """Generation by generation, each as its agent wrote it; other writers' records, whose place
    cannot be known, follow at the generation's end."""
    everything = list(records)
    agents = {r.generation: r.writer for r in everything if isinstance(r.event, _ANCHORS)}

    def place(record: Record) -> tuple[int, bool, str, int]:
        other = record.writer != agents.get(record.generation, record.writer)
        return (record.generation, other, record.writer, record.sequence)

    return sorted(everything, key=place)
