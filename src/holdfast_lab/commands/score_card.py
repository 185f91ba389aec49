"""What `holdfast score` prints, and the card that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.show.output import print_table
from holdfast_lab.charts.score_card import CardRow, ScoreCard
from holdfast_lab.score.compression import compare_compressions, compression_verdict
from holdfast_lab.score.record import ReferenceTable, RunRecord
from holdfast_lab.score.score import PairScore, Score, literal_formula

_TITLES = {
    "RPO": "lost work",
    "RTO": "time to recover",
    "EO": "elastic overhead",
    "J": "slow nodes",
    "P": "preemptions",
}
_HEAD = (
    "scenario",
    "seed",
    "G",
    "S_RPO",
    "S_RTO",
    "S_EO",
    "S_J",
    "S_P",
    "lost s",
    "to 90 % s",
    "RTO s",
)


@dataclass(frozen=True)
class RealRuns:
    """Runs of level 1 at one compression of time, and the reference table at it."""

    table: ReferenceTable
    records: Sequence[RunRecord]


def notes_on_starts(records: Sequence[RunRecord]) -> list[str]:
    """A note for the card if the start of processes is a part of the measured time."""
    if all(record.is_parked for record in records):
        return []
    return ["the start of processes counts: the nodes of this trainer cannot be parked"]


def print_compression(once: RealRuns, twice: RealRuns, k: float) -> list[str]:
    """Print G at k and at 2k; return the verdict, for the card."""
    rows = compare_compressions(once.records, once.table, twice.records, twice.table)
    cells = [
        (
            row.scenario,
            row.seeds,
            f"{row.g:.3f}",
            f"{row.g_twice:.3f}",
            f"{100 * row.difference:+.1f}",
        )
        for row in rows
    ]
    print_table(cells, ("scenario", "seeds", f"G, k = {k:g}", f"k = {2 * k:g}", "difference %"))
    return [compression_verdict(rows, k)]


def card_of(
    score: Score, subject: str, level: int, setting: str, notes: Sequence[str] = ()
) -> ScoreCard:
    """The card of a score. notes: come before its own."""
    rows = [CardRow("G", "capacity goodput", score.vector.g, score.g_interval)]
    rows += [
        CardRow(f"S_{part}", _TITLES[part], value) for part, value in score.vector.parts.items()
    ]
    return ScoreCard(
        subject,
        level,
        setting,
        score.score,
        score.interval,
        rows,
        [(check.name, check.holds, check.detail) for check in score.gate],
        [*notes, *_notes(score)],
        [_HEAD, *(_cells(pair) for pair in score.pairs)],
    )


def _notes(score: Score) -> list[str]:
    shares = ", ".join(f"{part} {share:.2f}" for part, share in score.weights.shares().items())
    notes = [f"weights {score.weights.version}: {shares}"]
    if score.ungated is not None and not score.is_open:
        notes.append(f"without the gate the score would be {score.ungated:.1f}")
    if score.sensitivity is not None:
        low, high = score.sensitivity
        notes.append(f"with one weight 50 % lower or higher: {low:.1f} to {high:.1f}")
    notes.append(f"the literature's formula: {literal_formula(score)[1]}")
    kept = sum(pair.kept_tokens for pair in score.pairs) / 1e9
    usd = sum(pair.usd for pair in score.pairs)
    grams = sum(pair.grams_co2 for pair in score.pairs)
    if kept and usd:
        notes.append(f"for 1e9 kept tokens: {usd / kept:.2f} $, {grams / kept:.0f} g of CO2")
    else:
        notes.append("no price and no carbon intensity: processes of this machine")
    if missed := sum(pair.unrecovered for pair in score.pairs):
        notes.append(f"after {missed} interruptions no step came; they count as no lost work")
    if score.clamped:
        notes.append(f"G was above 1 in {score.clamped} runs: the reference is not the best")
    return notes


def _cells(pair: PairScore) -> tuple[str, ...]:
    parts = (pair.rpo, pair.rto, pair.eo, pair.jitter, pair.spot)
    return (
        pair.scenario,
        str(pair.seed),
        f"{pair.g:.3f}",
        *("" if value is None else f"{value:.3f}" for value in parts),
        f"{pair.lost_s:.2f}",
        f"{pair.recovery_s:.2f}",
        f"{pair.first_step_s:.2f}",
    )


def print_score(score: Score, card: ScoreCard) -> None:
    """The pairs, the vector, the gate, the score."""
    head, *rows = card.table
    print_table(rows, head)
    print(f"{card.subject}, level {card.level}: {card.setting}")
    values = [(row.name, "-" if row.value is None else f"{row.value:.3f}") for row in card.rows]
    print("  ".join(f"{name} {value}" for name, value in values))
    low, high = score.g_interval
    print(f"G: 95 % interval {low:.3f} to {high:.3f}")
    for name, holds, detail in card.gate:
        mark = {True: "holds", False: "BROKEN", None: "not tested"}[holds]
        print(f"gate, {name}: {mark} ({detail})")
    if score.score is None:
        missing = [f"S_{part}" for part, value in score.vector.parts.items() if value is None]
        print(f"no score: this set of scenarios does not measure {', '.join(missing)}")
    else:
        print(f"Resilience Score {score.score:.1f}", end="")
        if score.interval is not None:
            print(f", 95 % {score.interval[0]:.1f} to {score.interval[1]:.1f} without the gate")
    for note in card.notes:
        print(note)
