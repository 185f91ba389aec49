"""What an alert asks, over names of the catalogue: written as PromQL, and computed here.

    Above(Age("progress_timestamp_seconds"), Latest("progress_limit_seconds"))

`promql` is what Prometheus evaluates. `holds` is the same for a run that evaluates its alerts by
itself, over the samples that it kept. A name that the catalogue lacks is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry

from holdfast.report.live.catalogue import CATALOGUE, RUN_LABEL, MetricSpec

BY_RUN = f"by ({RUN_LABEL})"
EVALUATE_EVERY_S = 15.0
"""Seconds between two scrapes, and between two evaluations of the rules."""
Labels = tuple[tuple[str, str], ...]


def format_window(seconds: float) -> str:
    """Return a duration as PromQL writes it; a millisecond at least."""
    for name, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= size and seconds % size == 0:
            return f"{int(seconds // size)}{name}"
    return f"{max(1, round(seconds * 1000))}ms"


def record_name(spec: MetricSpec) -> str:
    """Return the name of the recorded series: one for a run, whichever node answers."""
    return f"run:{spec.exposed}:max"


class SampleHistory:
    """Samples of one run's metrics, as long as the longest window needs them."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._samples: dict[tuple[str, Labels], deque[tuple[float, float]]] = {}

    def add(self, now: float, registry: CollectorRegistry, names: Iterable[str]) -> None:
        """Keep the values of these exposed names. now: seconds of any clock."""
        wanted = set(names)
        for family in registry.collect():
            for sample in family.samples:
                if sample.name in wanted:
                    labels = tuple(sorted(sample.labels.items()))
                    kept = self._samples.setdefault((sample.name, labels), deque())
                    kept.append((now, sample.value))
                    while kept[0][0] < now - self._keep_s:
                        kept.popleft()

    def series(self, name: str, labels: Mapping[str, str]) -> Iterator[deque[tuple[float, float]]]:
        """Yield the samples of each series with these labels, oldest first."""
        for (known, its), kept in self._samples.items():
            if known == name and labels.items() <= dict(its).items():
                yield kept


class Term(Protocol):
    """A number of a run."""

    def promql(self, scale: float) -> str: ...

    def value(self, history: SampleHistory, now: float) -> float | None:
        """Return the number; None if its metric has no sample."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the catalogue."""


def _spec_of(name: str, labels: Mapping[str, str]) -> MetricSpec:
    """Raises KeyError for a name, a label or a value that the catalogue lacks."""
    spec = CATALOGUE[name]
    for label, value in labels.items():
        if spec.labels[label] and value not in spec.labels[label]:
            raise KeyError(f"{name} has no {label} {value!r}")
    return spec


