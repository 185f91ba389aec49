"""Seconds of the exchanges in a step, and how many of them the passes waited for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from statistics import median

from holdfast.events import StepDone
from holdfast.report.formatting import format_duration, format_percent

EXCHANGES: dict[str, str] = {
    "reduce": "gradients summed over replicas",
    "gather": "parameters gathered over dp_shard",
    "scatter": "gradients scattered over dp_shard",
    "tp": "activations between workers that share blocks",
    "cp": "keys, values and tokens of other workers",
    "ep": "tokens on their way to experts and back",
    "pp": "stages: only waits are known",
}


@dataclass(frozen=True)
class ExchangeSeconds:
    """One kind, medians over the steps that count."""

    kind: str
    seconds: float  # in which one was under way
    exposed: float  # of these, those for which the passes waited

    def sentence(self) -> str:
        """For people."""
        share = f" ({format_percent(self.exposed / self.seconds)})" if self.seconds else ""
        return (
            f"{self.kind}: {format_duration(self.seconds)} a step, "
            f"{format_duration(self.exposed)} exposed{share}: {EXCHANGES.get(self.kind, self.kind)}"
        )


class ExchangeBook:
    """What the steps of a run tell. A kind that is missing in a step had no second there."""

    def __init__(self) -> None:
        self._seconds: dict[str, tuple[array[float], array[float]]] = {}

    def add(self, event: StepDone) -> None:
        for kind, (seconds, exposed) in event.exchanges.items():
            columns = self._seconds.setdefault(kind, (array("d"), array("d")))
            for column, value in zip(columns, (seconds, exposed), strict=True):
                column.append(value)

    def rows(self) -> tuple[ExchangeSeconds, ...]:
        """By kind, in the order of `EXCHANGES`."""
        order = [*EXCHANGES, *(kind for kind in self._seconds if kind not in EXCHANGES)]
        return tuple(
            ExchangeSeconds(kind, *map(median, self._seconds[kind]))
            for kind in order
            if kind in self._seconds
        )
