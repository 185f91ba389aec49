"""Compares runs at k with runs at 2k, to say whether a compression of time is valid. Pure.

Some times of a trainer do not shrink with k, such as those of a message or of a new group. The
larger k is, the more they count. A k is valid for scores if G at k and at 2k differ by at most 2 %
in each scenario.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_lab.score.record import ReferenceTable, RunRecord, goodput

COMPRESSION_BAR = 0.02


@dataclass(frozen=True)
class CompressionRow:
    """G of a scenario at k and at 2k, the mean over the same seeds. The step in flight at the end
    counts by its share, as a run has few steps."""

    scenario: str
    seeds: int
    g: float
    g_twice: float

    @property
    def difference(self) -> float:
        """Of G at 2k, relative to G at k."""
        return self.g_twice / self.g - 1 if self.g else 0.0

    @property
    def holds(self) -> bool:
        return bool(self.g) and abs(self.difference) <= COMPRESSION_BAR


def compare_compressions(
    once: Sequence[RunRecord],
    table: ReferenceTable,
    twice: Sequence[RunRecord],
    table_twice: ReferenceTable,
) -> list[CompressionRow]:
    """One row for each scenario, over the seeds that both have; in the order of `once`.

    Args:
        once, table: runs and the reference table at k.
        twice, table_twice: those at 2k.
    """
    known = {(record.scenario, record.seed): record for record in twice}
    found: dict[str, list[tuple[float, float]]] = {}
    for record in once:
        other = known.get((record.scenario, record.seed))
        if other is not None:
            pair = (
                goodput(record, table, counts_flight=True),
                goodput(other, table_twice, counts_flight=True),
            )
            found.setdefault(record.scenario, []).append(pair)
    return [
        CompressionRow(
            name,
            len(pairs),
            statistics.mean(one for one, _ in pairs),
            statistics.mean(two for _, two in pairs),
        )
        for name, pairs in found.items()
    ]


def compression_verdict(rows: Sequence[CompressionRow], k: float) -> str:
    """A sentence for the card."""
    if not rows:
        return f"k = {k:g} is not validated: there are no runs of one seed at k and at 2k"
    worst = max(rows, key=lambda row: abs(row.difference))
    words = f"G at k = {2 * k:g} differs by {100 * worst.difference:+.1f} % at most"
    if all(row.holds for row in rows):
        return f"k = {k:g} is valid: {words} ({worst.scenario}; bar 2 %)"
    missed = ", ".join(row.scenario for row in rows if not row.holds)
    return f"k = {k:g} is NOT valid: {words} ({worst.scenario}; bar 2 %, missed by {missed})"
