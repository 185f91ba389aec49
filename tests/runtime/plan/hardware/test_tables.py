"""The tables of devices and links: complete, consistent, each number with a source."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from holdfast.core.flops import dense_peak
from holdfast.errors import DataError
from holdfast.plan.catalogue import load_catalogue
from holdfast.plan.hardware.devices import (
    ASSUMED,
    DEVICES_FILE,
    EFFICIENCY_FILE,
    GIB,
    PRECISIONS,
    device_named,
    device_reported,
    load_devices,
)
from holdfast.plan.hardware.link import LINKS_FILE, link_named, load_links
from holdfast.plan.hardware.tables import read_rows

DEVICES = load_devices()
LINKS = load_links()

REPORTED = {  # as nvidia-smi, or the kernel's driver, writes them, with GiB
    ("Tesla V100-SXM2-16GB", 16): "V100-16",
    ("Tesla V100-SXM3-32GB", 31.7): "V100-32",
    ("NVIDIA A100-SXM4-40GB", 40): "A100-40",
    ("NVIDIA A100-SXM4-80GB", 80): "A100-80",
    ("NVIDIA H100 80GB HBM3", 79.6): "H100-80",
    ("NVIDIA H100 PCIe", 79.6): "H100-PCIe",
    ("NVIDIA H100 NVL", 93.6): "H100-NVL",
    ("NVIDIA H200", 140.4): "H200",
    ("NVIDIA GH200 480GB", 95.6): "GH200-96",
    ("NVIDIA GH200 144G HBM3e", 141): "GH200-144",
    ("NVIDIA B200", 179): "B200",
    ("NVIDIA GB300", 277): "GB300",
    ("AMD Instinct MI300X", 192): "MI300X",
    ("NVIDIA L4", 22.5): "L4",
    ("NVIDIA L40S", 45): "L40S",
    ("NVIDIA A10G", 22.5): "A10G",
    ("Tesla T4", 15): "T4",
    ("NVIDIA GeForce RTX 4090", 24): "RTX-4090",
}


def test_every_row_is_complete_and_possible() -> None:
    for name, device in DEVICES.items():
        assert device.source, name
        assert 0 < device.usable_bytes <= device.memory_bytes, name
        assert 0 < device.idle_w < device.power_w, name
        peaks = [device.flops.get(each, inf) for each in PRECISIONS]
        assert peaks == sorted(peaks), name
        scale_up = LINKS[device.scale_up_link].peak if device.scale_up_link else 0
        assert device.scale_up == scale_up, name
        assert not device.host_link or device.host_link in LINKS, name
        assert device.network_link in LINKS, name
    for row in read_rows(DEVICES_FILE):
        assert None not in row, row["name"]
        assert set(row["assumed"].split()) <= row.keys(), row["name"]
        assert not row["like"] or row["like"] in DEVICES, row["name"]
    for row in read_rows(LINKS_FILE):
        assert None not in row, row["name"]
        assert set(row["assumed"].split()) <= row.keys(), row["name"]
    for link in LINKS.values():
        assert 0 < link.link.bandwidth <= link.peak
        assert link.link.latency_s > 0
        assert link.source
    for row in read_rows(EFFICIENCY_FILE):
        assert row["device"] in DEVICES
        assert row["precision"] in PRECISIONS
        assert row["source"]


def test_shares_hold_for_devices_that_are_alike(tmp_path: Path) -> None:
    head = "device,precision,compute,memory,ramp_s,launch_s,source"
    rows = ("A100-80,bf16,0.6,0.7,1e-6,2e-6,here", "A100-40,fp32,0.5,0.7,1e-6,2e-6,here")
    file = tmp_path / "efficiency.csv"
    file.write_text("\n".join((head, *rows)))
    devices = load_devices(efficiency=file)
    assert devices["A100-40"].reached("bf16").compute == 0.6
    assert devices["A100-40"].reached("fp32").compute == 0.5
    assert devices["A100-80"].reached("fp32") == ASSUMED
    assert devices["T4"].reached("bf16") == ASSUMED


def test_all_tables_of_peaks_agree() -> None:
    compared = 0
    for (reported, _gib), name in REPORTED.items():
        found = dense_peak(reported, "bf16")
        if found is not None:
            assert found == DEVICES[name].peak("bf16"), name
            compared += 1
    assert compared > 10
    for machine in load_catalogue():
        device = device_named(machine.accelerator, DEVICES)
        assert machine.tflops * 1e12 == machine.count * device.peak("bf16"), machine.type


@pytest.mark.parametrize(("reported", "gib"), REPORTED)
def test_a_device_is_found_by_the_name_that_its_driver_reports(reported: str, gib: float) -> None:
    found = device_reported(reported, gib * GIB, DEVICES)
    assert found is not None
    assert found.name == REPORTED[reported, gib]


def test_names_that_are_not_there() -> None:
    assert device_reported("Some GPU", 8 * GIB, DEVICES) is None
    assert device_named("GH-96", DEVICES).name == "GH200-96"
    with pytest.raises(DataError, match="there is no device 'h100-sx'; use H100") as refused:
        device_named("h100-sx", DEVICES)
    assert refused.value.exit_code == 2
    with pytest.raises(DataError, match="there is no link 'infiniband-ndr'; use ib-ndr"):
        link_named("infiniband-ndr", LINKS)
    with pytest.raises(DataError, match="fp8; use one of fp32, bf16"):
        DEVICES["A100-80"].peak("fp8")
