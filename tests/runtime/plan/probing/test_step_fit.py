"""Constants of steps: those that made the steps are found again, and the cost model uses them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from holdfast.plan.cost.collectives import Exchange
from holdfast.plan.cost.group_links import GroupLinks
from holdfast.plan.cost.layer_times import Part, ShapeTimes
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.hardware.calibration import Calibration
from holdfast.plan.hardware.devices import DeviceType, Efficiency, StepCosts, load_devices
from holdfast.plan.hardware.fit import Sample, samples_from_json
from holdfast.plan.hardware.link import Link
from holdfast.plan.probing.probes import ALONE, PROBES, probes_for
from holdfast.plan.probing.step_fit import compare_steps, with_steps

COSTS = StepCosts(12e-6, 2e-4, 8e-4, 1.3, 3.0, 6.0, 1.5)
NO_LINK = Link(0.0, 1e18)
LINKS = GroupLinks(*[NO_LINK] * 5, Exchange(1, 1, NO_LINK, NO_LINK), NO_LINK)
WAYS: Mapping[str, Link] = {
    "replicas": Link(4e-4, 2e9),
    "zero 1": Link(5e-4, 1.5e9),
    "zero 2": Link(6e-4, 1e9),
    "zero 3": Link(7e-4, 0.8e9),
    "tp": Link(2e-4, 1e9),
    "cp allgather": Link(3e-4, 0.9e9),
    "cp ring": Link(4e-4, 0.7e9),
    "cp ulysses": Link(5e-4, 0.6e9),
    "pp": Link(3e-4, 2e9),
    "ep": Link(6e-4, 0.5e9),
}


def bare(device: str = "cpu", steps: StepCosts = COSTS) -> Calibration:
    """A calibration with these constants and no sample."""
    return Calibration(
        "2026-11-27",
        "box",
        device,
        "2.13",
        {"fp32": 1.6e11, "bf16": 9e14},
        2.6e10 if device == "cpu" else 3e12,
        {each: Efficiency(0.9, 0.9, 3e-6, 8e-6, 0.2) for each in ("fp32", "bf16")},
        steps=steps,
        ways=tuple(WAYS.items()),
    )


def measured(made: Calibration, device: DeviceType, ranks: int = 2) -> list[Sample]:
    """The steps of the probes, as these constants make them."""
    asked = [Sample("step", 1.0, name=each.name) for each in probes_for(ranks, not device.hides)]
    found = compare_steps(asked, made, device)
    return [replace(each.sample, seconds=each.fitted_s) for each in found]


def fitted(samples: list[Sample], of: Calibration, device: DeviceType) -> Calibration:
    known = tuple(vars(each) for each in samples)
    return with_steps(replace(of, samples=known, steps=StepCosts(), ways=()), device)


def test_the_constants_that_made_the_steps_are_found() -> None:
    cpu = load_devices()["cpu"]
    samples = measured(bare(), cpu)
    assert {each.name for each in samples} == {each.name for each in PROBES if not each.is_large}
    found = fitted(samples, bare(), cpu)
    assert vars(found.steps) == pytest.approx(vars(COSTS), rel=1e-3)
    ways = dict(found.ways)
    assert ways.keys() == WAYS.keys()
    for name, link in WAYS.items():
        assert ways[name].latency_s == pytest.approx(link.latency_s, rel=0.02), name
        assert ways[name].bandwidth == pytest.approx(link.bandwidth, rel=0.02), name
    assert Calibration.from_json(json.loads(json.dumps(found.to_json()))) == replace(
        found, samples=tuple(map(vars, samples_from_json(found.samples)))
    )


def test_steps_of_an_accelerator_show_its_host_and_what_eager_kernels_move() -> None:
    card = load_devices()["H100-80"]
    steps = StepCosts(kernel_s=20e-6, step_s=1e-3, moves=2.5, gradient_moves=2.5)
    made = replace(bare("H100-80"), steps=steps)
    found = fitted(measured(made, card, ranks=1), made, card).steps
    assert found.kernel_s == pytest.approx(20e-6, rel=0.05)
    assert found.moves == pytest.approx(2.5, rel=0.05)
    assert (found.products, found.gradient_moves, found.update_moves) == (1.0, 2.5, 1.0)


def test_a_calibration_without_steps_stays_as_it_is() -> None:
    without = replace(bare(), steps=StepCosts(), ways=())
    assert with_steps(without, load_devices()["cpu"]) is without


def test_a_host_delays_a_cpu_always_and_an_accelerator_if_it_is_slower() -> None:
    workload = workload_of(ALONE[0].config())
    block, times = workload.layers[1], ShapeTimes.of_workload(workload)
    for name, host_s, expected in (("cpu", 1e-3, "sum"), ("A100-80", 1e-3, "host")):
        device = load_devices()[name]
        slow = replace(device, steps=StepCosts(kernel_s=host_s))
        part = Part(32.0, 16)
        alone, found = (times.of(block, part, each, LINKS).forward for each in (device, slow))
        kernels = block.kernels + 2 * block.reductions + 1 + len(block.products)
        host = host_s * kernels
        assert found == pytest.approx(alone + host if expected == "sum" else host)
        hidden = replace(device, steps=StepCosts(kernel_s=1e-12))
        assert times.of(block, part, hidden, LINKS).forward == pytest.approx(alone, rel=1e-3)
