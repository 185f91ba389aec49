"""Figures of a run from its journal."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runtime.paired import Estimate, estimate
from holdfast.events import Event, StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore


@dataclass(frozen=True)
class Speed:
    """tokens_per_second: median over the steps that count, with its interval. phases: mean
    seconds of each phase of such a step."""

    steps: int
    tokens_per_second: Estimate
    phases: dict[str, float]


def read_events(folder: Path) -> list[tuple[float, Event]]:
    """(seconds since the epoch, event), as the journal has them."""
    return [(record.time, record.event) for record in read_journal(FolderStore(folder))]


def speed(events: Sequence[Event], sequence: int, skip: int) -> Speed:
    """Steps count without the seconds of a capture. Raises SystemExit when no step is left after
    the first `skip`."""
    counted = [e for e in events if isinstance(e, StepDone) and e.step > skip]
    if not counted:
        sys.exit(f"the run ended before step {skip + 1}: nothing was measured")
    rates = [
        e.samples * sequence / (sum(e.phases.values()) - e.phases.get("capture", 0.0))
        for e in counted
    ]
    names = dict.fromkeys(name for e in counted for name in e.phases)
    phases = {n: statistics.fmean(e.phases.get(n, 0.0) for e in counted) for n in names}
    return Speed(len(counted), estimate(rates), phases)


def show_speed(
    found: Speed, captures: Sequence[Mapping[str, Any]], durable: Sequence[float]
) -> str:
    """One line."""
    line = f"{found.tokens_per_second.median:,.0f} tokens/s in {found.steps} steps; "
    line += ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in found.phases.items())
    for each in captures:
        line += f"; {each['bytes'] / 1e9:.1f} GB captured in {each['copy_s']:.2f} s, "
        line += f"of which training waited {1e3 * each['blocked_s']:.0f} ms"
    return line + "".join(f"; durable after {seconds:.1f} s" for seconds in durable)
