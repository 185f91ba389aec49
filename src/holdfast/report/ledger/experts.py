"""The load of each expert, as a heat map by block and expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.expert_load import ExpertsRouted, load_entropy
from holdfast.report.formatting import format_count, format_percent

_MAX_NUMBERED = 16  # Experts up to which each column has a number above it


@dataclass(frozen=True)
class RankLoads:
    """Of each rank: choices of an even load, of its own experts, and that it computed; copies that
    it had."""

    even: tuple[int, ...]
    own: tuple[int, ...]
    computed: tuple[int, ...]
    copies: tuple[int, ...]

    @property
    def highest(self) -> tuple[float, float]:
        """The highest load of a rank in even parts, without copies and with them."""
        without, found = (
            max(load / (even or 1) for load, even in zip(loads, self.even, strict=True))
            for loads in (self.own, self.computed)
        )
        return without, found


class ExpertLoad:
    """Choices by block and expert, of all ranks and all steps that the journal has."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}
        self._loads: dict[int, dict[int, list[int]]] = {}
        self.dropped = 0

    def add(self, event: ExpertsRouted) -> None:
        """Count one rank's sample."""
        self.dropped += event.dropped
        for block, counts in event.counts.items():
            known = self._counts.setdefault(int(block), [0] * len(counts))
            for expert, count in enumerate(counts):
                known[expert] += count
        for block, load in event.loads.items():
            of_ranks = self._loads.setdefault(int(block), {})
            so_far = of_ranks.get(event.rank, [0] * len(load))
            of_ranks[event.rank] = [a + b for a, b in zip(so_far, load, strict=True)]

    @property
    def with_copies(self) -> dict[int, RankLoads]:
        """Number of a block -> loads of the ranks that have it, if hot experts get copies."""
        return {
            block: RankLoads(*zip(*(of_ranks[rank] for rank in sorted(of_ranks)), strict=True))
            for block, of_ranks in sorted(self._loads.items())
        }

    @property
    def by_block(self) -> dict[int, list[int]]:
        """Number of a block -> choices by expert, in order."""
        return dict(sorted(self._counts.items()))


def load_note(
    load: Mapping[int, Sequence[int]], dropped: int, with_copies: Mapping[int, RankLoads]
) -> str:
    """Return what stands above the heat map."""
    note = "Choices of tokens by block and expert. An entropy of 1 is an even load."
    choices = sum(map(sum, load.values()))
    if dropped:
        note += f" {format_percent(dropped / choices)} of the choices were dropped."
    if with_copies:
        block, loads = max(with_copies.items(), key=lambda item: item[1].highest)
        before, after = loads.highest
        note += (
            f" Copies of hot experts lower the highest load of a worker, in block {block}, from "
            f"{before:.2f} to {after:.2f} even parts."
        )
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
