"""Alerts of an objective by burn rate, for runs of hours to weeks and targets of 50 to 99 %.

An objective is a share of time, such as "90 % useful over 7 days". Its *budget* is the rest. A burn
rate of b uses the budget up in 1/b of the period. The factors and shares are those of the SRE
workbook (chapter "Alerting on SLOs"), whose targets are 99.9 %. Two things differ here:

- A share cannot exceed 1. So a factor b can fire only if b * (1 - target) is below 1. Other rules
  are not written. If no page is left, one with the largest useful factor takes its place.
- A window follows from the period: a burn of b uses `share` of the budget in it. The time of a run
  is known to one step and one scrape. So a window is so long that this error makes no rule fire at
  the budget, and keeps none from clearing. The smallest factor is 1.5, not 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.config.sections.observe import ServiceObjective
from holdfast.report.alerts.catalogue import Alert, Severity
from holdfast.report.alerts.expression import EVALUATE_EVERY_S, Above, LostShare, Number

NAME = "ObjectiveBurn"
CLASSES: Mapping[str, tuple[str, ...]] = {
    "goodput": ("productive",),
    "progress": (
        *("productive", "communication", "data_wait", "checkpoint", "evaluation", "other"),
    ),
}
"""Indicator -> the classes of the ledger of time that count as good."""
MIN_SHORT_WINDOW_S = 8 * EVALUATE_EVERY_S
SHORT_PART = 12  # the short window is a twelfth of the long one, or the shortest that is allowed
_CLEARANCE = 1.2  # the error in a short window stays below the threshold by this factor
_LARGEST_ERROR = 0.9  # share of lost time at which the largest useful factor fires


@dataclass(frozen=True)
class BurnRule:
    """A burn rate over two windows."""

    severity: Severity
    factor: float
    long_s: float
    short_s: float
    target: float

    @property
    def threshold(self) -> float:
        """Share of lost time in both windows above which the rule fires."""
        return self.factor * (1 - self.target)

    @property
    def outage_s(self) -> float:
        """Seconds of a total outage until it fires."""
        return self.threshold * self.long_s


@dataclass(frozen=True)
class Wanted:
    """A rule of the workbook: its factor, and the share of the budget it waits for."""

    severity: Severity
    factor: float
    share: float


WANTED = (
    Wanted("page", 14.4, 0.02),
    Wanted("page", 6.0, 0.05),
    Wanted("ticket", 3.0, 0.10),
    Wanted("ticket", 1.5, 0.10),
)


def burn_rules(
    target: float, period_s: float, step_s: float = 0.0
) -> tuple[list[BurnRule], list[str]]:
    """Return the rules that can fire, and a sentence for each one that is not written.

    step_s: of a usual step; 0 if it is not known."""
    budget, rules, reasons = 1 - target, list[BurnRule](), list[str]()
    wanted = []
    for one in WANTED:
        if one.factor * budget < 1:
            wanted.append(one)
            continue
        reasons.append(
            f"no {one.severity} at {one.factor:g} times the budget: that is "
            f"{one.factor * budget:.3g} of the time, and a share of time is at most 1"
        )
    if not any(one.severity == "page" for one in wanted):
        wanted.insert(0, Wanted("page", _LARGEST_ERROR / budget, WANTED[0].share))
    blur_s = EVALUATE_EVERY_S + step_s
    for one in wanted:
        surely_above_s = blur_s / ((one.factor - 1) * budget)
        long_s = _round(
            max(one.share * period_s / one.factor, surely_above_s, 4 * MIN_SHORT_WINDOW_S)
        )
        if long_s > period_s:
            reasons.append(
                f"no {one.severity} at {one.factor:.3g} times the budget: with steps of "
                f"{step_s:g} s its window would be longer than the period"
            )
            continue
        surely_below_s = _CLEARANCE * blur_s / (one.factor * budget)
        short_s = _round(min(long_s, max(long_s / SHORT_PART, surely_below_s, MIN_SHORT_WINDOW_S)))
        rule = BurnRule(one.severity, one.factor, long_s, short_s, target)
        if rules and rules[-1].long_s == long_s and rules[-1].severity == one.severity:
            reasons.append(
                f"no {one.severity} at {rules[-1].factor:.3g} times: with the same window, "
                f"{one.factor:.3g} times fires first"
            )
            rules.pop()
        rules.append(rule)
    return rules, reasons


def _round(seconds: float) -> float:
    """Return the seconds as a multiple of the interval of evaluation, rounded up."""
    return -(-seconds // EVALUATE_EVERY_S) * EVALUATE_EVERY_S


def objective_alerts(
    objectives: tuple[ServiceObjective, ...], step_s: float = 0.0
) -> tuple[list[Alert], list[str]]:
    """Return the alerts of all objectives, and what is not written, each with its objective."""
    alerts, reasons = list[Alert](), list[str]()
    for objective in objectives:
        rules, missing = burn_rules(objective.target, objective.period_s, step_s)
        text = objective.text
        reasons += [f"{text}: {reason}" for reason in missing]
        classes = CLASSES[objective.indicator]
        for rule in rules:
            threshold = Number(rule.threshold)
            alerts.append(
                Alert(
                    NAME,
                    (
                        Above(LostShare(classes, rule.long_s), threshold),
                        Above(LostShare(classes, rule.short_s), threshold),
                    ),
                    rule.severity,
                    f"objective {objective.indicator}",
                    f"{{run}} uses its budget up {rule.factor:.3g} times as fast as {text} allows",
                    labels={"objective": text, "factor": f"{rule.factor:.3g}"},
                )
            )
    return alerts, reasons
