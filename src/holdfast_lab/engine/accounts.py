"""Books what passes and what changes in a run: seconds, work, money, recoveries. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf

from holdfast_lab.engine.interfaces import CostModel, Costs, Node, Transition
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.progress import LostWork, Progress
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
    is_idle_off: bool = False  # nodes that are not in use are powered down

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
        idle = 0.0 if self.is_idle_off else self.costs.idle_watts
        joules = (watts + max(0, self.nodes - used) * idle) * seconds
        ledger.joules += joules
        ledger.grams_co2 += joules * self.grams_per_joule


@dataclass(slots=True)
class Accounts:
    """The ledger of a run, and the rates at which its entries grow until something changes.

    fault_at: when the fault came whose first step has not ended yet. commit_at: when the first step
    after the last transition ends; inf during a pause.
    """

    cost: CostModel
    ledger: Ledger = field(default_factory=Ledger)
    fault_at: float | None = None
    commit_at: float = inf
    meter: Meter = field(init=False)
    _ideal: float = 0.0
    _full: float = 0.0
    _wanted: int = 0
    _passed_s: float = 0.0
    _has_idle_watts: bool = False

    def __post_init__(self) -> None:
        self._wanted = self.cost.wanted
        best = self.cost.point(self._wanted)
        self.meter = Meter(self.cost.costs)
        self._full = best.tokens_per_s if best else 0.0
        self._has_idle_watts = self.cost.costs.idle_watts > 0

    def count(self, nodes: Collection[Node]) -> None:
        """The nodes that are there, or their prices, have changed."""
        self._add_passed()
        number = len(nodes)
        self.meter.count(nodes, number)
        best = self.cost.point(min(number, self._wanted))
        self._ideal = best.tokens_per_s if best else 0.0

    def add_time(self, seconds: float, used: int, watts: float) -> None:
        """Seconds pass, whatever they are spent on. watts: of the nodes in use."""
        self._passed_s += seconds
        self.ledger.used_node_s += used * seconds
        if watts or self._has_idle_watts:
            self.meter.add_energy(self.ledger, seconds, used, watts)

    def _add_passed(self) -> None:
        """What depends only on the nodes that are there is booked when they change."""
        ledger, meter, seconds = self.ledger, self.meter, self._passed_s
        self._passed_s = 0.0
        ledger.node_s += meter.nodes * seconds
        ledger.usd += meter.usd_per_s * seconds
        ledger.ideal_tokens += self._ideal * seconds
        ledger.full_tokens += self._full * seconds

    def add_fault(self, now: float) -> None:
        """Nodes in use went."""
        self.ledger.interruptions += 1
        if self.fault_at is None:
            self.fault_at = now

    def settle(self, now: float) -> None:
        """The first step after a fault has ended, if it has."""
        if self.fault_at is not None and self.commit_at <= now:
            self.ledger.rto_s.add(self.commit_at - self.fault_at)
            self.fault_at = None

    def add_lost(self, lost: LostWork) -> None:
        """Work that a transition loses was done for nothing."""
        seconds = self.ledger.seconds
        seconds["recovery"] += lost.partial_s
        seconds["rework"] += lost.productive - lost.partial_s + lost.blocked
        self.ledger.tokens_lost += lost.tokens

    def add_interruption(self, lost: LostWork, step_tokens: float) -> None:
        """The work that was lost with nodes. step_tokens: of one step; 0: steps do not matter."""
        self.ledger.lost_s.add(lost.productive)
        self.ledger.lost_steps.add(lost.tokens / step_tokens if step_tokens else 0.0)

    def add_transition(self, transition: Transition) -> None:
        """The reason of a transition, and what it reads."""
        ledger = self.ledger
        if transition.reason:
            ledger.by_reason[transition.reason] = ledger.by_reason.get(transition.reason, 0) + 1
        for tier, amount in transition.read.items():
            ledger.read_bytes[tier] = ledger.read_bytes.get(tier, 0.0) + amount

    def close(self, progress: Progress) -> Ledger:
        """The ledger at the end of the run."""
        self._add_passed()
        ledger = self.ledger
        ledger.tokens = progress.tokens
        ledger.seconds["productive"] = progress.productive
        ledger.seconds["checkpoint"] = progress.blocked
        ledger.saves, ledger.saved_bytes = progress.saves, progress.bytes
        ledger.ended = "finished" if ledger.finished else "time"
        return ledger
