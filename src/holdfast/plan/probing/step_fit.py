"""Constants of steps from measured steps of probes, by least squares. Pure.

The cost model is nearly linear in each constant. So the model itself, asked with one constant after
the other, gives the terms: no formula stands here twice. First the probes alone give what the host
adds to passes, sums and update (`StepCosts`). Then the probes of each way of exchange give the link
that the axis sees. Errors are relative, so a small step counts as much as a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from holdfast.plan.hardware.calibration import Calibration
from holdfast.plan.hardware.cluster import NodePool
from holdfast.plan.hardware.devices import DeviceType, StepCosts
from holdfast.plan.hardware.fit import FittedSample, Sample, least_squares
from holdfast.plan.hardware.link import Link
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.topology_cost import Fleet, TopologyCost
from holdfast.plan.probing.probes import NODE, PROBES, Probe

INSTANT = Link(0.0, 1e18)
"""A link that takes no time."""
_NOTHING = StepCosts(products=0.0, moves=0.0, update_moves=0.0)
_UNITS = StepCosts(1e-5, 1e-3, 1e-3, 1.0, 1.0, 1.0, 1.0)
"""A step of each constant of which the model is asked."""
_ALL = tuple(each.name for each in fields(StepCosts))
_SUM_MOVES = 2.5
"""Of a gradient's four bytes: two of it are read in 16 bits, and its sum is read and written."""
_SLOW_HOST, _MANY_MOVES = StepCosts(kernel_s=1e-4, gradient_moves=_SUM_MOVES), 3.0
"""Start of the search for an accelerator's constants: models wait for the host, or for memory."""
_LATENCY_S, _BYTES_A_SECOND, _LEAST = 1e-3, 1e8, 1e-2
"""The same of a link; later rounds ask for a tenth of what the one before found."""
_ROUNDS = 4


@dataclass(frozen=True)
class _Machine:
    """What a probe is predicted for."""

    device: DeviceType
    ways: Mapping[str, Link]

    def step_s(self, probe: Probe) -> float:
        pool = NodePool(
            NODE, 1, 2, self.device.name, INSTANT, INSTANT, ways=tuple(self.ways.items())
        )
        fleet = Fleet({self.device.name: self.device}, pool)
        costs = TopologyCost(probe.config(), fleet, [NodePlaces(NODE, probe.ranks)])
        return costs.cost(probe.topology()).step_s

    def with_costs(self, costs: StepCosts) -> _Machine:
        return replace(self, device=replace(self.device, steps=costs))

    def with_way(self, way: str, link: Link) -> _Machine:
        return replace(self, ways={**self.ways, way: link})


def with_steps(calibration: Calibration, device: DeviceType) -> Calibration:
    """Return the calibration with the constants of its measured steps. device: of the table."""
    device = calibration.applied_to(device)
    steps = [each for each in calibration.samples if each.get("name")]
    measured = {each["name"]: float(each["seconds"]) for each in steps}
    found = [(probe, measured[probe.name]) for probe in PROBES if probe.name in measured]
    alone = [each for each in found if not each[0].way]
    if not alone:
        return calibration
    machine = _Machine(device, {})
    if device.hides:
        machine = _of_accelerator(machine, alone)
    else:
        machine = machine.with_costs(_step_costs(machine, alone, _NOTHING, _ALL))
    for way in dict.fromkeys(probe.way for probe, _ in found if probe.way):
        of_way = [each for each in found if each[0].way == way]
        machine = machine.with_way(way, _link(machine, way, of_way))
    return replace(calibration, steps=machine.device.steps, ways=tuple(machine.ways.items()))


def compare_steps(
    samples: Sequence[Sample], calibration: Calibration, device: DeviceType
) -> list[FittedSample]:
    """Each measured step next to what the constants say. device: of the table."""
    machine = _Machine(calibration.applied_to(device), dict(calibration.ways))
    probes = {probe.name: probe for probe in PROBES}
    return [
        FittedSample(each, machine.step_s(probes[each.name]))
        for each in samples
        if each.name in probes
    ]


def _of_accelerator(machine: _Machine, found: Sequence[tuple[Probe, float]]) -> _Machine:
    """The device computes small models while the host works, so those show the host alone. Large
    ones show what eager kernels move."""
    small = [each for each in found if not each[0].is_large]
    large = [each for each in found if each[0].is_large]
    costs = _step_costs(machine, small, _SLOW_HOST, ("kernel_s", "microbatch_s", "step_s"))
    if large:
        costs = _step_costs(machine, large, replace(costs, moves=_MANY_MOVES), ("moves",))
        costs = replace(costs, moves=max(1.0, costs.moves))
    return machine.with_costs(costs)


def _step_costs(
    machine: _Machine, found: Sequence[tuple[Probe, float]], start: StepCosts, names: Sequence[str]
) -> StepCosts:
    """Least squares of what the probes take, for the named constants. An accelerator waits for the
    slower of host and device, so each round starts from the constants of the one before."""

    def costs(values: Sequence[float]) -> StepCosts:
        return replace(start, **dict(zip(names, values, strict=True)))

    values = [float(getattr(start, name)) for name in names]
    for _ in range(_ROUNDS):
        more = [now / 10 or getattr(_UNITS, n) for n, now in zip(names, values, strict=True)]
        values = _next(lambda own: machine.with_costs(costs(own)), found, values, more)
        if not machine.device.hides:
            break
    return costs(values)


def _link(machine: _Machine, way: str, found: Sequence[tuple[Probe, float]]) -> Link:
    """The link of a way, from what its probes take beyond their computing. A pipeline hides a part
    of its sends, so each round starts from the link of the one before."""

    def link(values: Sequence[float]) -> Link:
        latency_s, per_byte = values
        return Link(latency_s, 1 / per_byte if per_byte else INSTANT.bandwidth)

    values, more = [0.0, 0.0], [_LATENCY_S, 1 / _BYTES_A_SECOND]
    for _ in range(_ROUNDS):
        values = _next(lambda own: machine.with_way(way, link(own)), found, values, more)
        more = [max(_LEAST * _LATENCY_S, values[0] / 10), max(_LEAST * more[1], values[1] / 10)]
    return link(values)


def _next(
    machine: Callable[[Sequence[float]], _Machine],
    found: Sequence[tuple[Probe, float]],
    values: Sequence[float],
    more: Sequence[float],
) -> list[float]:
    """One round: least squares of what the probes take, linear around these values. machine: with
    other values. more: a step of each."""
    rows, right = list[list[float]](), list[float]()
    for probe, seconds in found:
        base, slopes = machine(values).step_s(probe), list[float]()
        for place, step in enumerate(more):
            one = [value + step * (n == place) for n, value in enumerate(values)]
            slopes.append((machine(one).step_s(probe) - base) / step)
        known = sum(slope * value for slope, value in zip(slopes, values, strict=True))
        rows.append([slope / seconds for slope in slopes])
        right.append(max(0.0, seconds - base + known) / seconds)
    return least_squares(rows, right)
