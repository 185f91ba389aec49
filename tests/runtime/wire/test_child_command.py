"""Children find our modules and Python's own, and never a user's file in the current folder."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import holdfast
from holdfast.data.stages.task_pool import TaskPool
from holdfast.errors import HoldfastError
from holdfast.wire.child_command import module_command, paths_for

USERS = "random", "select", "queue", "token", "numpy", "xxhash"


@pytest.fixture
def shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files of a user that are called like modules."""
    for name in USERS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the user\\'s {name}.py was run')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "module",
    [
        "holdfast.checkpoint.mover.main",
        "holdfast.elastic.notices.ray_probe",
        "holdfast.checkpoint.interop.dcp_metadata",
        "holdfast_lab.chaos.relay",
        "holdfast.cli.main",
    ],
)
def test_a_users_file_is_not_run(shadowed: Path, module: str) -> None:
    """Each child ends soon without the arguments and the input that it needs."""
    done = subprocess.run(
        module_command(module),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert "was run" not in done.stderr + done.stdout


def test_a_preparing_process_does_not_run_it(shadowed: Path) -> None:
    done: list[object] = []
    with TaskPool(1) as pool, pytest.raises(HoldfastError, match=r"KeyError: .unit."):
        pool.run([{"no": "kind"}], done.append)


def test_every_child_is_started_so() -> None:
    """No other line of the package names `-m`."""
    root = Path(holdfast.__file__).parent
    found = [
        path.name for path in root.rglob("*.py") if re.search(r'"-m"', path.read_text("utf-8"))
    ]
    assert found == ["child_command.py"]


def test_the_users_own_path_stays(shadowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shadowed / "lib").mkdir()
    (shadowed / "lib" / "mine.py").write_text("print('mine')")
    monkeypatch.setenv("PYTHONPATH", str(shadowed / "lib"))
    done = subprocess.run(module_command("mine"), capture_output=True, text=True, timeout=120)
    assert done.stdout == "mine\n"


def test_a_workers_function_of_another_package_is_looked_for_last() -> None:
    assert paths_for("holdfast.elastic.worker.main:train") == []
    assert "" not in paths_for("mine:train")
