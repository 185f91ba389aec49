"""Seconds of layers from a measured profile, in place of those from shapes.

A profile is a JSON file. Its times are by samples of a microbatch, by degree of tp, by layer: the
embedding is layer 0, the head is the last one. Communication of tp is inside its times.

    {"device": "GH200-96", "sequence": 2048, "layers": 26,
     "times": {"8": {"4": {"0": [0.0009, 0.0, 0.0005], "1": [0.0030, 0.0065, 0.0005], ...}}}}

Each list has the seconds of the forward pass, of the backward pass, and of the optimizer's update.
Layers that are alike have the mean of their times. Between two microbatches the planner
interpolates. What a profile does not hold, it refuses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast.plan.cost.group_links import GroupLinks
from holdfast.plan.cost.layer_times import Part
from holdfast.plan.cost.workload import Layer, PassTimes, Workload
from holdfast.plan.hardware.devices import DeviceType

FORM = (
    '{"device": NAME, "sequence": N, "layers": N, "times": {MICROBATCH: {TP: {LAYER: [F, B, U]}}}}'
)


@dataclass(frozen=True)
class LayerSample:
    """Measured seconds of one layer, for one microbatch of so many samples. update: of the
    optimizer."""

    samples: float
    forward: float
    backward: float
    update: float


Samples = Mapping[int, Sequence[LayerSample]]
"""By degree of tp, by rising number of samples."""


@dataclass(frozen=True)
class MeasuredTimes:
    """Times of one device's layers from a profile. source: the file, for messages.

    launch_share: of a small microbatch, the share of the time beyond its part of the largest one
    that a step pays. A profile measures each layer alone, so it includes launches that a step
    hides. 1: a step hides none.
    """

    source: str
    device: str
    layers: Mapping[Layer, Samples]
    launch_share: float = 1.0

    def of(self, layer: Layer, part: Part, device: DeviceType, links: GroupLinks) -> PassTimes:
        """Raises DataError for what the profile does not hold."""
        if device.name != self.device:
            raise self._error(f"it has no times of {device.name}, only of {self.device}", "device")
        if layer not in self.layers:
            raise self._error(f"it has no times of this model's layer {layer.kind!r}", "model")
        if part.cp > 1 or part.ep > 1 or part.recompute == "selective":
            unknown = "cp" if part.cp > 1 else "ep" if part.ep > 1 else "selective recompute"
            raise self._error(f"it has no times with {unknown}", unknown)
        by_tp = self.layers[layer]
        if part.tp not in by_tp:
            known = ", ".join(map(str, sorted(by_tp)))
            raise self._error(
                f"it has no times with tp={part.tp}, only tp={known}", f"tp={part.tp}"
            )
        found = self._between(by_tp[part.tp], part.tokens / part.sequence)
        again = found.forward if part.recompute == "full" else 0.0
        half = found.backward / 2
        return PassTimes(found.forward, half, half, again, update=found.update)

    def _between(self, rows: Sequence[LayerSample], samples: float) -> LayerSample:
        if not rows[0].samples <= samples <= rows[-1].samples:
            raise self._error(
                f"it has no times of a microbatch of {samples:g} samples, "
                f"only from {rows[0].samples:g} to {rows[-1].samples:g}",
                f"microbatches of {samples:g}",
            )
        at = bisect_left([row.samples for row in rows], samples)
        after = rows[at]
        before = rows[at - 1] if samples < after.samples else after
        span = after.samples - before.samples
        share = (samples - before.samples) / span if span else 0.0
        forward, backward, update = (
            one + share * (other - one)
            for one, other in zip(_seconds(before), _seconds(after), strict=True)
        )
        scale = samples / rows[-1].samples
        return LayerSample(
            samples,
            self._in_step(forward, scale * rows[-1].forward),
            self._in_step(backward, scale * rows[-1].backward),
            update,
        )

    def _in_step(self, measured: float, at_full_load: float) -> float:
        """at_full_load: what the microbatch would take at the pace of the largest one."""
        return measured - (1 - self.launch_share) * max(0.0, measured - at_full_load)

    def _error(self, message: str, wanted: str) -> DataError:
        return DataError(
            message,
            where=self.source,
            remedy=f"measure {wanted}, or leave the profile away to plan from shapes",
        )


def _seconds(row: LayerSample) -> tuple[float, float, float]:
    return row.forward, row.backward, row.update


def load_profile(path: Path, workload: Workload) -> MeasuredTimes:
    """Read a profile of the workload's layers. Raises DataError for a file that does not serve."""
    try:
        data = parse_json(path.read_text("utf-8"))
    except OSError as error:
        raise _file_error(path, f"it cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _file_error(path, f"it is not JSON ({error})") from None
    return profile_of(data, workload, str(path))


def profile_of(data: Any, workload: Workload, source: str) -> MeasuredTimes:
    """The profile that is the content of a file."""
    path = Path(source)
    try:
        device, sequence, number = str(data["device"]), int(data["sequence"]), int(data["layers"])
        times = data["times"].items()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _file_error(path, f"it is no profile of layers ({error})") from None
    for has, wanted, what in (
        (sequence, workload.sequence, "tokens of a sample"),
        (number, len(workload.layers), "layers"),
    ):
        if has != wanted:
            raise _file_error(path, f"it has {has} {what}, and the model has {wanted}")
    found: dict[Layer, dict[int, list[LayerSample]]] = {layer: {} for layer in workload.kinds}
    for microbatch, by_tp in times:
        for tp, by_layer in by_tp.items():
            for kind in workload.kinds:
                at = f"times.{microbatch}.{tp}"
                rows = [
                    _row(path, f"{at}.{index}", by_layer.get(str(index)))
                    for index, layer in enumerate(workload.layers)
                    if layer == kind
                ]
                forward, backward, update = map(fmean, zip(*rows, strict=True))
                sample = LayerSample(float(microbatch), forward, backward, update)
                found[kind].setdefault(int(tp), []).append(sample)
    for of_kind in found.values():
        for samples in of_kind.values():
            samples.sort(key=lambda each: each.samples)
    return MeasuredTimes(source, device, found)


def _row(path: Path, at: str, row: Any) -> tuple[float, float, float]:
    """The three times at a place of the file."""
    if row is None:
        raise _file_error(path, f"{at} is missing")
    try:
        forward, backward, update = map(float, row)
    except (TypeError, ValueError):
        raise _file_error(path, f"{at} is not three numbers") from None
    if min(forward, backward, update) < 0:
        raise _file_error(path, f"{at} has a negative time")
    return forward, backward, update


def _file_error(path: Path, message: str) -> DataError:
    return DataError(
        message, where=str(path), remedy=f"give a profile of this model in the form {FORM}"
    )
