"""The wheel in a fresh environment: it is complete, and trains a small run to its end.

The dependencies are those of the present environment, so that torch is not installed again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import write_run_file
from tests.support.ranks import ROOT

MISSING = [name for name in ("pip", "hatchling") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {' and '.join(MISSING)} here: pip install -e '.[dev]'"
    ),
]
DEADLINE = 600.0
SOURCES = ROOT / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run([sys.executable, "-m", "pip", "wheel", *options, "-w", folder, ROOT], folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment in which the wheel was installed."""
    folder = tmp_path_factory.mktemp("fresh") / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    python = folder / "bin" / "python"
    options = ("--no-deps", "--no-index", "--quiet")
    command = [sys.executable, "-m", "pip", "--python", python, "install", *options, wheel]
    run(command, folder.parent)
    (packages,) = folder.glob("lib/python3*/site-packages")
    # A path in such a file is searched last, and the files like this one in it are not read. So
    # an editable installation of Holdfast there does not count.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")
    return folder / "bin"


def run(command: list[str | Path], folder: Path) -> str:
    """Run a program in a folder; return its output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    present = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == present
    for package in ("holdfast", "holdfast_lab", "holdfast_platform"):
        assert f"{package}/py.typed" in present


def test_the_installed_package_knows_its_version(fresh: Path, tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    code = "import holdfast; print(holdfast.__version__, holdfast.__file__)"
    found, place = run([fresh / "python", "-c", code], tmp_path).split()
    assert found == version
    assert Path(place).is_relative_to(fresh.parent)
    assert Path(place).with_name("py.typed").is_file()
    assert run([fresh / "holdfast", "--version"], tmp_path) == f"holdfast {version}\n"


def test_the_installed_commands_of_all_packages_are_there(fresh: Path, tmp_path: Path) -> None:
    shown = run([fresh / "holdfast", "--help"], tmp_path)
    for command in ("train", "simulate", "cloud"):  # of the runtime, the lab, the platform
        assert f"\n  {command} " in shown
    run([fresh / "holdfast", "init"], tmp_path)
    plan = run([fresh / "holdfast", "plan", "run.yaml", "--cluster", "2x8xH100-80"], tmp_path)
    assert "tokens/s" in plan


def test_the_installed_command_trains_to_the_end(fresh: Path, tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "lab")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    holdfast = fresh / "holdfast"
    run([holdfast, "train", run_file], elsewhere)
    summary = json.loads(run([holdfast, "report", run_file, "--json"], elsewhere))
    assert (summary["state"], summary["last_step"]) == ("finished", 6)
    page = elsewhere / "page.html"
    run([holdfast, "report", run_file, "--output", page, "--sample", "the"], elsewhere)
    assert "</html>" in page.read_text()
    assert "none missing, none twice" in run([holdfast, "data", "audit", run_file], elsewhere)
    run([holdfast, "checkpoint", "verify", run_file], elsewhere)
