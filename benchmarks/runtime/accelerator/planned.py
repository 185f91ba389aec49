"""The row about the plan: `holdfast calibrate` here, then steps and peaks, planned and measured.

The plan sees the calibration and the run file alone. All shapes are measured in this row's process,
after the calibration has ended. The last one is a tiny model, whose step is the host's work.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.runtime.accelerator.settings import RowResult, Settings
from benchmarks.runtime.accelerator.shape import Variant, shape_config, train_shape
from holdfast.config.run import RunConfig
from holdfast.layout import Layout, place_layout
from holdfast.machine.hardware import detect_hardware
from holdfast.machine.links import detect_links
from holdfast.plan.cost.evaluate import StepCost
from holdfast.plan.hardware.calibration import Calibration, read_calibration
from holdfast.plan.hardware.this_machine import describe_machine
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.topology_cost import Fleet, TopologyCost

VARIANTS = (Variant(4), Variant(2), Variant(8), Variant(4, compiled=False))
CALIBRATION_S = 40
NODE = "here"


def planned(settings: Settings) -> RowResult:
    """Planned against measured: seconds of a step, and the peak of memory."""
    calibration = calibrate(settings.scratch / "calibration.json", 5 if settings.quick else 0)
    figures: dict[str, Any] = {"calibration": calibration.to_json()}
    lines, errors = [], []
    sizes = [] if settings.quick else [(variant, settings) for variant in VARIANTS]
    for variant, size in [*sizes, (Variant(4, compiled=False), replace(settings, quick=True))]:
        cost = predicted(shape_config(size, variant), calibration)
        measured = _measured(size, variant)
        step_s = statistics.median(measured["step_s"][3 if len(measured["step_s"]) > 3 else 1 :])
        errors.append(cost.step_s / step_s - 1)
        name = "tiny" if size.quick else variant.name
        figures[name] = measured | {
            "planned_s": cost.step_s,
            "measured_s": step_s,
            "parts": dict(cost.parts),
            "planned_peak_gib": cost.peak_bytes / 2**30,
        }
        line = f"{name} {cost.step_s:.4f} s, measured {step_s:.4f} ({errors[-1]:+.1%})"
        if "peak_gib" in measured:
            planned_gib, reserved = cost.peak_bytes / 2**30, measured["peak_reserved_gib"]
            line += f", {planned_gib:.1f} GiB, measured {measured['peak_gib']:.1f} ({reserved:.1f})"
        lines.append(line)
        print(line, flush=True)
    mean = statistics.fmean(map(abs, errors))
    return RowResult(f"mean error {mean:.1%}; " + "; ".join(lines), figures)


def calibrate(path: Path, seconds: int = 0) -> Calibration:
    """Measure this machine with the command, into a file."""
    command = [sys.executable, "-m", "holdfast.cli.main", "calibrate", "--write", str(path)]
    command += ["--seconds", str(seconds or CALIBRATION_S)]
    subprocess.run(command, check=True)
    found = read_calibration(path)
    assert found is not None
    return found


def predicted(config: RunConfig, calibration: Calibration) -> StepCost:
    """The cost of one worker alone on this machine."""
    machine = describe_machine(detect_hardware(), detect_links(), calibration)
    fleet = Fleet(machine.devices, machine.cluster.pools[0])
    costs = TopologyCost(config, fleet, [NodePlaces(NODE, 1)])
    return costs.cost(place_layout(Layout(), 1, (NODE,)))


def _measured(settings: Settings, variant: Variant) -> dict[str, Any]:
    """The figures of the shape; nothing of an earlier one is left on the device."""
    gc.collect()
    torch.compiler.reset()
    if settings.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return dict(train_shape(settings, variant).figures)
