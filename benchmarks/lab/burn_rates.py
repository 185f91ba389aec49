"""Simulate the rules of objectives: they fire in a total outage, clear, and never at the budget.

    python -m benchmarks.lab.burn_rates              the tables of docs/studies/burn-rates.md
    python -m benchmarks.lab.burn_rates --promtool   and have Prometheus's own engine say the same

Time is sampled every 15 s, as Prometheus does. A healthy run does useful work all the time. In a
total outage it does none, and is still running by its journal. Steps of 60 s are a staircase: the
seconds of a step count when the step is done.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from holdfast.config.sections.observe import ServiceObjective
from holdfast.report.alerts.expression import EVALUATE_EVERY_S
from holdfast.report.alerts.objectives import BurnRule, burn_rules, objective_alerts
from holdfast_platform.observe.rules import rule_groups

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.99)
PERIODS = {"6h": 6, "1d": 24, "7d": 168, "30d": 720}  # hours
STEPS_S = (0.0, 60.0)
_I = int(EVALUATE_EVERY_S)
_RUN = 'run_id="demo"'


@dataclass(frozen=True)
class Outcome:
    """What one rule did."""

    fires_s: float | None  # seconds of a total outage until it fired
    clears_s: float | None  # seconds of healthy time until it cleared
    fires_at_budget: bool  # at a loss of exactly the budget


def useful_seconds(rates: Sequence[tuple[float, float]], step_s: float) -> np.ndarray[Any, Any]:
    """Return the useful seconds at each sample. rates: seconds and their useful share, in order."""
    share = np.concatenate([np.full(round(seconds / _I), rate) for seconds, rate in rates])
    smooth = np.concatenate([[0.0], np.cumsum(share * _I)])
    return smooth if not step_s else np.floor(smooth / step_s) * step_s


def firing(rule: BurnRule, useful: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return at which samples both windows are above the threshold; a window that is not full
    counts what is there."""
    both = np.ones(len(useful), bool)
    at = np.arange(len(useful))
    for window in (rule.long_s, rule.short_s):
        first = np.maximum(at - round(window / _I), 0)
        lost = (at - first) * _I - (useful - useful[first])
        both &= lost / window > rule.threshold
    return both


def simulate(rule: BurnRule, step_s: float = 0.0) -> Outcome:
    """Run one rule through health, a total outage and health, and through a loss at the budget."""
    warm, outage = rule.long_s + 3600, rule.outage_s + rule.short_s + 1800
    useful = useful_seconds([(warm, 1), (outage, 0), (2 * rule.long_s + 3600, 1)], step_s)
    fires = firing(rule, useful)
    began, ended = round(warm / _I), round((warm + outage) / _I)
    at = np.flatnonzero(fires)
    fired = at[0] if len(at) and at[0] >= began else None
    cleared = np.flatnonzero(~fires[ended:])
    at_budget = useful_seconds([(4 * rule.long_s, rule.target)], step_s)
    return Outcome(
        None if fired is None else float((fired - began) * _I),
        float(cleared[0] * _I) if len(cleared) and not fires[ended + cleared[0] :].any() else None,
        bool(firing(rule, at_budget).any()),
    )


def every_rule(step_s: float = 0.0) -> Iterator[tuple[float, str, BurnRule]]:
    for target in TARGETS:
        for period, hours in PERIODS.items():
            for rule in burn_rules(target, hours * 3600.0, step_s)[0]:
                yield target, period, rule


# --- Prometheus's own engine ----------------------------------------------------------------------
def promtool_file(target: float, period: str, folder: Path) -> Path:
    """Write rules and a test for one objective; return the test's path. Each rule is expected to be
    silent before its time, to fire after it, and to clear."""
    objective = ServiceObjective(indicator="goodput", target=target, period=period)
    alerts, _ = objective_alerts((objective,))
    groups = rule_groups(alerts)
    name = f"{round(100 * target)}-{period}"
    (folder / f"rules-{name}.yml").write_text(yaml.safe_dump(groups))
    rules = {r["labels"]["factor"]: r for r in groups["groups"][1]["rules"]}
    tests = []
    for rule in burn_rules(target, objective.period_s)[0]:
        outcome = simulate(rule)
        assert outcome.fires_s is not None
        assert outcome.clears_s is not None
        outage = round((outcome.fires_s + 600) / _I)
        warm = round(rule.long_s / _I) + 20
        after = round(2 * rule.short_s / _I) + 20
        useful = f"0+{_I}x{warm} {warm * _I}x{outage - 1} {warm * _I}+{_I}x{after}"
        written = rules[f"{rule.factor:.3g}"]
        alert = {
            "exp_labels": {"run_id": "demo"} | written["labels"],
            "exp_annotations": {
                key: text.replace("{{ $labels.run_id }}", "demo")
                for key, text in written["annotations"].items()
            },
        }
        # The alerts of the other rules would be listed, too: the engine gets one rule at a time.
        only = {"groups": [groups["groups"][0], {**groups["groups"][1], "rules": [written]}]}
        path = folder / f"rules-{name}-{rule.factor:.3g}.yml"
        path.write_text(yaml.safe_dump(only))
        fires, clears = warm * _I + outcome.fires_s, (warm + outage) * _I + rule.short_s * 2
        times = [(fires - 4 * _I, False), (fires + 4 * _I, True), (clears, False)]
        tests.append(
            {
                "rule_files": [path.name],
                "evaluation_interval": f"{_I}s",
                "tests": [
                    {
                        "interval": f"{_I}s",
                        "input_series": [
                            {
                                "series": f'holdfast_goodput_seconds{{{_RUN},class="productive"}}',
                                "values": useful,
                            },
                            {
                                "series": f'holdfast_run_state{{{_RUN},state="running"}}',
                                "values": f"1x{warm + outage + after}",
                            },
                        ],
                        "alert_rule_test": [
                            {
                                "eval_time": f"{round(at)}s",
                                "alertname": "ObjectiveBurn",
                                "exp_alerts": [alert] if is_firing else [],
                            }
                            for at, is_firing in times
                        ],
                    }
                ],
            }
        )
    for number, test in enumerate(tests):
        (folder / f"test-{name}-{number}.yml").write_text(yaml.safe_dump(test, width=10**9))
    return folder


