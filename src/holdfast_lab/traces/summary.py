"""What there is in a trace: nodes, node-days, bursts, lives, rates. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast_lab.traces.events import EventStream


@dataclass(frozen=True)
class Churn:
    """Machines of a trace. lives: seconds of those that left (age at which they did); ages of
    those that remain are not in it. down_s: of outages that ended."""

    nodes: int = 0
    at_start: int = 0
    least: int = 0
    most: int = 0
    at_end: int = 0
    mean: float = 0.0
    node_days: float = 0.0
    lost: int = 0
    bursts: dict[int, int] = field(default_factory=dict)  # nodes lost at an instant: instants
    joins: dict[int, int] = field(default_factory=dict)  # the same of joins after the start
    lives: tuple[float, ...] = ()
    gaps_s: tuple[float, ...] = ()  # between instants of loss
    down_s: tuple[float, ...] = ()
    counts: tuple[tuple[float, int], ...] = ()  # (time, nodes that work)
    by_node: dict[str, int] = field(default_factory=dict)  # losses of each node

    @property
    def per_node_day(self) -> float:
        return self.lost / self.node_days if self.node_days else 0.0


def churn_of(stream: EventStream) -> Churn:
    """The machines of a stream. A node that failed does not count until it recovers."""
    walk = _Walk()
    for event in stream.events:
        walk.take(event.t_s, event.kind, event.node)
    return walk.finish(stream.seconds)


class _Walk:
    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # of nodes that work
        self._down: dict[str, float] = {}
        self._at, self._area, self._lost, self._joined = 0.0, 0.0, 0, 0
        self._counts: list[tuple[float, int]] = []
        self._bursts, self._joins = Counter[int](), Counter[int]()
        self._loss_times: list[float] = []
        self._lives: list[float] = []
        self._outages: list[float] = []
        self._by_node = Counter[str]()
        self._names: set[str] = set()

    def take(self, at: float, kind: str, node: str) -> None:
        if at != self._at:
            self._close(at)
        if kind == "join" or (kind == "recover" and node in self._down):
            if kind == "recover":
                self._outages.append(at - self._down.pop(node))
            self._names.add(node)
            self._since[node] = at
            self._joined += 1
        elif kind in ("preempt", "fail"):
            if node in self._since:
                self._lives.append(at - self._since.pop(node))
                self._lost += 1
                self._by_node[node] += 1
            self._down.pop(node, None)
            if kind == "fail":
                self._down[node] = at

    def _close(self, at: float) -> None:
        """End the instant `_at`; the state holds until `at`."""
        if self._lost:
            self._bursts[self._lost] += 1
            self._loss_times.append(self._at)
        if self._joined and self._at > 0:
            self._joins[self._joined] += 1
        self._counts.append((self._at, len(self._since)))
        self._area += len(self._since) * (at - self._at)
        self._at, self._lost, self._joined = at, 0, 0

    def finish(self, seconds: float) -> Churn:
        self._close(max(seconds, self._at))
        there = [n for _, n in self._counts]
        pairs = zip(self._loss_times, self._loss_times[1:], strict=False)
        return Churn(
            nodes=len(self._names),
            at_start=there[0],
            least=min(there),
            most=max(there),
            at_end=there[-1],
            mean=self._area / seconds if seconds else float(there[-1]),
            node_days=self._area / 86400,
            lost=sum(size * many for size, many in self._bursts.items()),
            bursts=dict(sorted(self._bursts.items())),
            joins=dict(sorted(self._joins.items())),
            lives=tuple(sorted(self._lives)),
            gaps_s=tuple(b - a for a, b in pairs),
            down_s=tuple(sorted(self._outages)),
            counts=tuple(self._counts),
            by_node=dict(self._by_node),
        )


@dataclass(frozen=True)
class Level:
    """Values of one price, intensity, link or slowness over time, each held until the next."""

    name: str
    changes: int
    mean: float
    least: float
    most: float


def levels_of(stream: EventStream, kind: str) -> list[Level]:
    """The levels of a kind, by what they belong to, with means over time."""
    points: dict[str, list[tuple[float, float]]] = {}
    for event in stream.events:
        if event.kind == kind:
            name = " ".join(filter(None, (event.gpu, event.zone, event.node))) or "-"
            points.setdefault(name, []).append((event.t_s, event.value))
    return [_level(name, values, stream.seconds) for name, values in sorted(points.items())]


def _level(name: str, points: Sequence[tuple[float, float]], seconds: float) -> Level:
    values = [value for _, value in points]
    ends = [*(at for at, _ in points[1:]), max(seconds, points[-1][0])]
    span = ends[-1] - points[0][0]
    area = sum(v * (end - at) for (at, v), end in zip(points, ends, strict=True))
    mean = area / span if span else sum(values) / len(values)
    return Level(name, len(points), mean, min(values), max(values))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of sorted values lies; between two, on a line."""
    if not values:
        return 0.0
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)
