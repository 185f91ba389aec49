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
from holdfast.show.output import make_folder, only_writer, say, write_text
from holdfast_lab.chaos.network import why_unavailable
from holdfast_lab.charts.score_card import ScoreCard, card_page, card_svg
from holdfast_lab.commands.score_card import (
    RealRuns,
    card_of,
    notes_on_starts,
    print_compression,
    print_score,
)
from holdfast_lab.commands.trace import read_bytes
from holdfast_lab.rivals.registry import policy_named
from holdfast_lab.score.gate import gate_checks
from holdfast_lab.score.harness.campaign import RealCampaign
from holdfast_lab.score.harness.harness import RunOptions
from holdfast_lab.score.harness.trainer import obeys_network, trainer_named
from holdfast_lab.score.record import parse_reference
from holdfast_lab.score.replay import level_0_pairs
from holdfast_lab.score.scenarios import SCENARIOS, scoring_seeds
from holdfast_lab.score.score import GateCheck, PairScore, Weights, parse_weights, score_pair
from holdfast_lab.score.score import score_pairs as score_of
from holdfast_lab.traces.rows import text_of

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
    str, typer.Option(help="F0 to F13, several with commas; empty: the level's own set")
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
    _write_card(card, out / f"card-{level}-{Path(subject).name.replace(':', '-')}")
    return 0


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


def _write_card(card: ScoreCard, stem: Path) -> None:
    write_text(stem.with_name(f"{stem.name}.svg"), card_svg(card) + "\n")
    write_text(stem.with_name(f"{stem.name}.html"), card_page(card))
    print(f"card: {stem}.html")


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
