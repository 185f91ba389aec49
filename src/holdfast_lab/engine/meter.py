"""Money, energy and carbon of the nodes that are there, between two changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast_lab.engine.interfaces import Costs, Node
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.traces.events import TraceEvent


@dataclass(slots=True)
class Meter:
    """Prices by (zone, gpu) and intensities by zone, as events give them, or those of the costs.
    A price or an intensity of a place without a name holds everywhere."""

    costs: Costs
    prices: dict[tuple[str, str], float] = field(default_factory=dict)
    carbon: dict[str, float] = field(default_factory=dict)
    usd_per_s: float = 0.0
    grams_per_joule: float = 0.0
    nodes: int = 0

    def observe(self, event: TraceEvent) -> None:
        if event.kind == "price":
            self.prices[event.zone, event.gpu] = event.value
        else:
            self.carbon[event.zone] = event.value

    def price(self, node: Node) -> float:
        """Dollars an hour of this node."""
        if not self.prices:
            return self.costs.usd_per_node_hour
        for place in ((node.zone, node.gpu), (node.zone, ""), ("", node.gpu), ("", "")):
            if place in self.prices:
                return self.prices[place]
        return self.costs.usd_per_node_hour

    def intensity(self, node: Node) -> float:
        """Grams of CO2 a kilowatt-hour where this node is."""
        default = self.costs.grams_co2_per_kwh
        return self.carbon.get(node.zone, self.carbon.get("", default))

    def count(self, nodes: Iterable[Node], number: int) -> None:
        """The nodes that are there, or their prices, have changed."""
        self.nodes = number
        if self.prices:
            self.usd_per_s = sum(self.price(node) for node in nodes) / 3600
        else:
            self.usd_per_s = number * self.costs.usd_per_node_hour / 3600
        if self.carbon:
            total = sum(self.intensity(node) for node in nodes)
            self.grams_per_joule = total / max(1, number) / 3.6e6
        else:
            self.grams_per_joule = self.costs.grams_co2_per_kwh / 3.6e6

    def add_energy(self, ledger: Ledger, seconds: float, used: int, watts: float) -> None:
        """Seconds pass. watts: of the nodes in use; the rest are idle."""
        joules = (watts + max(0, self.nodes - used) * self.costs.idle_watts) * seconds
        ledger.joules += joules
        ledger.grams_co2 += joules * self.grams_per_joule
