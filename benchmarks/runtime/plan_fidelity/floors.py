"""What a prediction has to beat, and the published errors of planners."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.runtime.plan_fidelity.architectures import forward_flops
from benchmarks.runtime.plan_fidelity.case import Case
from holdfast.plan.hardware.devices import DeviceType

PUBLISHED = (
    "Calculon 3.65 % (mean, its eight Megatron times)",
    "vTrain 8.37 % on one node, 14.73 % to 512 A100",
    "Proteus 3.0 %; Lumos 3.3 % (with a trace of the run); Charon 3.74 %; Maya < 5 %",
    "regressors of operators 4.98 % on A100, 9.38 % on GH200; Sailor about 6 %",
)
"""Mean errors of step time that planners state, each on rows of its own."""


def utilisation(cases: Sequence[Case], devices: Mapping[str, DeviceType]) -> list[float]:
    """Predict each row by the median utilisation of its device and precision, over all rows.

    FLOPs of a token are as the publisher counts them."""

    def share(case: Case) -> float:
        return case.measured * case.flops / devices[case.device].peak(case.precision)

    groups: dict[tuple[str, str], list[float]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(share(case))
    return [
        statistics.median(groups[case.group])
        * devices[case.device].peak(case.precision)
        / case.flops
        for case in cases
    ]


def textbook(cases: Sequence[Case], devices: Mapping[str, DeviceType]) -> list[float]:
    """Predict each row by 6 FLOPs a parameter that computes, or 8 with full recomputation.

    Added are the causal half of attention, half of the peak, and the bubble (p - 1) / (v m)."""
    return [_textbook(case, devices[case.device]) for case in cases]


def _textbook(case: Case, device: DeviceType) -> float:
    workload, group = case.workload, case.choice.replicas[0]
    forward = sum(forward_flops(layer, workload.sequence) for layer in workload.layers)
    times = 4 if group.recompute_at(0) == "full" else 3
    bubble = (group.pp - 1) / case.choice.virtual / group.microbatches
    return 0.5 * device.peak(case.precision) / (times * forward) / (1 + bubble)
