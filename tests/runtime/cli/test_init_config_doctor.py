"""The commands that need no run: init, config, doctor."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from holdfast.config.loading.load import load_config
from holdfast.core.transports import CardLink, NetworkPort, NodeLinks
from holdfast.doctor import checks as doctor_checks
from holdfast.doctor.checks import check_versions
from holdfast.machine.accelerators import Accelerator
from holdfast.machine.hardware import HardwareInfo, detect_hardware
from holdfast.machine.installed_versions import (
    KNOWN_CONFLICTS,
    InstalledVersions,
    parse_version,
    read_installed_versions,
)
from tests.support.commands import within


def test_init_writes_a_short_commented_file_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "my run.yaml"
    assert within("init", path).code == 0
    text = path.read_text()
    assert len(text.splitlines()) <= 25
    assert "#" in text
    assert load_config(path).config.name == "my-run"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("2026.yaml", "2026"),
        ("null.yaml", "null"),
        ("1e3.yml", "1e3"),
        ("größe.yaml", "gr--e"),
        ("...yaml", "run"),
        ("-x.yaml", "x"),
        ("0x1f.yaml", "0x1f"),
    ],
)
def test_init_writes_what_loads_whatever_the_file_is_called(
    file: str, name: str, tmp_path: Path
) -> None:
    assert within("init", "--", tmp_path / file).code == 0
    assert load_config(tmp_path / file).config.name == name


def test_init_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mine\n")
    within("init", path).refuses(str(path), "never overwrites")
    assert path.read_text() == "mine\n"
    within("init", tmp_path / "none" / "run.yaml").refuses("there is no such folder")
    within("init", tmp_path).refuses("never overwrites")


def test_config_show_says_where_values_come_from(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  steps: 5\n")
    found = within("config", "show", path, "seed=9", "--origin")
    lines = {line.split()[0]: line for line in found.out.splitlines()}
    assert lines["train.steps"].endswith(f"file ({path}:2)")
    assert lines["seed"].endswith("command line (seed=9)")
    assert lines["model.layers"].endswith("preset (tiny)")
    assert lines["train.compile"].endswith("default")


def test_config_show_as_json() -> None:
    found = json.loads(within("config", "show", "train.steps=5", "--json").out)
    assert found["config"]["train"]["steps"] == 5
    assert found["origins"]["train.steps"] == {"kind": "command line", "place": "train.steps=5"}
    assert len(found["hash"]) == 32


def test_an_address_in_an_override_stays_as_it_is() -> None:
    found = within("config", "show", "task.args.at=http://x//y", "--json")
    assert json.loads(found.out)["config"]["task"]["args"] == {"at": "http://x//y"}


def test_config_mistakes_exit_with_2(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  stpes: 5\n")
    within("config", "show", path).refuses(
        f"{path}:2: unknown key train.stpes; did you mean train.steps?"
    )
    path.write_text("seed: x\nname: []\n")
    found = within("config", "show", path)
    assert found.code == 2
    assert found.err.count("\n") == 2, "two mistakes, two sentences"
    within("config", "show", tmp_path / "none.yaml").refuses("there is no such run file")
    within("config", "show", tmp_path).refuses("a folder")


def test_schema_is_json() -> None:
    assert "properties" in json.loads(within("config", "schema").out)


def test_doctor_finds_this_machine_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = within("doctor", "--json")
    rows = {row["name"]: row for row in json.loads(found.out)}
    assert found.code == 0
    assert {"cores", "memory", "torch", "disk", "loopback", "clock"} <= set(rows)
    assert rows["torch"]["state"] == "good"
    assert within("doctor").out.count("\n") == len(rows)


def test_doctor_fails_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_checks, "version", lambda package: "2.15.0.dev20260101")
    found = within("doctor")
    assert found.code == 1
    (line,) = [line for line in found.out.splitlines() if line.startswith("FAIL")]
    assert "2.11 to 2.13 are supported; pip install" in line


def test_doctor_sees_a_folder_that_cannot_be_written() -> None:
    found = {check.name: check for check in doctor_checks.run_checks(Path("/proc"))}
    assert found["disk"].state == "fails"
    assert found["disk"].remedy


def test_doctor_names_the_links_of_the_cards() -> None:
    cards = tuple(Accelerator(at, "NVIDIA H100 80GB HBM3", 0) for at in range(3))
    machine = replace(detect_hardware({"CUDA_VISIBLE_DEVICES": ""}), accelerators=cards)
    joined = NodeLinks(
        (CardLink(0, 1, "NVLink NV18"), CardLink(1, 2, "NVLink NV18")),
        tuple(NetworkPort(f"mlx5_{at}", "InfiniBand", "400 Gb/sec") for at in range(6)),
    )
    found = doctor_checks.check_links(machine, joined).found
    assert found.startswith("NVLink NV18 between 2 of 3 pairs of cards; active: mlx5_0 (InfiniBand")
    assert "mlx5_3 (InfiniBand, 400 Gb/sec) and 2 more" in found
    found = doctor_checks.check_links(machine, NodeLinks()).found
    assert found.startswith("no NVLink or xGMI between 3 cards; no active port of InfiniBand")


def test_doctor_tells_of_unlike_cards() -> None:
    cards = (Accelerator(0, "NVIDIA H100", 2**36), Accelerator(1, "NVIDIA A100", 2**36))
    machine = HardwareInfo("a", "Linux", 8, 2**36, 2**35, cards, "CUDA 13.0")
    check = doctor_checks.check_accelerators(machine)
    assert (check.state, check.found[:23]) == ("weak", "NVIDIA H100 (64 GiB), N")
    assert "train.deterministic=false" in check.remedy


# --- versions that do not go together -------------------------------------------------------------
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
