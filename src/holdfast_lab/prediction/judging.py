"""Judges predicted chances against what happened: precision, recall, calibration, lead time. Pure.

An alarm is a sample whose chance is at least the threshold. Precision is the share of alarms that
a loss within the horizon followed. Recall is the share of all losses that an alarm preceded. Losses
of nodes that joined after the last sample count too, and are missed.

Average precision is the mean precision over the ranks of the losses. A predictor without knowledge
gets the base rate. Skill is 1 - Brier / Brier of the judged part's own base rate. Above 0, the
chances say more than an average that was taken from the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from holdfast_lab.prediction.samples import SampleSet

CALIBRATION_EDGES = (0.0, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class CalibrationBin:
    """Samples whose chance was at least `low`. predicted, observed: means."""

    low: float
    samples: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class Verdict:
    """How well a model did. base_rate: share of samples that were lost. lead_s: median seconds from
    an alarm to the loss that it foresaw; None without one."""

    model: str
    samples: int
    losses: int
    base_rate: float
    threshold: float
    alarms: int
    precision: float
    recall: float
    average_precision: float
    skill: float
    lead_s: float | None
    calibration: tuple[CalibrationBin, ...]

    @property
    def f1(self) -> float:
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0

    @property
    def calibration_error(self) -> float:
        """Mean distance of predicted and observed, over the samples."""
        return sum(
            each.samples * abs(each.predicted - each.observed) for each in self.calibration
        ) / max(1, self.samples)


def judge(model: str, asked: SampleSet, chances: Sequence[float], threshold: float) -> Verdict:
    """The verdict on one chance for each sample."""
    samples = asked.samples
    found = sum(sample.is_lost for sample in samples)
    alarms = [s for s, p in zip(samples, chances, strict=True) if p >= threshold and p > 0]
    leads = [sample.lead_s for sample in alarms if sample.lead_s is not None]
    base = found / len(samples) if samples else 0.0
    brier = sum(
        (p - sample.is_lost) ** 2 for sample, p in zip(samples, chances, strict=True)
    ) / max(1, len(samples))
    floor = base * (1 - base)
    return Verdict(
        model,
        len(samples),
        asked.losses,
        base,
        threshold,
        len(alarms),
        len(leads) / len(alarms) if alarms else 0.0,
        len(leads) / asked.losses if asked.losses else 0.0,
        average_precision([sample.is_lost for sample in samples], chances),
        1 - brier / floor if floor else 0.0,
        median(leads) if leads else None,
        calibration(asked, chances),
    )


def average_precision(lost: Sequence[bool], chances: Sequence[float]) -> float:
    """Mean precision over the losses, in the order of falling chance. Equal chances share one
    rank, so an answer that is always the same gets the base rate."""
    total = sum(lost)
    if not total:
        return 0.0
    order = sorted(zip(chances, lost, strict=True), key=lambda pair: -pair[0])
    score, hits, place = 0.0, 0, 0
    while place < len(order):
        until, here = place, 0
        while until < len(order) and order[until][0] == order[place][0]:
            here += order[until][1]
            until += 1
        hits += here
        score += here * hits / until
        place = until
    return score / total


def best_threshold(lost: Sequence[bool], chances: Sequence[float]) -> float:
    """The threshold with the best F1; one that is never reached if nothing was lost."""
    order = sorted(zip(chances, lost, strict=True), key=lambda pair: -pair[0])
    total, hits, best = sum(lost), 0, (0.0, 2.0)
    for place, (chance, was_lost) in enumerate(order, start=1):
        hits += was_lost
        if place < len(order) and order[place][0] == chance:
            continue
        f1 = 2 * hits / (place + total) if total else 0.0
        if f1 > best[0] and chance > 0:
            best = (f1, chance)
    return best[1]


def calibration(asked: SampleSet, chances: Sequence[float]) -> tuple[CalibrationBin, ...]:
    bins = []
    for index, low in enumerate(CALIBRATION_EDGES):
        high = CALIBRATION_EDGES[index + 1] if index + 1 < len(CALIBRATION_EDGES) else 2.0
        here = [
            (p, sample.is_lost)
            for sample, p in zip(asked.samples, chances, strict=True)
            if low <= p < high
        ]
        if here:
            predicted = sum(p for p, _ in here) / len(here)
            observed = sum(was_lost for _, was_lost in here) / len(here)
            bins.append(CalibrationBin(low, len(here), predicted, observed))
    return tuple(bins)
