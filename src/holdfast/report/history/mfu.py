"""Model FLOP utilisation, where the device's peak is known; otherwise nothing is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.core.flops import FORMULAS, run_flops_per_token
from holdfast.machine.accelerators import peak_flops
from holdfast.report.history.history import History


@dataclass(frozen=True)
class Utilisation:
    """One figure and the convention it was computed by: one is meaningless without the other."""

    ratio: float
    convention: str
    formula: str
    peak: float  # FLOP/s of all devices together


def utilisations(
    history: History, resolved: Mapping[str, Any], device: str | None
) -> tuple[Utilisation, ...]:
    """By each convention, at the run's median tokens/s.

    resolved: what `resolved.json` holds; device: the accelerator's reported name, None on a CPU.
    """
    if device is None or "config" not in resolved or not history.steps:
        return ()
    config = RunConfig.model_validate(resolved["config"])
    peak = peak_flops(device, config.train.precision)
    if peak is None:
        return ()
    devices = max(1, history.generations[-1].workers if history.generations else 1)
    achieved = history.tokens_per_second / (peak * devices)
    return tuple(
        Utilisation(achieved * flops, name, FORMULAS[name], peak * devices)
        for name, flops in run_flops_per_token(config).items()
    )