def _selector(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else ""


@dataclass(frozen=True)
class _Named:
    """A term of one metric."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _spec_of(self.name, self.labels)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def spec(self) -> MetricSpec:
        return CATALOGUE[self.name]

    def _newest(self, history: SampleHistory) -> float | None:
        series = history.series(self.spec.exposed, self.labels)
        return max((kept[-1][1] for kept in series), default=None)


@dataclass(frozen=True)
class Latest(_Named):
    """The newest value; with several series the largest."""

    def promql(self, scale: float) -> str:
        return f"max {BY_RUN} ({self.spec.exposed}{_selector(self.labels)})"

    def value(self, history: SampleHistory, now: float) -> float | None:
        return self._newest(history)


@dataclass(frozen=True)
class Age(_Named):
    """Seconds since a time that a metric names."""

    def promql(self, scale: float) -> str:
        return f"(time() - max {BY_RUN} ({self.spec.exposed}))"

    def value(self, history: SampleHistory, now: float) -> float | None:
        then = self._newest(history)
        return None if then is None else now - then


@dataclass(frozen=True)
class Increase(_Named):
    """By how much a counter, or a gauge of seconds, grew in a window; all series added."""

    window_s: float = 900.0

    def promql(self, scale: float) -> str:
        grew = "increase" if self.spec.kind == "counter" else "delta"
        window = format_window(self.window_s * scale)
        series = f"{record_name(self.spec)}{_selector(self.labels)}"
        return f"sum {BY_RUN} ({grew}({series}[{window}]))"

    def value(self, history: SampleHistory, now: float) -> float | None:
        grew = None
        for kept in history.series(self.spec.exposed, self.labels):
            first = bisect_left(kept, now - self.window_s, key=lambda sample: sample[0])
            grew = (grew or 0.0) + kept[-1][1] - kept[first][1] if first < len(kept) else grew
        return grew


@dataclass(frozen=True)
class LostShare:
    """The share of a window that a run spent outside some classes of time.

    Time in which the run was not observed, or was over, is not lost. So a run that waits in a queue
    or has just begun burns nothing. A run that hangs loses all of its time.
    """

    classes: tuple[str, ...]
    window_s: float

    metrics = ("goodput_seconds", "run_state")

    def promql(self, scale: float) -> str:
        window, name = format_window(self.window_s * scale), record_name(CATALOGUE[self.metrics[0]])
        one_of = "|".join(self.classes)
        useful = f'sum {BY_RUN} (delta({name}{{class=~"{one_of}"}}[{window}]))'
        seen = f"max {BY_RUN} (count_over_time({name}[{window}]))"
        interval, length = EVALUATE_EVERY_S * scale, self.window_s * scale
        # A window that begins with a sample holds one more. Groups of rules are evaluated in any
        # order, so a full window may hold either number.
        return f"(clamp_max({interval:g} * {seen}, {length:g}) - {useful}) / {length:g}"

    def value(self, history: SampleHistory, now: float) -> float | None:
        useful, seen = 0.0, 0.0
        for name in self.classes:
            for kept in history.series(CATALOGUE[self.metrics[0]].exposed, {"class": name}):
                first = bisect_left(kept, now - self.window_s, key=lambda sample: sample[0])
                if first < len(kept):
                    useful += kept[-1][1] - kept[first][1]
                    seen = max(seen, kept[-1][0] - kept[first][0])
        return (seen - useful) / self.window_s if seen else None


@dataclass(frozen=True)
class Times:
    """A multiple of another term."""

    factor: float
    term: Term

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.term.metrics

    def promql(self, scale: float) -> str:
        return f"{self.factor:g} * {self.term.promql(scale)}"

    def value(self, history: SampleHistory, now: float) -> float | None:
        value = self.term.value(history, now)
        return None if value is None else self.factor * value


@dataclass(frozen=True)
class Number:
    """A fixed number. scaled: of seconds in a window, which shrink with the windows."""

    number: float
    scaled: bool = False

    metrics = ()

    def promql(self, scale: float) -> str:
        return f"{self.number * (scale if self.scaled else 1):g}"

    def value(self, history: SampleHistory, now: float) -> float | None:
        return self.number


@dataclass(frozen=True)
class Above:
    """One term is larger than another one. Without samples it does not hold."""

    left: Term
    right: Term

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*self.left.metrics, *self.right.metrics)

    @property
    def terms(self) -> tuple[Term, ...]:
        return (self.left, self.right)

    @property
    def window_s(self) -> float:
        """The longest window that the terms look back; 0 if they need the newest sample only."""
        return max(float(getattr(term, "window_s", 0.0)) for term in self.terms)

    def promql(self, scale: float = 1.0) -> str:
        return f"{self.left.promql(scale)} > {self.right.promql(scale)}"

    def holds(self, history: SampleHistory, now: float) -> bool:
        left, right = self.left.value(history, now), self.right.value(history, now)
        return left is not None and right is not None and left > right


Expression = tuple[Above, ...]
"""All of these hold."""


def to_promql(expression: Expression, scale: float = 1.0) -> str:
    """Return the expression as PromQL. scale: factor of all windows, for tests."""
    return f" and {BY_RUN.replace('by', 'on')} ".join(f"({e.promql(scale)})" for e in expression)
