"""The cheapest machines that finish a run in time: how many spot, how many on demand. Pure.

An offer is what one zone sells: spot or on demand, at a price, so many now, with a rate of losses.
A mix of n_i nodes of each offer works at

    R = sum(n_i * speed_i) * (1 - loss_h * sum(n_i * losses_i))      node-hours an hour

because each loss costs the entire run `loss_h` hours. The work that is left then costs
work / R * sum(n_i * price_i). The choice is the least of that among the mixes that end before the
deadline. Three rules come on top:

    the last moment    Spot may vanish at any time. So before it is too late, the run changes to
                       on-demand nodes alone, which finish in time even after the change. ("Can't Be
                       Late", Wu et al., NSDI 2024, call it the safety net.)
    patience           A run that decides again and again (`Need.decide_h`) buys no on-demand nodes
                       early: later they cost the same, and spot may return before. Until slack is
                       used up it takes all spot there is, or waits.
    hysteresis         A change costs `change_h` hours of the run. A mix that still ends in time is
                       kept unless another one saves a share of the cost, the change included.

Without a deadline the run gets all nodes that it wants, at the least price.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from holdfast.plan.catalogue import Offer

MIN_SAVING_SHARE = 0.1
"""Share of the remaining cost that another mix must save before the run changes."""
_PATIENT_CHANGES = 4
"""Changes of the mix for which there must be time before the run waits for spot."""
FASTEST = "no mix ends in time: the fastest is chosen"
LAST_MOMENT = "later than now, on-demand nodes alone could not end in time"
PATIENT = "all spot there is: on-demand nodes can still wait"
CHEAPEST = "the cheapest that ends in time"
KEPT = "kept: no other mix saves enough to be worth a change"


@dataclass(frozen=True)
class Need:
    """What is left of a run.

    work: node-hours at speed 1. hours_left: until the deadline; inf: there is none. min_nodes,
    max_nodes: of a mix. loss_h, change_h: hours that the entire run loses with a lost node, and
    with a change of the mix. decide_h: hours until the next choice; 0: this is the only one.
    """

    work: float
    hours_left: float = inf
    min_nodes: int = 1
    max_nodes: int = 1
    loss_h: float = 0.01
    change_h: float = 0.05
    decide_h: float = 0.0


@dataclass(frozen=True)
class Mix:
    """Nodes of each offer, by its name; offers without nodes are left out. hours: until the work is
    done at this rate. cost: US dollars until then. in_time: it ends before the deadline."""

    nodes: Mapping[str, int]
    hours: float
    cost: float
    in_time: bool
    reason: str

    @property
    def size(self) -> int:
        return sum(self.nodes.values())


def choose_mix(
    offers: Sequence[Offer], need: Need, current: Mapping[str, int] | None = None
) -> Mix | None:
    """Return the mix to run from now on; None if there are fewer than `min_nodes`. A mix of no
    nodes waits for spot.

    current: the nodes that the run has, of which those that are not available are lost.
    """
    now = _clamped(current or {}, offers)
    mixes = [_priced(nodes, offers, need, now) for nodes in _candidates(offers, need)]
    if not mixes:
        return None
    slack = _slack(mixes, offers, need)
    if (safe := _last_moment(mixes, offers, need, slack)) is not None:
        return safe
    if need.decide_h and slack >= _PATIENT_CHANGES * need.change_h + need.decide_h:
        # All spot nodes, the cheapest first; no nodes if there are too few.
        demand = {offer.name for offer in offers if not offer.spot}
        spot = [mix for mix in mixes if not demand & mix.nodes.keys()]
        largest = max(spot, key=lambda mix: mix.size, default=None)
        if largest is None:
            return Mix({}, inf, 0.0, True, PATIENT)
        return replace(largest, in_time=True, reason=PATIENT)
    in_time = [mix for mix in mixes if mix.in_time]
    if not in_time:
        return replace(min(mixes, key=lambda mix: (mix.hours, mix.cost)), reason=FASTEST)
    if need.hours_left == inf:
        most = max(mix.size for mix in in_time)
        in_time = [mix for mix in in_time if mix.size == most]
    best = min(in_time, key=lambda mix: (mix.cost, mix.hours, sorted(mix.nodes.items())))
    kept = _priced(now, offers, need, now)
    is_possible = kept.in_time and need.min_nodes <= kept.size <= need.max_nodes
    is_full = need.hours_left < inf or kept.size >= best.size
    if is_possible and is_full and kept.cost * (1 - MIN_SAVING_SHARE) <= best.cost:
        return replace(kept, reason=KEPT)
    return best


def _clamped(current: Mapping[str, int], offers: Sequence[Offer]) -> dict[str, int]:
    return {
        offer.name: held
        for offer in offers
        if (held := min(current.get(offer.name, 0), offer.available)) > 0
    }


def _candidates(offers: Sequence[Offer], need: Need) -> Iterator[dict[str, int]]:
    """For every number of spot and of on-demand nodes, those that work for the least money."""
    spot = _in_order([offer for offer in offers if offer.spot], need)
    demand = _in_order([offer for offer in offers if not offer.spot], need)
    for n_spot in range(min(len(spot), need.max_nodes) + 1):
        for n_demand in range(min(len(demand), need.max_nodes - n_spot) + 1):
            if n_spot + n_demand >= max(1, need.min_nodes):
                nodes: dict[str, int] = {}
                for name in (*spot[:n_spot], *demand[:n_demand]):
                    nodes[name] = nodes.get(name, 0) + 1
                yield nodes


def _in_order(offers: Sequence[Offer], need: Need) -> list[str]:
    """The name of each available node, the cheapest for its work first."""

    def price_of_work(offer: Offer) -> tuple[float, str]:
        lost = offer.losses_per_hour * need.loss_h * need.max_nodes
        return offer.price / (offer.speed * max(1e-9, 1 - lost)), offer.name

    return [
        offer.name
        for offer in sorted(offers, key=price_of_work)
        for _ in range(min(offer.available, need.max_nodes))
    ]


def _priced(
    nodes: Mapping[str, int], offers: Sequence[Offer], need: Need, now: Mapping[str, int]
) -> Mix:
    held = {offer.name: offer for offer in offers if nodes.get(offer.name)}
    price = sum(held[name].price * number for name, number in nodes.items())
    work = sum(held[name].speed * number for name, number in nodes.items())
    losses = sum(held[name].losses_per_hour * number for name, number in nodes.items())
    rate = work * max(0.0, 1 - losses * need.loss_h)
    change = need.change_h if now and dict(nodes) != dict(now) else 0.0
    hours = change + need.work / rate if rate > 0 else inf
    cost = price * hours if hours < inf else inf
    return Mix(dict(sorted(nodes.items())), hours, cost, hours <= need.hours_left, CHEAPEST)


def _on_demand(mixes: Sequence[Mix], offers: Sequence[Offer]) -> list[Mix]:
    spot = {offer.name for offer in offers if offer.spot}
    return [mix for mix in mixes if not spot & mix.nodes.keys()]


def _slack(mixes: Sequence[Mix], offers: Sequence[Offer], need: Need) -> float:
    """Hours that may pass until on-demand nodes alone would be too late. -inf: there is no
    deadline, or no on-demand node, and it decides nothing."""
    safe = _on_demand(mixes, offers)
    if need.hours_left == inf or not safe:
        return -inf
    return need.hours_left - min(mix.hours for mix in safe)


def _last_moment(
    mixes: Sequence[Mix], offers: Sequence[Offer], need: Need, slack: float
) -> Mix | None:
    """The cheapest mix of on-demand nodes that ends in time, if it could not any more after one
    more change, without spot."""
    if slack == -inf or slack >= 2 * need.change_h:
        return None
    fitting = [mix for mix in _on_demand(mixes, offers) if mix.in_time]
    if not fitting:
        return None
    return replace(min(fitting, key=lambda mix: (mix.cost, mix.hours)), reason=LAST_MOMENT)
