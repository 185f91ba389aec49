"""Fits the four constants of a device and precision to measured rows.

Least squares of the logarithm of predicted over measured (Gauss-Newton with numeric slopes). A row
far off counts less (weights of a Cauchy-like loss). Each constant is drawn to its usual value by a
small weight, so a few rows suffice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.runtime.plan_fidelity.case import Case, predicted, with_efficiency
from holdfast.plan.hardware.devices import PRECISIONS, DeviceType, Efficiency

Numbers = NDArray[np.float64]

USUAL = Efficiency(0.7, 0.7, 20e-6, 5e-6, 0.35)
SPREAD = {"compute": 0.5, "memory": 0.5, "ramp_s": 1.0, "attention": 0.7}
"""The fitted constants, and how far each may go from the usual value (in its logarithm)."""

PULL = 0.05
"""Weight of the usual values: that of one row with this error."""

DRAWN = 0.15
"""The same weight of the constants of all devices together."""

ANOTHER_PRECISION = 0.3
"""Distance of neighbouring precisions, next to logarithms of ratios of peaks and bandwidths."""

LEAST = 3
"""Rows of other models that a fit of their own needs."""

MOST = {"compute": 1.0, "memory": 1.0, "attention": 0.7}
"""Largest values of shares."""

FAR = 0.08
"""Error beyond which a row counts less."""

ROUNDS, STEP, LONGEST = 8, 0.02, 0.7


@dataclass(frozen=True)
class Fitted:
    """constants of a group, from so many rows. like: the device that they are of, if another."""

    constants: Efficiency
    rows: int
    like: str = ""


def fit(
    cases: Sequence[Case],
    devices: Mapping[str, DeviceType],
    centre: Efficiency = USUAL,
    pull: float = PULL,
) -> Efficiency:
    """Return the constants for these rows, one set for all their devices and precisions."""
    spread = np.array(list(SPREAD.values()))
    weight = pull / spread
    point = np.zeros(len(SPREAD))
    for _ in range(ROUNDS):
        errors = _errors(cases, devices, centre, point)
        slopes = np.empty((len(cases), len(point)))
        for index in range(len(point)):
            moved = point.copy()
            moved[index] += STEP
            slopes[:, index] = (_errors(cases, devices, centre, moved) - errors) / STEP
        weights = 1 / np.sqrt(1 + (errors / FAR) ** 2)
        matrix = np.vstack([slopes * weights[:, None], np.diag(weight)])
        target = np.concatenate([-errors * weights, -weight * point])
        move, *_ = np.linalg.lstsq(matrix, target, rcond=None)
        point = point + np.clip(move, -LONGEST, LONGEST)
        if np.abs(move).max() < STEP:
            break
    return _constants(centre, point)


def _constants(centre: Efficiency, point: Numbers) -> Efficiency:
    values = {
        name: min(MOST.get(name, math.inf), getattr(centre, name) * math.exp(number))
        for name, number in zip(SPREAD, point, strict=True)
    }
    return replace(centre, **values)


def _errors(
    cases: Sequence[Case], devices: Mapping[str, DeviceType], centre: Efficiency, point: Numbers
) -> Numbers:
    constants, known = _constants(centre, point), dict[object, float]()
    for case in cases:
        if case.configuration not in known:
            device = with_efficiency(devices[case.device], case.precision, constants)
            known[case.configuration] = predicted(case, {**devices, case.device: device})
    return np.array([math.log(known[case.configuration] / case.measured) for case in cases])


Group = tuple[str, str]


def like(group: Group, known: Sequence[Group], devices: Mapping[str, DeviceType]) -> Group | None:
    """Return the group that is most alike: near in peak and bandwidth of the device, and near in
    precision."""
    device, precision = devices[group[0]], group[1]

    def distance(other: Group) -> float:
        one = devices[other[0]]
        shared = precision if precision in one.flops else "bf16"
        peaks = abs(math.log(one.flops.get(shared, 1.0) / device.flops.get(shared, 1.0)))
        memories = abs(math.log(one.bandwidth / device.bandwidth))
        steps = abs(PRECISIONS.index(other[1]) - PRECISIONS.index(precision))
        return peaks + memories + ANOTHER_PRECISION * steps

    return min((each for each in known if each != group), key=distance, default=None)


@dataclass
class Constants:
    """Constants of any group from some rows. are_alike: those of a group are drawn to the constants
    of all devices and precisions together."""

    cases: Sequence[Case]
    devices: Mapping[str, DeviceType]
    are_alike: bool
    _found: dict[Group, Fitted] = field(default_factory=dict)

    @cached_property
    def _shared(self) -> Efficiency:
        return fit(self.cases, self.devices) if self.cases else USUAL

    def of(self, group: Group) -> Fitted:
        """Return a group's constants; without rows of it, those of the device most alike."""
        if group not in self._found:
            self._found[group] = self._of(group)
        return self._found[group]

    def _of(self, group: Group) -> Fitted:
        own = [case for case in self.cases if case.group == group]
        if own and self.are_alike:
            return Fitted(fit(own, self.devices, self._shared, DRAWN), len(own))
        if len(own) >= LEAST:
            return Fitted(fit(own, self.devices), len(own))
        counts = Counter(case.group for case in self.cases)
        known = sorted(each for each, number in counts.items() if number >= LEAST)
        nearest = like(group, known, self.devices)
        if nearest is None:
            stored = self.devices[group[0]].efficiency.get(group[1], USUAL)
            return Fitted(stored, 0, "the product's table")
        return replace(self.of(nearest), like=" ".join(nearest))
