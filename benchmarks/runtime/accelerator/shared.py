"""The row of several workers on one card: each layout against one worker, and after a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.runtime.accelerator.journal import read_events
from benchmarks.runtime.accelerator.runs import disturbed, recovery
from benchmarks.runtime.accelerator.settings import RowResult, Settings
from benchmarks.runtime.accelerator.several import LIMIT_S, PARITY, float64_run
from holdfast.events import WorkerReady
from holdfast_lab.chaos.compare import compare_runs

WORKERS = 2
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp 2": (),
    "dp_shard 2": ("layout.dp_shard=2",),
    "tp 2": ("layout.tp=2",),
    "pp 2": ("layout.pp=2",),
}
"""Changes of the run file. Replicas add in the order of one worker, so dp has its bits."""
WAYS = {"killed": 0, "standby": 1}
"""Standbys of a run in which a worker is killed, by name."""


def shared_card(settings: Settings) -> RowResult:
    """Train each layout with two workers on one device, in each way, and compare with one worker:
    losses, ledger and weights."""
    two = replace(settings, workers=WORKERS)
    make, _ = float64_run(two, "layout.workers=1")
    alone = settings.scratch / "shared-alone"
    disturbed(make, alone, "alone", 0, LIMIT_S)
    figures: dict[str, Any] = {}
    for name in LAYOUTS:
        # A standby has nothing to do with the layout: one is enough to see that it runs.
        for way in WAYS if name == "tp 2" or not settings.quick else ["killed"]:
            figures[f"{name}, {way}"] = _compared(two, name, way, alone)
    passed = all(not each["differs"] for each in figures.values())
    where = "" if settings.device != "cpu" else "no card: on the CPU. "
    sentences = [_sentence(name, figures) for name in LAYOUTS]
    return RowResult(where + "; ".join(sentences), figures, passed)


def _compared(settings: Settings, name: str, way: str, alone: Path) -> dict[str, Any]:
    """Train in one way. Return what differs from `alone`, and seconds to the next step."""
    make, steps = float64_run(
        settings,
        f"layout.workers={WORKERS}",
        f"cluster.workers_per_device={WORKERS}",
        f"cluster.standbys={WAYS[way]}",
        *LAYOUTS[name],
    )
    folder = settings.scratch / f"shared-{name.replace(' ', '-')}-{way}"
    disturbed(make, folder, way, steps // 2, LIMIT_S)
    tolerance = PARITY if LAYOUTS[name] else 0.0
    found = compare_runs(folder, alone, steps, tolerance)
    devices = {e.device for _, e in read_events(folder) if isinstance(e, WorkerReady)}
    return {
        "differs": found.curve or found.ledger or found.tensors,
        "worst": found.worst,
        "devices": sorted(devices),
        **recovery(folder),
    }


def _sentence(name: str, figures: dict[str, Any]) -> str:
    """What one layout gave, in words."""
    ways = {way: figures[key] for way in WAYS if (key := f"{name}, {way}") in figures}
    wrong = next((each["differs"] for each in ways.values() if each["differs"]), "")
    worst = max(each["worst"] for each in ways.values())
    same = f"within {worst:.0e} of one worker" if LAYOUTS[name] else "the bits of one worker"
    seconds = ", ".join(f"{way} {each['again_after_s']:.1f} s" for way, each in ways.items())
    return f"{name}: {wrong or same}; next step after {seconds}"
