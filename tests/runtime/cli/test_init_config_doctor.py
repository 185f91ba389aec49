"""The commands that need no run: init, config, doctor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config.loading.load import load_config
from holdfast.core.transports import CardLink, NetworkPort, NodeLinks
from holdfast.doctor import checks as doctor_checks
from holdfast.machine.accelerators import Accelerator
from holdfast.machine.hardware import HardwareInfo, detect_hardware
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