def run_promtool(targets: Sequence[float], periods: Sequence[str]) -> list[str]:
    """Return the complaints of promtool; none if every rule does what the simulation says."""
    complaints = []
    for target in targets:
        for period in periods:
            with tempfile.TemporaryDirectory() as name:
                folder = promtool_file(target, period, Path(name))
                files = sorted(path.name for path in folder.glob("test-*.yml"))
                done = subprocess.run(
                    ["promtool", "test", "rules", *files],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    complaints.append(f"{target:g} {period}:\n{done.stdout}{done.stderr}")
    return complaints


# --- the tables -----------------------------------------------------------------------------------
SLOTH_7D = {
    "page 1h": (8.0, 1),
    "page 6h": (12.5, 6),
    "ticket 1d": (20.0, 24),
    "ticket 3d": (42.0, 72),
}
SLOTH_30D = {
    "page 1h": (2.0, 1),
    "page 6h": (5.0, 6),
    "ticket 1d": (10.0, 24),
    "ticket 3d": (10.0, 72),
}
"""Window of sloth 0.16 -> percent of the budget, hours (examples/windows/7d.yaml and
internal/alert/windows/google-30d.yaml of commit 0e395d8)."""
PYRRA = {"critical": (14.0, 7.0), "warning": (2.0, 1.0)}
"""Factors of pyrra for every window (slo/rules.go of commit 1ba95af)."""


def sloth_thresholds(target: float, windows: dict[str, tuple[float, int]], hours: int) -> list[str]:
    """Return the shares of errors at which sloth's rules fire, "never" above 1."""
    return [
        _share(percent * hours / 100 / long_hours * (1 - target))
        for percent, long_hours in windows.values()
    ]


def _share(threshold: float) -> str:
    return f"{threshold:.3g}" if threshold < 1 else f"{threshold:.3g} (never)"


def _time(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--promtool", action="store_true")
    arguments = parser.parse_args()
    print("| target | period | rule | window | short | fires above | total outage | clears after |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = 0
    for step_s in STEPS_S:
        for target, period, rule in every_rule(step_s):
            found = simulate(rule, step_s)
            is_right = (
                found.fires_s is not None
                and found.clears_s is not None
                and found.clears_s <= 2 * rule.short_s
                and not found.fires_at_budget
            )
            wrong += not is_right
            if step_s and is_right:
                continue
            fires, clears = found.fires_s, found.clears_s
            print(
                f"| {100 * target:g} % | {period} | {rule.severity} {rule.factor:.3g} | "
                f"{_time(rule.long_s)} | {_time(rule.short_s)} | {rule.threshold:.3g} | "
                f"{'never' if fires is None else _time(fires)} | "
                f"{'never' if clears is None else _time(clears)} |"
                + ("" if is_right else f" wrong with steps of {step_s:g} s: {found}")
            )
    number = sum(1 for step_s in STEPS_S for _ in every_rule(step_s))
    print(f"\n{number} simulations (steps of 0 and 60 s): {wrong} wrong\n")
    print("| target | sloth, 7 d | sloth, 30 d | pyrra, every period |")
    print("|---|---|---|---|")
    for target in TARGETS:
        pyrra = [_share(factor * (1 - target)) for both in PYRRA.values() for factor in both]
        seven, thirty = (
            sloth_thresholds(target, windows, hours)
            for windows, hours in ((SLOTH_7D, 168), (SLOTH_30D, 720))
        )
        cells = "; ".join(seven), "; ".join(thirty), "; ".join(pyrra)
        print(f"| {100 * target:g} % | {' | '.join(cells)} |")
    if arguments.promtool:
        complaints = run_promtool(TARGETS, tuple(PERIODS))
        print(f"\npromtool: {len(complaints)} of {len(TARGETS) * len(PERIODS)} objectives differ")
        print("\n".join(complaints))
        wrong += len(complaints)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
