"""What is recorded of disturbed runs, the verdict on one, and the table of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from holdfast_lab.chaos.run_driver import STEPS_AFTER_LAST_FAULT
from holdfast_lab.chaos.schedule import Draw

NOT_RECOVERED = "not recovered from"  # the outcome of a fault that a run did not survive


@dataclass
class FaultResult:
    """One fault that hit, and its result. seconds: until a step was done after it. named: True if
    the journal names the very process as lost, or the very rank as a NaN's source. None: neither is
    expected."""

    number: int
    fault: str
    point: str
    step: int
    target: str
    generation: int
    outcome: str = ""
    seconds: float = 0.0
    named: bool | None = None


@dataclass
class DisturbedRunReport:
    """The record of a disturbed run. rejected_draws: draws that did not apply, and why.
    unexpected_ends: agents that ended although no fault touched them: node, exit code. cut: why it
    got fewer faults than planned. notes: other remarks."""

    faults: list[FaultResult] = field(default_factory=list)
    rejected_draws: list[dict[str, Any]] = field(default_factory=list)
    unexpected_ends: list[list[Any]] = field(default_factory=list)
    problem: str = ""
    cut: str = ""
    notes: list[str] = field(default_factory=list)

    def reject(self, number: int, draw: Draw, reason: str) -> None:
        """Note that a draw did not apply."""
        self.rejected_draws.append(
            {"number": number, "fault": draw.fault.name, "points": list(draw.points), "why": reason}
        )


_HIT_OUTCOMES = ("", "recovered", NOT_RECOVERED)
_TRACEBACK = b"Traceback (most recent call last)"


def is_recovered(result: Mapping[str, Any]) -> bool:
    """Reached its last step without a hand, all three verdicts are equal, and of the faults that
    were asked for one hit at least."""
    verdict = result.get("verdict")
    alone = not result["problem"] and not result["unexpected_ends"]
    disturbed = not result["asked"] or bool(hit_faults(result))
    return (
        alone
        and disturbed
        and verdict is not None
        and not (verdict["curve"] or verdict["ledger"] or verdict["tensors"])
    )


def hit_faults(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The faults of a run that hit at their moment."""
    return [done for done in result["faults"] if done["outcome"] in _HIT_OUTCOMES]


def describe_result(result: Mapping[str, Any]) -> str:
    number, verdict = len(hit_faults(result)), result.get("verdict") or {}
    cut = f"; cut short: {result['cut']}" if result["cut"] else ""
    if is_recovered(result):
        equal = "to the bit" if result["tolerance"] == 0 else f"within {verdict['worst']:.1g}"
        return (
            f"recovered from {number} faults in {result['seconds']:g} s; curve and tensors "
            f"equal {equal}, ledger equal{cut}"
        )
    if result["problem"]:
        return f"NOT RECOVERED after {number} faults: {result['problem']}{cut}"
    if wrong := [verdict[key] for key in ("curve", "ledger", "tensors") if verdict.get(key)]:
        return f"NOT EQUAL after {number} faults: {'; '.join(wrong)}{cut}"
    if ends := result["unexpected_ends"]:
        return f"NOT RECOVERED without a hand: {_format_ends(ends)} ended by themselves{cut}"
    return f"NOT DISTURBED: none of {result['asked']} faults hit{cut}"


def _format_ends(ends: Sequence[Sequence[Any]]) -> str:
    named = ", ".join(f"{node} with {code}" for node, code in ends)
    return f"{len(ends)} agents ({named})"


def format_table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Fault by outcome, in lines."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        for done in result["faults"]:
            rows.setdefault(done["fault"], []).append(done | {"good": result["recovered"]})
    lines = [f"{'fault':<18}{'hit':>5}{'recovered':>11}{'missed':>8}{'median s':>10}{'worst s':>9}"]
    total: Counter[str] = Counter()
    for name in sorted(rows):
        hit = [d for d in rows[name] if d["outcome"] in _HIT_OUTCOMES]
        good = [d for d in hit if d["good"] and d["outcome"] == "recovered"]
        seconds = [d["seconds"] for d in hit if d["outcome"] == "recovered"] or [0.0]
        missed = len(rows[name]) - len(hit)
        total.update(hit=len(hit), good=len(good), missed=missed)
        lines.append(
            f"{name:<18}{len(hit):>5}{len(good):>11}{missed:>8}{median(seconds):>10.2f}"
            f"{max(seconds):>9.2f}"
        )
    lines.append(f"{'all':<18}{total['hit']:>5}{total['good']:>11}{total['missed']:>8}")
    named = [d["named"] for row in rows.values() for d in row if d["named"] is not None]
    if named:
        told = f"{sum(named)} of {len(named)}"
        lines.append(f"workers that were to be lost, or to give a NaN, and were named: {told}")
    rejected = Counter(
        (row["fault"], row["why"].split(" in step")[0]) for r in results for row in r["rejected"]
    )
    if rejected:
        lines.append(f"rejected draws: {sum(rejected.values())}")
        lines += [f"  {n:>4} {name}: {why}" for (name, why), n in sorted(rejected.items())]
    return [*lines, *_remarks(results)]


def _remarks(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for result in results:
        name, asked = result["run"], result["asked"]
        number = len(hit_faults(result))
        if asked and not number:
            yield f"{name}: not disturbed, none of {asked} faults hit"
        if result["cut"]:
            yield f"{name}: cut short after {number} of {asked} faults, {result['cut']}"
        if result["unexpected_ends"]:
            yield f"{name}: {_format_ends(result['unexpected_ends'])} ended by themselves"
        yield from (f"{name}: {note}" for note in result["notes"])
    if logs := sum(result["tracebacks"] for result in results):
        yield f"{logs} logs with a traceback, of agents and movers"


def summarize(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the file of all results."""
    return {
        "runs": list(results),
        "recovered": bool(results) and all(r["recovered"] for r in results),
        "faults": sum(len(hit_faults(r)) for r in results),
        "cut_short": [r["run"] for r in results if r["cut"]],
        "last_step": STEPS_AFTER_LAST_FAULT,
    }


def count_tracebacks(agents: Path, run: Path) -> int:
    """In how many logs of agents and movers there is one. Those of workers do not tell: some faults
    are errors that a worker raises."""
    logs = [*agents.glob("*.log"), *(run / "logs").glob("mover*.log")]
    return sum(_TRACEBACK in log.read_bytes() for log in logs)
