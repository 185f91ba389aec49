"""What was measured here replaces the table's numbers, and the file that keeps it."""

from __future__ import annotations

import json
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
from holdfast.plan.hardware.devices import GIB, Efficiency
from holdfast.plan.hardware.link import Link, load_links
from holdfast.plan.hardware.this_machine import describe_machine

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
