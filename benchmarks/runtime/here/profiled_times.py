"""Seconds of layers from those that were timed alone here (`benchmarks/peers/profile.py`).

Of a layer that tp or cp cuts, the shapes say which share of the uncut layer's time it takes.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers.work import Work
from benchmarks.runtime.here.two_ranks import lower_quartile, python_here
from benchmarks.runtime.turns import Loop
from holdfast.plan.cost.group_links import GroupLinks
from holdfast.plan.cost.layer_times import Part, ShapeTimes
from holdfast.plan.cost.workload import Layer, PassTimes
from holdfast.plan.hardware.devices import DeviceType

Profile = Mapping[str, float]
"""Seconds by "samples.layer.pass"."""


def measure_profile(work: Work, rounds: int) -> dict[str, float]:
    """Time the layers on both cores at once; of each, the lower quartile."""
    with tempfile.TemporaryDirectory() as text:
        loop = Loop("profile", work, python_here(), Path(text) / "profile", 120.0)
        found: dict[str, list[float]] = defaultdict(list)
        try:
            loop.answers()
            loop.block(1)
            for answer in (each for _ in range(rounds) for each in loop.block(1)):
                for name, seconds in answer["notes"][0].items():
                    found[name].append(seconds)
        finally:
            loop.close()
    return {name: lower_quartile(times) for name, times in found.items()}


@dataclass(frozen=True)
class ProfiledTimes:
    """A `LayerTimes`. shapes: says what a cut leaves, and what communication takes."""

    profile: Profile
    shapes: ShapeTimes

    def of(self, layer: Layer, part: Part, device: DeviceType, links: GroupLinks) -> PassTimes:
        cut = self.shapes.of(layer, part, device, links)
        tokens = part.tokens
        whole = self.shapes.of(layer, replace(part, tp=1, cp=1, ep=1), device, links)
        sent = sum((cut.communication or {}).values()) / (3 if part.recompute == "full" else 2)
        share = (cut.forward - sent) / whole.forward
        forward = share * self._seconds(layer.kind, "forward", tokens / part.sequence)
        backward = share * self._seconds(layer.kind, "backward", tokens / part.sequence)
        again = {"none": 0.0, "selective": cut.again, "full": forward}[part.recompute]
        half = backward / 2
        return replace(cut, forward=forward + sent, inputs=half + sent, weights=half, again=again)

    def _seconds(self, kind: str, which: str, samples: float) -> float:
        """Between two sizes by a straight line; beyond them in proportion."""
        known = {
            int(size): seconds
            for name, seconds in self.profile.items()
            for size, layer, of in [name.split(".")]
            if (layer, of) == (kind, which)
        }
        sizes = sorted(known)
        if samples <= sizes[0]:
            return known[sizes[0]] * samples / sizes[0]
        if samples >= sizes[-1]:
            return known[sizes[-1]] * samples / sizes[-1]
        after = next(size for size in sizes if size >= samples)
        before = sizes[sizes.index(after) - 1]
        share = (samples - before) / (after - before)
        return known[before] + share * (known[after] - known[before])
