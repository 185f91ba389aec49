"""A cost model from given numbers: throughput by nodes, or a table of points. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast_lab.engine.interfaces import Costs, OperatingPoint


@dataclass(frozen=True)
class TableCost:
    """points: by rising number of nodes; the last one that fits is taken, unless a smaller one is
    faster. They are never empty."""

    points: Sequence[OperatingPoint]
    costs: Costs = field(default_factory=Costs)
    _nodes: tuple[int, ...] = field(init=False, repr=False)
    _best: tuple[OperatingPoint, ...] = field(init=False, repr=False)
    _shaped: Mapping[tuple[int, int], OperatingPoint] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        best: list[OperatingPoint] = []
        for point in sorted(self.points, key=lambda each: each.nodes):
            is_faster = not best or point.tokens_per_s > best[-1].tokens_per_s
            best.append(point if is_faster else best[-1])
        nodes = tuple(sorted(point.nodes for point in self.points))
        shaped = {(p.replicas, p.nodes): p for p in reversed(self.points)}  # the first one counts
        object.__setattr__(self, "_shaped", shaped)
        object.__setattr__(self, "_best", tuple(best))
        object.__setattr__(self, "_nodes", nodes)

    @property
    def wanted(self) -> int:
        return self._best[-1].nodes

    def point(self, nodes: int) -> OperatingPoint | None:
        index = bisect_right(self._nodes, nodes)
        return self._best[index - 1] if index else None

    def shaped(self, replicas: int, nodes_per_replica: int) -> OperatingPoint | None:
        """Only shapes that the table has."""
        return self._shaped.get((replicas, replicas * nodes_per_replica))


def linear_cost(
    nodes: int,
    tokens_per_s: float,
    step_tokens: float,
    costs: Costs,
    nodes_per_replica: int = 1,
    least_replicas: int = 1,
) -> TableCost:
    """Throughput in proportion to complete replicas, up to `nodes` nodes, where the run trains
    `tokens_per_s`. step_tokens: of a global batch; 0 if steps do not matter."""
    most = nodes // nodes_per_replica
    points = []
    for replicas in range(least_replicas, most + 1):
        rate = tokens_per_s * replicas / most
        used = replicas * nodes_per_replica
        points.append(
            OperatingPoint(
                f"{replicas} replicas",
                used,
                rate,
                step_tokens / rate,
                replicas,
                used * costs.busy_watts,
            )
        )
    return TableCost(points, costs)
