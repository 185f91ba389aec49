"""What the machine is found to have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.machine.accelerators import Accelerator, detect_accelerators, visible_accelerators
from holdfast.machine.hardware import cpp_compiler, detect_hardware, torch_build_target

LISTING = """\
0, GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81559
1, GPU-bbbb-2, NVIDIA H100 80GB HBM3, 81559
2, GPU-cccc-3, NVIDIA H100 PCIe, [N/A]
"""


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["HBM3", "HBM3", "PCIe"]),
        ("", []),
        ("2,0", ["PCIe", "HBM3"]),
        ("GPU-bbbb", ["HBM3"]),
        ("1,7,0", ["HBM3"]),  # as CUDA does: what follows an unknown device is not seen
        ("-1", []),
    ],
)
def test_visible_devices(chosen: str | None, names: list[str]) -> None:
    found = visible_accelerators(LISTING, chosen)
    assert [device.name.rsplit(" ", 1)[1] for device in found] == names
    assert [device.index for device in found] == list(range(len(names)))


def test_memory_is_bytes_and_zero_when_not_told() -> None:
    sizes = [device.memory_bytes for device in visible_accelerators(LISTING, None)]
    assert sizes == [81559 * 2**20, 81559 * 2**20, 0]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "CUDA 13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.2.0'\n", "ROCm 7.2.0"),
        ("cuda: Optional[str] = None\nxpu: Optional[str] = '20250101'\n", "XPU 20250101"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU"),
        ("", ""),
    ],
)
def test_what_torch_was_built_for(text: str, target: str) -> None:
    assert torch_build_target(text) == target


def test_no_driver_is_no_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect_accelerators({}) == ()


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_devices_of_amd_are_the_kernels_nodes_with_vector_units(tmp_path: Path) -> None:
    nodes = tmp_path / "class/kfd/kfd/topology/nodes"
    write(nodes / "0", properties="simd_count 0\n", name="")
    for number in (1, 2):
        write(nodes / str(number), properties="simd_count 304\n", name=f"gfx94{number}")
        write(nodes / str(number) / "mem_banks/0", properties="size_in_bytes 1024\n")
    found = detect_accelerators({}, "ROCm 7.2", tmp_path)
    assert found == (Accelerator(0, "gfx941", 1024), Accelerator(1, "gfx942", 1024))
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        (one,) = detect_accelerators({variable: "1"}, "ROCm 7.2", tmp_path)
        assert (one.index, one.name) == (0, "gfx942")
    assert detect_accelerators({}, "ROCm 7.2", tmp_path / "none") == ()


def test_devices_of_intel_are_its_cards_if_torch_is_for_them(tmp_path: Path) -> None:
    for name, vendor in (("card0", "0x1a03"), ("card1", "0x8086"), ("card2", "0x8086")):
        write(tmp_path / "class/drm" / name / "device", vendor=f"{vendor}\n")
    write(tmp_path / "class/drm/card1-DP-1/device", vendor="0x8086\n")
    found = detect_accelerators({}, "XPU 20250101", tmp_path)
    assert [(each.index, each.kind) for each in found] == [(0, "xpu"), (1, "xpu")]
    assert len(detect_accelerators({"ZE_AFFINITY_MASK": "1.0"}, "XPU 1", tmp_path)) == 1
    assert detect_accelerators({"PATH": ""}, "CPU", tmp_path) == ()


def test_peaks_are_known_by_name_or_not_at_all() -> None:
    assert Accelerator(0, "NVIDIA H100 80GB HBM3", 0).peak_flops("bf16") == 989e12
    assert Accelerator(0, "NVIDIA H100 PCIe", 0).peak_flops("bf16") == 756e12
    assert Accelerator(0, "GeForce 256", 0).peak_flops("bf16") is None


def test_this_machine() -> None:
    machine = detect_hardware({"CUDA_VISIBLE_DEVICES": ""})
    assert machine.accelerators == ()
    assert machine.memory_bytes > 2**28
    assert machine.to_json()["node"] == machine.node


def test_the_compiler_is_the_one_that_torch_would_call(tmp_path: Path) -> None:
    for name in ("g++", "clang++", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert cpp_compiler(path | {"CXX": "mine"}) == str(tmp_path / "mine")
    assert cpp_compiler(path | {"CXX": "none"}) is None
    usual = tmp_path / ("clang++" if sys.platform == "darwin" else "g++")
    assert cpp_compiler(path) == str(usual)
    usual.unlink()
    assert cpp_compiler(path) is None, "torch does not look for another by itself"
