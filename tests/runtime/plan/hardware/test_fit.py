"""Constants from measured times: those that made the times are found again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from holdfast.plan.hardware.calibration import Calibration
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.hardware.fit import (
    Sample,
    compare,
    fit_calibration,
    fit_link,
    least_squares,
    mean_error,
)
from holdfast.plan.hardware.link import Link

RATE, BANDWIDTH, CACHED, CALL, LAUNCH, RAMP = 200e9, 20e9, 100e9, 1e-6, 3e-6, 5e-6
LINK = Link(50e-6, 2e9)


def made_samples(noise: float = 0.0) -> Iterator[Sample]:
    """What a device with these constants takes, with noise of a seed."""
    chance = random.Random(1)

    def noisy(seconds: float) -> float:
        return seconds * (1 + noise * chance.uniform(-1, 1))

    yield Sample("launch", LAUNCH)
    yield Sample("call", CALL)
    for precision, times in (("fp32", 1), ("bf16", 4)):
        for edge in (32, 64, 128, 256, 512, 1024):
            flops, size = 2.0 * edge**3, 12.0 * edge**2
            seconds = RAMP + max(flops / (times * RATE), size / BANDWIDTH)
            yield Sample("product", noisy(seconds), size, flops, precision)
    for power in range(12, 27, 2):
        size = 3.0 * 2**power
        rate = CACHED if size < 2**20 else BANDWIDTH
        yield Sample("kernel", noisy(CALL + size / rate), size)
    for power in range(8, 24, 2):
        yield Sample("message", noisy(LINK.message_s(2**power)), 2**power)
        yield Sample("allreduce", noisy(2 * LINK.allreduce_s(2**power, 2)), 2**power, ranks=2)


def fitted(noise: float = 0.0) -> tuple[Calibration, list[Sample]]:
    samples = list(made_samples(noise))
    return fit_calibration(samples, None, "2026-11-26", "box", "cpu", "2.13"), samples


def test_the_constants_that_made_the_times_are_found() -> None:
    found, samples = fitted()
    assert found.efficiency["fp32"].ramp_s == pytest.approx(RAMP, rel=0.01)
    assert found.efficiency["fp32"].launch_s == LAUNCH
    rates = [found.flops[each] * found.efficiency[each].compute for each in ("fp32", "bf16")]
    assert rates == pytest.approx([RATE, 4 * RATE], rel=0.01)
    assert found.bandwidth * found.efficiency["fp32"].memory == pytest.approx(BANDWIDTH, rel=0.01)
    assert found.cache_bandwidth * found.efficiency["fp32"].memory == pytest.approx(
        CACHED, rel=0.05
    )
    assert found.messages == Link(
        pytest.approx(50e-6), pytest.approx(2e9), pytest.approx(0, abs=0.01)
    )
    assert found.inside is not None
    assert found.inside.latency_s == pytest.approx(100e-6)  # all-reduces took twice as long
    assert found.host is None
    assert mean_error(compare(samples, found)) < 0.02


def test_noise_of_the_measured_times_moves_the_constants_a_little() -> None:
    found, samples = fitted(noise=0.1)
    rates = [found.flops[each] * found.efficiency[each].compute for each in ("fp32", "bf16")]
    assert rates == pytest.approx([RATE, 4 * RATE], rel=0.15)
    assert mean_error(compare(samples, found)) < 0.12


def test_peaks_of_the_table_stay_where_the_device_is_in_it() -> None:
    known = load_devices()["H100-80"]
    samples = list(made_samples())
    found = fit_calibration(samples, known, "2026-11-26", "box", known.name, "2.13")
    assert found.flops["bf16"] == known.peak("bf16")
    assert found.efficiency["bf16"].compute == pytest.approx(
        4 * RATE / known.peak("bf16"), rel=0.01
    )
    assert found.bandwidth == known.bandwidth


def test_a_link_with_a_ramp_is_found_again() -> None:
    made = Link(4.5e-6, 240e9, 0.4)
    samples = [
        Sample("allreduce", made.allreduce_s(2.0**power, 8), 2.0**power, ranks=8)
        for power in range(16, 32)
    ]
    found = fit_link(samples)
    assert found is not None
    assert (found.latency_s, found.bandwidth, found.ramp) == pytest.approx((4.5e-6, 240e9, 0.4))
    assert fit_link([]) is None


def test_least_squares_never_gives_a_negative_time() -> None:
    assert least_squares([[1.0, 1.0], [2.0, 1.0]]) == pytest.approx([0.0, 1.0])
    latency, per_byte = least_squares([[1.0, 10.0], [1.0, 5.0], [1.0, 2.0]])
    assert latency >= 0
    assert per_byte >= 0
