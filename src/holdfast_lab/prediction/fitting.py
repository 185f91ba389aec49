"""Fits the models of `policy.prediction` to samples of the past. Pure.

The last fifth of the time is kept for the validation. It sets each model's threshold (best F1) and
chooses among the models (average precision). The Bi-LSTM is trained in
`holdfast_lab.prediction.bilstm` and comes in as a function. No torch is imported here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log

from holdfast.errors import DataError
from holdfast.policy.prediction.bilstm import BiLstm
from holdfast.policy.prediction.models import (
    MIN_RATE,
    BaseRateModel,
    HazardModel,
    LastEventModel,
    Model,
    NeverModel,
    SmoothingModel,
)
from holdfast.policy.prediction.predictor import FittedModels, ModelVerdict, TrainingSource
from holdfast_lab.prediction.judging import best_threshold, judge
from holdfast_lab.prediction.samples import (
    HALF_LIVES_IN_HORIZONS,
    MEMORY_IN_HORIZONS,
    Sample,
    SampleSet,
    changes_of,
    take_samples,
)
from holdfast_lab.traces.events import EventStream

VALIDATION_SHARE = 0.2
MIN_LOSSES = 20  # losses that a fit needs. With fewer, not even a base rate is known to a fifth
SHRINKAGE_LOSSES = 5.0  # losses that the table of all zones is worth in the table of one
MAX_FIT_SAMPLES = 40_000
_AGES_IN_HORIZONS = (
    *(0.0, 0.25, 0.5, 1, 2, 4, 6, 8, 12, 16, 20),
    *(22, 23, 24, 28, 36, 48, 72, 120, 240),
)

TrainLstm = Callable[[Sequence[Sample], Sequence[float], float], BiLstm]
"""Samples, the weight of each, the horizon."""


@dataclass(frozen=True)
class TrainingPart:
    """A trace, and until when the fit may look at it."""

    stream: EventStream
    until_s: float
    every_nth: int = 1

    @property
    def split_s(self) -> float:
        return self.until_s * (1 - VALIDATION_SHARE)


def fit_models(
    parts: Sequence[TrainingPart],
    horizon_s: float,
    train_lstm: TrainLstm | None = None,
    stage: Callable[[str], None] = lambda words: None,
) -> FittedModels:
    """Fit all models on the first four fifths of the parts, and validate them on the last one.

    stage: hears what is done from now on. Raises DataError if too few nodes were lost.
    """
    learn, validate = SampleSet((), 0), SampleSet((), 0)
    for number, part in enumerate(parts, start=1):
        stage(f"taking samples of trace {number} of {len(parts)}")
        learn += take_samples(part.stream, horizon_s, 0.0, part.split_s, part.every_nth)
        validate += take_samples(part.stream, horizon_s, part.split_s, part.until_s, part.every_nth)
    seen = [sum(sample.is_lost for sample in group.samples) for group in (learn, validate)]
    if seen[0] < MIN_LOSSES or not seen[1]:
        raise DataError(
            f"a horizon of {horizon_s:g} s foresees {seen[0]} losses before the last fifth "
            f"and {seen[1]} in it; a fit needs {MIN_LOSSES} and 1",
            where=", ".join(part.stream.header.source or "trace" for part in parts),
            remedy="give more traces or more of them with --until, or another --horizon",
        )
    stage(f"fitting the hazard and the smoothing to {len(learn.samples):,} samples")
    samples, weights = subsample(learn.samples)
    hazard, usual = fit_hazard(parts, horizon_s)
    models: tuple[Model, ...] = (
        NeverModel(),
        BaseRateModel(usual),
        _last_event(samples, weights, horizon_s),
        hazard,
        _smoothing(samples, weights, horizon_s, usual),
    )
    stage(f"training the Bi-LSTM on {len(samples):,} samples" if train_lstm else "validating")
    lstm = train_lstm(samples, weights, horizon_s) if train_lstm else None
    verdicts = {}
    for name, chances in predict_all(models, lstm, validate, horizon_s).items():
        threshold = best_threshold([s.is_lost for s in validate.samples], chances)
        found = judge(name, validate, chances, threshold)
        verdicts[name] = ModelVerdict(
            threshold, found.precision, found.recall, found.average_precision
        )
    return FittedModels(
        horizon_s,
        tuple(share * horizon_s for share in HALF_LIVES_IN_HORIZONS),
        MEMORY_IN_HORIZONS * horizon_s,
        models,
        lstm,
        max(verdicts, key=lambda name: verdicts[name].average_precision),
        verdicts,
        tuple(
            TrainingSource(p.stream.header.source, p.stream.header.sha256, p.until_s) for p in parts
        ),
    )


def predict_all(
    models: Sequence[Model], lstm: BiLstm | None, asked: SampleSet, horizon_s: float
) -> dict[str, list[float]]:
    """The chances that each model gives to each sample."""
    out = {
        model.name: [model.probability(sample.signals, horizon_s) for sample in asked.samples]
        for model in models
    }
    if lstm is not None:
        windows = [sample.window for sample in asked.samples]
        parts = [windows[at : at + 4096] for at in range(0, len(windows), 4096)]
        out[lstm.name] = [chance for part in parts for chance in lstm.probabilities(part)]
    return out


def subsample(samples: Sequence[Sample], seed: int = 0) -> tuple[list[Sample], list[float]]:
    """All samples with a loss, as many of the rest as fit, and the weight of each."""
    lost = [sample for sample in samples if sample.is_lost]
    rest = [sample for sample in samples if not sample.is_lost]
    room = max(1000, MAX_FIT_SAMPLES - len(lost))
    if len(rest) <= room:
        return list(samples), [1.0] * len(samples)
    kept = random.Random(f"{seed}/samples").sample(rest, room)
    return lost + kept, [1.0] * len(lost) + [len(rest) / room] * room


# --- the models ---------------------------------------------------------------------------------
def _stays(part: TrainingPart) -> list[tuple[str, float, float, bool]]:
    """(zone, seconds, age at the start, was lost) of every stay until the split, where open ones
    are censored."""
    up: dict[str, tuple[str, float]] = {}
    out = []
    for change in changes_of(part.stream):
        if change.t_s > part.split_s:
            break
        if change.kind == "join":
            up.setdefault(change.node, (change.zone, change.t_s))
        elif change.node in up:
            zone, since = up.pop(change.node)
            out.append((zone, change.t_s - since, 0.0, change.kind == "lost"))
    out += [(zone, part.split_s - since, 0.0, False) for zone, since in up.values()]
    return out


def fit_hazard(parts: Sequence[TrainingPart], horizon_s: float) -> tuple[HazardModel, float]:
    """Losses by exposure in each age and zone, and their base rate. A zone's table is shrunk to
    that of all zones."""
    edges = tuple(share * horizon_s for share in _AGES_IN_HORIZONS)
    stays = [stay for part in parts for stay in _stays(part)]
    usual = max(MIN_RATE, sum(s[3] for s in stays) / max(1.0, sum(s[1] for s in stays)))
    pooled = _table(stays, edges, [usual] * len(edges), 1.0)
    rates = {"": tuple(pooled)}
    for zone in sorted({stay[0] for stay in stays}):
        mine = [stay for stay in stays if stay[0] == zone]
        rates[zone] = tuple(_table(mine, edges, pooled, SHRINKAGE_LOSSES))
    return HazardModel(edges, rates), usual


def _table(
    stays: Sequence[tuple[str, float, float, bool]],
    edges: Sequence[float],
    prior: Sequence[float],
    weight: float,
) -> list[float]:
    exposure, lost = [0.0] * len(edges), [0.0] * len(edges)
    for _, seconds, _, was_lost in stays:
        for index, low in enumerate(edges):
            high = edges[index + 1] if index + 1 < len(edges) else inf
            if seconds <= low and index:
                break
            exposure[index] += min(seconds, high) - low
            lost[index] += was_lost and low <= seconds < high
    return [
        (count + weight) / (seen + weight / rate)
        for count, seen, rate in zip(lost, exposure, prior, strict=True)
    ]


def _last_event(
    samples: Sequence[Sample], weights: Sequence[float], horizon_s: float
) -> LastEventModel:
    seen, lost = [1e-9, 1e-9], [0.0, 0.0]
    for sample, weight in zip(samples, weights, strict=True):
        since = sample.signals.since_zone_loss_s
        place = int(since is not None and since <= horizon_s)
        seen[place] += weight
        lost[place] += weight * sample.is_lost
    rates = [
        -log(max(1e-12, 1 - min(0.999, n / all_))) / horizon_s
        for n, all_ in zip(lost, seen, strict=True)
    ]
    return LastEventModel(horizon_s, rates[1], rates[0])


def _smoothing(
    samples: Sequence[Sample], weights: Sequence[float], horizon_s: float, usual: float
) -> SmoothingModel:
    """The half-lives and prior weights of the best likelihood, of a small grid."""
    halves = range(len(HALF_LIVES_IN_HORIZONS))
    few = list(zip(samples, weights, strict=True))[:: max(1, len(samples) // 8000)]
    candidates = [
        SmoothingModel(zone, node, usual, zone_weight, node_weight)
        for zone in halves
        for zone_weight in (0.3, 1.0, 5.0)
        for node, node_weight in ((0, inf), *((half, w) for half in halves for w in (0.3, 2.0)))
    ]

    def likelihood(model: SmoothingModel) -> float:
        total = 0.0
        for sample, weight in few:
            p = min(1 - 1e-6, max(1e-9, model.probability(sample.signals, horizon_s)))
            total += weight * (log(p) if sample.is_lost else log(1 - p))
        return total

    return max(candidates, key=likelihood)
