"""Tables of predictions against measurements: signed errors, worst rows, floors, constants."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.runtime.plan_fidelity.case import Case
from benchmarks.runtime.plan_fidelity.fit import Fitted
from benchmarks.runtime.plan_fidelity.floors import textbook, utilisation
from holdfast.plan.hardware.devices import DeviceType
from holdfast_platform.search.mix_fit import rank_correlation


@dataclass(frozen=True)
class Prediction:
    """Of one row, in tokens/s of a device, with constants from rows of other models."""

    case: Case
    value: float
    source: Fitted

    @property
    def error(self) -> float:
        """Signed, in percent of the measured throughput."""
        return 100 * (self.value / self.case.measured - 1)


def summary(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return (
        f"{statistics.mean(sizes):6.2f} {statistics.median(sizes):6.2f} {max(sizes):7.2f} "
        f"{statistics.mean(errors):+7.2f}"
    )


def lines(
    title: str, predictions: Sequence[Prediction], devices: Mapping[str, DeviceType], worst: int
) -> Iterator[str]:
    """The report of one kind of rows."""
    cases = [each.case for each in predictions]
    yield f"{title}: {len(cases)} rows, error of throughput in percent"
    yield f"{'':34} rows   mean median     max  signed"
    for group in sorted({case.group for case in cases}):
        own = [each.error for each in predictions if each.case.group == group]
        yield f"  {group[0] + ' ' + group[1]:32} {len(own):4} {summary(own)}"
    errors = [each.error for each in predictions]
    yield f"  {'all':32} {len(errors):4} {summary(errors)}"
    for name, floor in (("constant utilisation", utilisation), ("textbook", textbook)):
        values = floor(cases, devices)
        missed = [
            100 * (value / case.measured - 1) for value, case in zip(values, cases, strict=True)
        ]
        yield f"  {'floor: ' + name:32} {len(cases):4} {summary(missed)}"
    measured = [case.measured for case in cases]
    ranks = rank_correlation([each.value for each in predictions], measured)
    yield f"  Spearman {ranks:.4f}"
    yield f"worst {min(worst, len(cases))} rows (predicted against measured tokens/s of a device)"
    for each in sorted(predictions, key=lambda one: -abs(one.error))[:worst]:
        both = f"{each.value:9.0f} {each.case.measured:9.0f}"
        yield f"  {each.error:+6.1f} %  {both}  {each.case.label}"
    yield from _notes(predictions)


def constants(groups: Mapping[tuple[str, str], Fitted]) -> Iterator[str]:
    """Constants from all rows, which the product's table has."""
    yield f"{'constants from all rows':32} rows compute memory ramp us attention"
    for (device, precision), each in sorted(groups.items()):
        one = each.constants
        yield (
            f"  {device + ' ' + precision:30} {each.rows:4} {one.compute:7.3f} {one.memory:6.3f} "
            f"{one.ramp_s * 1e6:7.1f} {one.attention:9.3f}"
        )


def _notes(predictions: Sequence[Prediction]) -> Iterator[str]:
    notes = [note for each in predictions for note in each.case.guesses]
    notes += [
        f"{' '.join(each.case.group)}: few rows of other models; constants of {each.source.like}"
        for each in predictions
        if each.source.like
    ]
    for note in dict.fromkeys(notes):
        yield f"  assumed: {note}"
