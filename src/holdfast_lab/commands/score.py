"""`holdfast score`: the Resilience Score of a trainer (level 1) or of a policy (level 0)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.errors import ConfigError, UserError
from holdfast.show.output import print_table, say, write_text
from holdfast_lab.chaos.network import why_unavailable
from holdfast_lab.charts.score_card import CardRow, ScoreCard, card_page, card_svg
from holdfast_lab.commands.output_paths import make_folder, only_writer
from holdfast_lab.commands.trace import read_bytes
from holdfast_lab.rivals.registry import policy_named
from holdfast_lab.score.compression import compare_compressions, compression_verdict
from holdfast_lab.score.gate import gate_checks
from holdfast_lab.score.harness.campaign import RealCampaign
from holdfast_lab.score.harness.harness import RunOptions
from holdfast_lab.score.harness.trainer import obeys_network, trainer_named
from holdfast_lab.score.record import ReferenceTable, RunRecord, parse_reference
from holdfast_lab.score.replay import level_0_pairs
from holdfast_lab.score.scenarios import SCENARIOS, scoring_seeds
from holdfast_lab.score.score import (
    GateCheck,
    PairScore,
    Score,
    Weights,
    literal_formula,
    parse_weights,
    score_pair,
)
from holdfast_lab.score.score import score_pairs as score_of
from holdfast_lab.traces.rows import text_of

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

_LEGEND = (
    "G: kept tokens, of those that the nodes alive could train. S_RPO: lost work; S_RTO: time to "
    "recover;\nS_EO: cost without faults, and how more and fewer nodes are used; S_J: slow nodes; "
    "S_P: preemptions;\n1 is perfect. to 90 %: until 90 % of the throughput is back; RTO: until "
    "the next step"
)


_MEASURED_BY = {"RPO": ("F1",), "RTO": ("F1",), "EO": ("F0", "F11"), "J": ("F8",), "P": ("F3",)}
"""Scenarios that measure a part, of both levels."""


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
        missing = [part for part, value in score.vector.parts.items() if value is None]
        add = dict.fromkeys(name for part in missing for name in _MEASURED_BY[part])
        words = ", ".join(f"S_{part}" for part in missing)
        print(f"no score: this set of scenarios does not measure {words}; {','.join(add)} would")
    else:
        print(f"Resilience Score {score.score:.1f}", end="")
        if score.interval is not None:
            print(f", 95 % {score.interval[0]:.1f} to {score.interval[1]:.1f} without the gate")
    for note in card.notes:
        print(note)
    print(_LEGEND)
    used = dict.fromkeys(pair.scenario for pair in score.pairs)
    print("scenarios:", ", ".join(f"{name} {SCENARIOS[name].title}" for name in used))


# --- the command ----------------------------------------------------------------------------------
DEFAULT_REAL = ("F0", "F1", "F3", "F7", "F8", "F10", "F11")
TUNING_SEEDS = (0, 1, 2, 3, 4)

TrainerName = Annotated[
    str,
    typer.Option(
        help="level 1: holdfast, holdfast-restart, torchrun-dcp, torchft, ray-train, or "
        "FILE.py:CLASS"
    ),
]
ScenarioNames = Annotated[
    str,
    typer.Option(
        help="names, several with commas; empty: the level's own set. "
        + ", ".join(f"{name}: {each.title}" for name, each in SCENARIOS.items())
    ),
]

app = make_app("Score how well a trainer survives.")


@app.command()
def score(
    level: Annotated[int, typer.Option(help="0: simulated; 1: real processes")] = 1,
    trainer: TrainerName = "holdfast",
    policy: Annotated[
        str, typer.Option(help="level 0: holdfast, or a policy of docs/studies/rivals.md")
    ] = "holdfast",
    scenario: ScenarioNames = "",
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds each scenario gets")] = 1,
    tuning: Annotated[
        bool, typer.Option("--tuning", help="use seeds 0 to 4, which never score")
    ] = False,
    k: Annotated[float, typer.Option(min=1, help="level 1: by how much time is compressed")] = 20.0,
    validate_k: Annotated[
        bool, typer.Option("--validate-k", help="level 1: run at twice k, too, and compare G")
    ] = False,
    weights: Annotated[Path | None, typer.Option(help="a JSON file of weights")] = None,
    reference: Annotated[
        Path | None, typer.Option(help="a table of throughputs; otherwise it is measured")
    ] = None,
    python: Annotated[str, typer.Option(help="the interpreter of another trainer")] = "",
    out: Annotated[Path, typer.Option(help="the folder for everything")] = Path("score"),
) -> int:
    """Run fixed scenarios of losses, and print the Resilience Score.

    Level 0 simulates a policy over 64 nodes. Level 1 starts real processes on four nodes of this
    machine, kills and stops them, and reads what was committed. Results of different levels are
    never compared. Runs that lie in --out are not repeated: a set can be done in parts.

    The vector, the gate, the score, its 95 % interval and the literature's own formula are printed.
    A card lies in --out, as HTML and as SVG. docs/studies/score.md defines everything.

    \b
    Example:
      holdfast score                                        Holdfast, real processes, one seed
      holdfast score --trainer torchrun-dcp --scenario F1
      holdfast score --scenario F0,F1,F3,F11 --validate-k
      holdfast score --level 0 --policy holdfast --seeds 5
    """
    names = scenarios_of(scenario, level)
    refuse_compression(level, validate_k)
    refuse_without_effect(level, policy, trainer, python, reference)
    make_folder(out)
    chosen = TUNING_SEEDS[:seeds] if tuning else scoring_seeds(seeds)
    given = Weights() if weights is None else parse_weights(_text(weights), str(weights))
    if level == 0:
        subject, place, runs = policy, "64 nodes", _Runs(_simulated(policy, names, chosen))
    else:
        subject, place = trainer, f"k = {k:g}"
        real = _real(trainer, names, chosen, k, python, reference, out)
        # a given table holds for k alone
        twice = _real(trainer, names, chosen, 2 * k, python, None, out) if validate_k else None
        runs = _Runs.of(real, twice, k)
    if not runs.pairs:
        say("no run could be made")
        return 1
    found, setting = score_of(runs.pairs, runs.gate, given), f"{place}, {len(names)} scenarios"
    card = card_of(found, subject, level, f"{setting}, {len(chosen)} seeds", runs.notes)
    print_score(found, card)
    stem = out / f"card-{level}-{Path(subject).name.replace(':', '-')}"
    write_text(stem.with_name(f"{stem.name}.svg"), card_svg(card) + "\n")
    write_text(stem.with_name(f"{stem.name}.html"), card_page(card))
    print(f"card: {stem}.html")
    print(f"next: {_next_score(level)}")
    return 0


def _next_score(level: int) -> str:
    """The command that says more: real processes after a simulation, another trainer after them."""
    if level == 0:
        return "holdfast score --scenario F0,F1 (real processes on this machine)"
    return "holdfast score --trainer torchrun-dcp (the same scenarios under another trainer)"


@dataclass(frozen=True)
class _Runs:
    """notes: for the card."""

    pairs: Sequence[PairScore]
    gate: Sequence[GateCheck] = ()
    notes: Sequence[str] = ()

    @staticmethod
    def of(real: RealRuns, twice: RealRuns | None, k: float) -> _Runs:
        """twice: the same runs at twice k."""
        pairs = [score_pair(record, real.table) for record in real.records]
        notes = notes_on_starts(real.records)
        notes += print_compression(real, twice, k) if twice else []
        return _Runs(pairs, gate_checks(real.records), notes)


def scenarios_of(text: str, level: int) -> tuple[str, ...]:
    """The scenarios that a user names, or those of the level. Raises ConfigError."""
    if level not in (0, 1):
        raise ConfigError(
            f"there is no level {level} here",
            where="command line, --level",
            remedy="use 0 (simulated) or 1 (real processes)",
        )
    possible = [name for name, each in SCENARIOS.items() if level in each.levels]
    if not text:
        return DEFAULT_REAL if level else tuple(possible)
    names = tuple(dict.fromkeys(text.replace(",", " ").split()))
    if not names:
        raise ConfigError(
            "this names no scenario",
            where="command line, --scenario",
            remedy=f"use some of {', '.join(possible)}",
        )
    for name in names:
        if name not in possible:
            raise ConfigError(
                f"level {level} has no scenario {name!r}",
                where="command line, --scenario",
                remedy=f"use some of {', '.join(possible)}",
            )
    return names


def refuse_compression(level: int, validate_k: bool) -> None:
    """Raises ConfigError if time is not compressed at this level."""
    if validate_k and level == 0:
        raise ConfigError(
            "level 0 compresses no time",
            where="command line, --validate-k",
            remedy="leave it out, or use --level 1",
        )


def refuse_without_effect(
    level: int, policy: str, trainer: str, python: str, reference: Path | None
) -> None:
    """Raise ConfigError for an option of the other level that is not its default."""
    real = {"--trainer": trainer, "--python": python, "--reference": reference}
    for option, value in (real if level == 0 else {"--policy": policy}).items():
        if value not in ("holdfast", "", None):
            raise ConfigError(
                f"{option} has no effect at level {level}",
                where="command line",
                remedy=f"leave {option} out, or use --level {1 - level}",
            )


def _simulated(policy: str, names: Sequence[str], seeds: Sequence[int]) -> list[PairScore]:
    return level_0_pairs(policy_named(policy), names, seeds)


def _real(
    trainer: str,
    names: Sequence[str],
    seeds: Sequence[int],
    k: float,
    python: str,
    reference: Path | None,
    out: Path,
) -> RealRuns:
    python = python or sys.executable
    refuse_unavailable(trainer, python)
    refuse_without_network(trainer, names)
    given = None
    if reference is not None:
        given = parse_reference(_text(reference), str(reference))
    campaign = RealCampaign(trainer_named(trainer), out, RunOptions(k, python), say, given)
    try:
        with only_writer(out):
            return RealRuns(campaign.reference_table(), campaign.records(names, seeds))
    except KeyboardInterrupt:
        made, wanted = campaign.made(names, seeds), campaign.wanted(names, seeds)
        say(f"{made} of {wanted} runs are complete, in {out / 'runs'}; the same command keeps them")
        raise


def _text(path: Path) -> str:
    return text_of(read_bytes(path), str(path))


def refuse_unavailable(trainer: str, python: str) -> None:
    """Raise UserError if a trainer cannot run in an interpreter."""
    if why := trainer_named(trainer).why_unavailable(python):
        raise UserError(
            f"{trainer} cannot run: {why}",
            where="command line, --trainer",
            remedy="or name an interpreter that has it with --python",
        )


def refuse_without_network(trainer: str, scenarios: Sequence[str]) -> None:
    """Raise UserError if a scenario changes a link, and the nodes cannot have networks here."""
    wanted = [name for name in scenarios if SCENARIOS[name].needs == "network"]
    if not wanted:
        return
    why = why_unavailable()
    if not obeys_network(trainer_named(trainer)):
        why = f"all nodes of {trainer} share one network"
    if why:
        raise UserError(
            f"there is no network of nodes for {', '.join(wanted)}: {why}",
            where="command line, --scenario",
            remedy=f"leave {', '.join(wanted)} out",
        )
