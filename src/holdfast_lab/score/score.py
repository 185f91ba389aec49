"""The Resilience Score: sub-scores, gate, score and its interval. Pure.

    G       kept tokens / tokens of the reference table on the nodes that were there
    S_RPO   1/(1 + x/T_ref)   x: mean lost work of an interruption, in seconds
    S_RTO   1/(1 + y/T_ref)   y: 95th percentile of the time to the first new step at 90 %
    S_EO    (throughput with resilience on / off) x (kept tokens of the staircase / ideal)
    S_J     throughput with a slow node / throughput without stragglers
    S_P     G on the preemption scenarios
    RS      100 x gate x product of S_i ** w_i, sum of w_i = 1

T_ref is 5 % of the scenario's mean time between interruptions. Each value is computed for a
(scenario, seed) pair and averaged over the pairs to which it applies.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

from holdfast.borders import Border
from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast_lab.score.record import (
    ReferenceTable,
    RunRecord,
    first_new_step_times,
    goodput,
    mean_lost_seconds,
    percentile,
    recovery_times,
    unrecovered_faults,
)
from holdfast_lab.score.scenarios import SCENARIOS

PARTS = ("RPO", "RTO", "EO", "J", "P")
REFERENCE_SHARE = 0.05
RESAMPLES = 1000


@dataclass(frozen=True)
class Weights:
    """Exponents of the sub-scores, not negative; they are divided by their sum."""

    version: str = "v1"
    values: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.2))

    def shares(self) -> dict[str, float]:
        total = sum(self.values.values())
        return {part: self.values[part] / total for part in PARTS}

    def changed(self, part: str, factor: float) -> Weights:
        return Weights(self.version, {**self.values, part: self.values[part] * factor})


WEIGHTS = Border("weights of a score", frozenset({"version", "weights"}))


def parse_weights(text: str, source: str) -> Weights:
    """Weights of a JSON file, {"version": "v1", "weights": {"RPO": 0.2, ...}}. Raises DataError."""
    example = json.dumps({"version": "mine", "weights": dict.fromkeys(PARTS, 0.2)})
    try:
        given: Any = parse_json(text)
        WEIGHTS.check(given, source, DataError, f"write {example}")
        values = {str(key): float(value) for key, value in given["weights"].items()}
        version = str(given["version"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            "this is no file of weights", where=source, remedy=f"write {example}"
        ) from None
    good = set(values) == set(PARTS) and all(0 <= v < inf for v in values.values())
    if not good or not sum(values.values()):
        raise DataError(
            "weights must be numbers of at least 0, one for each sub-score, and not all 0",
            where=source,
            remedy=f"write {example}",
        )
    return Weights(version, values)


@dataclass(frozen=True)
class GateCheck:
    """One condition. holds: None if this set of scenarios could not test it."""

    name: str
    holds: bool | None
    detail: str = ""


@dataclass(frozen=True)
class PairScore:
    """The values of one (scenario, seed) pair; None: it does not apply. g is not clamped.
    eo: of F0 the ratio of throughputs, of F11 the share of the ideal."""

    scenario: str
    seed: int
    g: float
    rpo: float | None = None
    rto: float | None = None
    eo: float | None = None
    jitter: float | None = None
    spot: float | None = None
    lost_s: float = 0.0
    recovery_s: float = 0.0
    first_step_s: float = 0.0
    kept_tokens: float = 0.0
    usd: float = 0.0
    grams_co2: float = 0.0
    unrecovered: int = 0  # interruptions after which no step came


@dataclass(frozen=True)
class Vector:
    """(G, S_RPO, S_RTO, S_EO, S_J, S_P); None: no scenario of this set measures it."""

    g: float
    parts: Mapping[str, float | None]

    def score(self, weights: Weights, gate: float = 1.0) -> float | None:
        """RS, or None if a sub-score with a weight is missing."""
        shares = weights.shares()
        known = {p: v for p, v in self.parts.items() if v is not None}
        if any(share and part not in known for part, share in shares.items()):
            return None
        return 100.0 * gate * float(prod(known[p] ** share for p, share in shares.items() if share))


@dataclass(frozen=True)
class Score:
    """What `holdfast score` says of a trainer or a policy.

    interval, g_interval: 95 %, by bootstrap over (scenario, seed) pairs; of the score without its
    gate. sensitivity: lowest and highest score with one weight 50 % lower or higher.
    """

    pairs: tuple[PairScore, ...]
    vector: Vector
    gate: tuple[GateCheck, ...]
    weights: Weights
    score: float | None
    ungated: float | None
    interval: tuple[float, float] | None
    g_interval: tuple[float, float]
    sensitivity: tuple[float, float] | None
    clamped: int

    @property
    def is_open(self) -> bool:
        """True if no condition of the gate is broken."""
        return all(check.holds is not False for check in self.gate)


def score_pair(record: RunRecord, reference: ReferenceTable) -> PairScore:
    """The values of one run."""
    parts = SCENARIOS[record.scenario].parts
    g = goodput(record, reference)
    kept = g * reference.tokens(record.capacity, 0.0, record.seconds)
    t_ref = REFERENCE_SHARE * record.between_s
    lost, recovery = mean_lost_seconds(record), percentile(recovery_times(record, reference), 0.95)
    has_faults = bool(record.faults)
    eo = None
    if record.scenario == "F0" and record.off_rate > 0:
        eo = kept / record.seconds / record.off_rate
    elif record.scenario == "F11":
        eo = min(1.0, g)
    return PairScore(
        record.scenario,
        record.seed,
        g,
        1 / (1 + lost / t_ref) if has_faults and "RPO" in parts else None,
        1 / (1 + recovery / t_ref) if has_faults and "RTO" in parts else None,
        None if eo is None else min(1.0, eo),
        min(1.0, g) if "J" in parts else None,
        min(1.0, g) if "P" in parts else None,
        lost,
        recovery,
        percentile(first_new_step_times(record), 0.95),
        kept,
        unrecovered=unrecovered_faults(record),
    )


def vector_of(pairs: Sequence[PairScore]) -> Vector:
    """Means over the pairs. S_EO is the product of the means over F0 and over F11."""
    on_off = _mean(pair.eo for pair in pairs if pair.scenario == "F0")
    stairs = _mean(pair.eo for pair in pairs if pair.scenario == "F11")
    return Vector(
        _mean(min(1.0, pair.g) for pair in pairs) or 0.0,
        {
            "RPO": _mean(pair.rpo for pair in pairs),
            "RTO": _mean(pair.rto for pair in pairs),
            "EO": None if on_off is None or stairs is None else on_off * stairs,
            "J": _mean(pair.jitter for pair in pairs),
            "P": _mean(pair.spot for pair in pairs),
        },
    )


def score_pairs(
    given: Sequence[PairScore],
    gate: Sequence[GateCheck],
    weights: Weights | None = None,
    seed: int = 0,
) -> Score:
    """The score of some pairs. seed: of the bootstrap."""
    weights, pairs = weights or Weights(), tuple(given)
    vector = vector_of(pairs)
    is_open = all(check.holds is not False for check in gate)
    ungated = vector.score(weights)
    interval, g_interval = _bootstrap(pairs, weights, seed)
    return Score(
        pairs,
        vector,
        tuple(gate),
        weights,
        None if ungated is None else ungated * is_open,
        ungated,
        interval,
        g_interval,
        None if ungated is None else _sensitivity(vector, weights),
        sum(pair.g > 1.0 for pair in pairs),
    )


def _sensitivity(vector: Vector, weights: Weights) -> tuple[float, float]:
    found = [vector.score(weights.changed(part, factor)) for part in PARTS for factor in (0.5, 1.5)]
    known = [value for value in found if value is not None]
    return min(known), max(known)


def _bootstrap(
    pairs: Sequence[PairScore], weights: Weights, seed: int
) -> tuple[tuple[float, float] | None, tuple[float, float]]:
    """95 % intervals of the score and of G. A resample that lacks a sub-score is drawn again."""
    chance = random.Random(f"bootstrap {seed}")
    scores, goodputs = list[float](), list[float]()
    has_score = vector_of(pairs).score(weights) is not None
    tries = 0
    while len(goodputs) < RESAMPLES and tries < 20 * RESAMPLES:
        tries += 1
        vector = vector_of(chance.choices(pairs, k=len(pairs)))
        score = vector.score(weights)
        if has_score and score is None:
            continue
        goodputs.append(vector.g)
        if score is not None:
            scores.append(score)
    return _middle(scores) if scores else None, _middle(goodputs)


def _middle(values: list[float]) -> tuple[float, float]:
    return percentile(values, 0.025), percentile(values, 0.975)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def literal_formula(score: Score) -> tuple[float, str]:
    """w1/RPO + w2/RTO + w3 EO + w4 J + w5 P of the literature, with its units, and a sentence.

    RPO and RTO are means over the pairs in seconds. It is infinite if nothing is lost, and changes
    with the unit of time. It is shown next to the score, and is no part of it.
    """
    shares = score.weights.shares()
    faulty = [pair for pair in score.pairs if pair.rpo is not None]
    rpo, rto = _mean(pair.lost_s for pair in faulty), _mean(pair.recovery_s for pair in faulty)
    total = sum(shares[p] * (score.vector.parts[p] or 0.0) for p in ("EO", "J", "P"))
    for part, seconds in (("RPO", rpo), ("RTO", rto)):
        if seconds is not None:
            total += shares[part] / seconds if seconds > 0 else inf
    words = f"w1/RPO + w2/RTO (1/s) + w3 EO + w4 J + w5 P (no unit) = {total:.4g}"
    return total, f"{words}, with RPO {rpo or 0.0:.3g} s and RTO {rto or 0.0:.3g} s"
