"""`holdfast doctor` names what does not go together, from outputs in the form of the tools'."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest

from holdfast.doctor.checks import check_versions
from holdfast.machine.installed_versions import (
    KNOWN_CONFLICTS,
    InstalledVersions,
    parse_version,
    read_installed_versions,
)

OFED = "MLNX_OFED_LINUX-5.4-1.0.3.0:\n"
SMI = "580.65.06, 9.0\n580.65.06, 9.0\n"
MISMATCH = (
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.82\n"
)
CUDA_13 = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
CUDA_12 = CUDA_13.replace("13.0'\nhip", "12.6'\nhip")


def read(
    tmp_path: Path,
    smi: str = SMI,
    torch: str = CUDA_13,
    nccl: str = "2.28.9",
    kernel: str = "6.8.0-60-generic",
    ofed: str = "",
    module: str = "580.65.06",
    modules: Sequence[str] = (),
    libraries: str = "",
) -> InstalledVersions:
    """The versions of a machine whose tools print this."""
    for name in modules:
        (tmp_path / "sys/module" / name).mkdir(parents=True)
    if module:
        (tmp_path / "sys/module/nvidia").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/module/nvidia/version").write_text(module + "\n")
    said = {"nvidia-smi": smi, "ofed_info": ofed}
    return read_installed_versions(
        {"LD_LIBRARY_PATH": libraries},
        lambda command: said[command[0]],
        tmp_path / "sys",
        kernel,
        torch,
        nccl,
    )


def test_versions_that_go_together_are_listed(tmp_path: Path) -> None:
    found = read(tmp_path, ofed="MLNX_OFED_LINUX-24.10-1.1.4.0:\n", modules=["nvidia_peermem"])
    (check,) = check_versions(found, has_ports=True)
    assert check.state == "good"
    for words in ("driver 580.65.06", "CUDA of torch 13.0", "NCCL 2.28.9", "OFED 24.10-1.1.4.0"):
        assert words in check.found


def test_a_machine_without_the_driver_gets_no_line(tmp_path: Path) -> None:
    assert check_versions(read(tmp_path, smi="", module=""), has_ports=True) == []


@pytest.mark.parametrize(
    ("given", "culprit", "state", "words"),
    [
        ({"smi": "570.86.10, 9.0\n", "module": "570.86.10"}, "driver", "fails", "580 or newer"),
        (
            {"smi": "470.82, 8.0\n", "module": "470.82", "torch": CUDA_12},
            "driver",
            "fails",
            "525 or newer",
        ),
        ({"smi": SMI + "580.65.06, 7.0\n"}, "torch", "fails", "below 7.5"),
        ({"smi": MISMATCH, "module": "580.65.06"}, "driver", "fails", "kernel has loaded driver"),
        ({"module": "575.51.03"}, "driver", "fails", "575.51.03, but the libraries are 580.65.06"),
        ({"smi": "No devices were found\n"}, "driver", "fails", "lists no card: No devices"),
        ({"nccl": "2.18.1"}, "NCCL", "weak", "corrupted"),
        ({"ofed": OFED}, "OFED", "fails", "no kernel from 5.10"),
        (
            {"ofed": OFED, "kernel": "5.4.0", "modules": ["nvidia_peermem"]},
            "OFED",
            "weak",
            "2696789",
        ),
        ({"modules": ["nv_peer_mem"]}, "nv_peer_mem", "weak", "no longer maintained"),
        ({"kernel": "5.4.0-150-generic"}, "kernel", "weak", "network cards cannot read"),
    ],
)
def test_the_culprit_is_named(
    tmp_path: Path, given: dict[str, object], culprit: str, state: str, words: str
) -> None:
    (check,) = check_versions(read(tmp_path, **given), has_ports=True)  # type: ignore[arg-type]
    assert (check.where, check.state) == (culprit, state)
    assert words in check.found
    assert check.remedy


def test_a_library_that_comes_before_torchs_own_is_named(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2.18.1").touch()
    (tmp_path / "libnccl.so.2").symlink_to("libnccl.so.2.18.1")
    found = read(tmp_path, libraries=f"/nothing:{tmp_path}")
    (check,) = check_versions(found, has_ports=False)
    assert "LD_LIBRARY_PATH" in check.remedy
    assert "NCCL in LD_LIBRARY_PATH 2.18.1" in check.found


def test_each_row_of_the_table_has_a_source_and_a_date() -> None:
    for row in KNOWN_CONFLICTS:
        assert row.source.startswith("https://")
        assert date.fromisoformat(row.read_on) <= date.today()
        for bounds in row.if_.values():
            assert all(re.fullmatch(r"(<|>=|==)[\d.]+", each) for each in bounds.split(","))


def test_versions_are_compared_as_numbers() -> None:
    assert parse_version("5.4-1.0.3.0") == (5, 4, 1, 0, 3, 0)
    assert parse_version("6.8.0-60-generic") == (6, 8, 0, 60)
    assert parse_version("none") is None
