"""The load of each expert, as a heat map by block and expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.expert_load import ExpertsRouted, load_entropy
from holdfast.report.formatting import format_count, format_percent

_MAX_NUMBERED = 16
"""Experts up to which each column has a number above it."""


class ExpertLoad:
    """Choices by block and expert, of all ranks and all steps that the journal has."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}
        self.dropped = 0

    def add(self, event: ExpertsRouted) -> None:
        """Count one rank's sample."""
        self.dropped += event.dropped
        for block, counts in event.counts.items():
            known = self._counts.setdefault(int(block), [0] * len(counts))
            for expert, count in enumerate(counts):
                known[expert] += count

    @property
    def by_block(self) -> dict[int, list[int]]:
        """Number of a block -> choices by expert, in order."""
        return dict(sorted(self._counts.items()))


def load_note(load: Mapping[int, Sequence[int]], dropped: int) -> str:
    """Return what stands above the heat map."""
    note = "Choices of tokens by block and expert. An entropy of 1 is an even load."
    choices = sum(map(sum, load.values()))
    if dropped:
        note += f" {format_percent(dropped / choices)} of the choices were dropped."
    return note


def heat_map(load: Mapping[int, Sequence[int]]) -> str:
    """Return a table with a row for each block. A cell is as strong as its expert's part of the
    choices, against the largest part of all."""
    experts = max(len(counts) for counts in load.values())
    parts = {block: [c / (sum(counts) or 1) for c in counts] for block, counts in load.items()}
    most = max(part for row in parts.values() for part in row) or 1.0
    numbers = range(experts) if experts <= _MAX_NUMBERED else ()
    head = "".join(f"<th>{number}</th>" for number in numbers) or f'<th colspan="{experts}"></th>'
    rows = [f"<tr><th>block</th>{head}<th>entropy</th></tr>"]
    for block, row in parts.items():
        cells = "".join(
            f'<td style="--heat:{100 * part / most:.0f}%" title="block {block}, expert {expert}: '
            f'{format_percent(part)}, {format_count(load[block][expert])} choices"></td>'
            for expert, part in enumerate(row)
        )
        rows.append(f"<tr><th>{block}</th>{cells}<td>{load_entropy(load[block]):.3f}</td></tr>")
    return f'<table class="heat">{"".join(rows)}</table>'
