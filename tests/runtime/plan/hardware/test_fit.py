"""Constants from measured times: those that made the times are found again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.transports import NodeLinks
from holdfast.errors import UserError
from holdfast.machine.accelerators import Accelerator
from holdfast.machine.hardware import HardwareInfo
from holdfast.plan.hardware.calibration import (
    Calibration,
    calibration_path,
    read_calibration,
    write_calibration,
)
from holdfast.plan.hardware.devices import GIB, Efficiency, load_devices
from holdfast.plan.hardware.fit import (
    Sample,
    compare,
    fit_calibration,
    fit_link,
    least_squares,
    mean_error,
)
from holdfast.plan.hardware.link import Link, load_links
from holdfast.plan.hardware.this_machine import describe_machine

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


# --- what was measured here replaces the table's numbers, and the file that keeps it --------------
CPU_BOX = HardwareInfo("box", "Linux", 4, 8 * GIB, 0)


def measured_by_hand(device: str) -> Calibration:
    return Calibration(
        "2026-11-26",
        "box",
        device,
        "2.13.0",
        {"fp32": 1e11},
        2e10,
        {"fp32": Efficiency(0.9, 0.8, 1e-6, 2e-6)},
        Link(1e-5, 3e9, 0.5),
        Link(1e-6, 4e9),
    )


def cards(name: str, count: int) -> HardwareInfo:
    found = tuple(Accelerator(i, name, 80 * GIB) for i in range(count))
    return HardwareInfo("box", "Linux", 4, 8 * GIB, 0, found)


def test_cores_are_devices_if_there_is_no_accelerator() -> None:
    machine = describe_machine(CPU_BOX, NodeLinks(), None)
    pool = machine.cluster.pools[0]
    assert (pool.nodes, pool.devices, pool.device) == (1, 4, "cpu")
    assert machine.devices["cpu"].usable_bytes == 2 * GIB  # of one core
    assert machine.calibration is None


def test_a_calibration_replaces_the_table() -> None:
    machine = describe_machine(CPU_BOX, NodeLinks(), measured_by_hand("cpu"))
    cpu = machine.devices["cpu"]
    assert (cpu.peak("fp32"), cpu.bandwidth, cpu.measured) == (1e11, 2e10, "2026-11-26")
    assert cpu.reached("fp32").compute == 0.9
    assert machine.cluster.pools[0].inside == Link(1e-5, 3e9, 0.5)
    assert "cpu: measured on 2026-11-26" in (machine.calibration or measured_by_hand("")).summary


def test_accelerators_of_this_machine() -> None:
    machine = describe_machine(cards("NVIDIA H100 80GB HBM3", 2), NodeLinks(), None)
    pool = machine.cluster.pools[0]
    assert (pool.device, pool.devices) == ("H100-80", 2)
    assert pool.inside == load_links()["pcie5"].link  # no NVLink was found
    with pytest.raises(UserError, match="'Some GPU' is not in the table"):
        describe_machine(cards("Some GPU", 1), NodeLinks(), measured_by_hand("cpu"))
    measured = describe_machine(cards("Some GPU", 1), NodeLinks(), measured_by_hand("Some GPU"))
    assert measured.devices["Some GPU"].peak("fp32") == 1e11
    assert measured.calibration is not None


def test_the_file_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = calibration_path("a b")
    assert path == tmp_path / "holdfast" / "calibrations" / "a_b.json"
    assert read_calibration(path) is None
    write_calibration(measured_by_hand("cpu"), path)
    assert read_calibration(path) == measured_by_hand("cpu")
    assert [each.name for each in path.parent.iterdir()] == ["a_b.json"]
    newer = json.loads(path.read_text()) | {"version": 2}
    path.write_text(json.dumps(newer))
    with pytest.raises(UserError, match="no calibration that this version reads; remove the file"):
        read_calibration(path)
