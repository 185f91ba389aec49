"""Fits the four constants of a device and precision to measured rows.

Least squares of the logarithm of predicted over measured (Gauss-Newton with numeric slopes). A row
far off counts less (weights of a Cauchy-like loss). Each constant is drawn to its usual value by a
small weight, so a few rows suffice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.plan_fidelity.case import Case, predicted, with_efficiency
from holdfast.plan.hardware.devices import DeviceType, Efficiency

Numbers = NDArray[np.float64]

USUAL = Efficiency(0.7, 0.7, 20e-6, 5e-6, 0.35)
SPREAD = {"compute": 0.5, "memory": 0.5, "ramp_s": 1.0, "attention": 0.7}
"""The fitted constants, and how far each may go from the usual value (in its logarithm)."""

PULL = 0.05
"""Weight of the usual values: that of one row with this error."""

FAR = 0.08
"""Error beyond which a row counts less."""

ROUNDS, STEP, LONGEST = 8, 0.02, 0.7


@dataclass(frozen=True)
class Fitted:
    """constants of a group, from so many rows. like: the device that they are of, if another."""

    constants: Efficiency
    rows: int
    like: str = ""


def fit(cases: Sequence[Case], devices: Mapping[str, DeviceType]) -> Efficiency:
    """Return the constants for these rows, which are of one device and precision."""
    device, precision = cases[0].group
    spread = np.array(list(SPREAD.values()))
    point = np.zeros(len(SPREAD))
    for _ in range(ROUNDS):
        errors = _errors(cases, devices, device, precision, point)
        slopes = np.empty((len(cases), len(point)))
        for index in range(len(point)):
            moved = point.copy()
            moved[index] += STEP
            beside = _errors(cases, devices, device, precision, moved)
            slopes[:, index] = (beside - errors) / STEP
        weights = 1 / np.sqrt(1 + (errors / FAR) ** 2)
        pull = PULL / spread
        matrix = np.vstack([slopes * weights[:, None], np.diag(pull)])
        target = np.concatenate([-errors * weights, -pull * point])
        move, *_ = np.linalg.lstsq(matrix, target, rcond=None)
        point = point + np.clip(move, -LONGEST, LONGEST)
        if np.abs(move).max() < STEP / 10:
            break
    return _constants(point)


def _constants(point: Numbers) -> Efficiency:
    values = {
        name: getattr(USUAL, name) * math.exp(number)
        for name, number in zip(SPREAD, point, strict=True)
    }
    for share in ("compute", "memory"):
        values[share] = min(1.0, values[share])
    return Efficiency(launch_s=USUAL.launch_s, **values)


def _errors(
    cases: Sequence[Case],
    devices: Mapping[str, DeviceType],
    device: str,
    precision: str,
    point: Numbers,
) -> Numbers:
    tried = {**devices, device: with_efficiency(devices[device], precision, _constants(point))}
    return np.array([math.log(predicted(case, tried) / case.measured) for case in cases])


Group = tuple[str, str]


def fitted_without(
    model: str, group: Group, cases: Sequence[Case], devices: Mapping[str, DeviceType]
) -> Fitted | None:
    """Return constants of a group from the rows of all models but one; None: there are none."""
    own = [case for case in cases if case.group == group and case.model != model]
    if own:
        return Fitted(fit(own, devices), len(own))
    return None


def like(group: Group, known: Sequence[Group], devices: Mapping[str, DeviceType]) -> Group | None:
    """Return the group of the device that is most alike: the same precision first, then near in
    peak and bandwidth."""
    device, precision = devices[group[0]], group[1]

    def distance(other: Group) -> tuple[bool, float]:
        one = devices[other[0]]
        shared = precision if precision in one.flops else "bf16"
        peaks = abs(math.log(one.flops.get(shared, 1.0) / device.flops.get(shared, 1.0)))
        memories = abs(math.log(one.bandwidth / device.bandwidth))
        return other[1] != precision, peaks + memories

    return min((each for each in known if each != group), key=distance, default=None)
