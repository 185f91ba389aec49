"""Promises 1 to 4 on a disk that is full, hangs or is read-only while a worker or a node is lost.

Survivors keep their state, no step is repeated, and the end is that of an undisturbed run, to the
bit. Other workers compute for a while on that disk, so the records of these steps wait in memory.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import apart, write_run_file
from tests.support.small_disk import has_namespaces, run_on_small_disk
from tests.support.train_on_sick_disk import SETTINGS, STEPS

NAMESPACE = ("unshare", "-Urm", "--propagation", "private")
TRY_FUSE = """
import pathlib, sys
from tests.support.faulty_disk import FaultyDisk
FaultyDisk(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1])).close()
"""


def _require(tmp_path: Path, disk: str) -> None:
    """Skip the test if this machine cannot make the disk."""
    (tmp_path / "try").mkdir()
    attempt = ["mount", "-t", "tmpfs", "none", str(tmp_path / "try")]
    if disk != "full":
        attempt = [sys.executable, "-c", TRY_FUSE, str(tmp_path / "try")]
    if shutil.which("unshare") is None:
        pytest.skip("there is no command unshare, so no disk can be mounted")
    tried = subprocess.run([*NAMESPACE, *attempt], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no {disk} disk can be mounted here: {tried.stderr.strip()[-200:]}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run."""
    root = tmp_path_factory.mktemp("alone")
    apart("train", write_run_file(root), *SETTINGS, "layout.workers=1", deadline=300).succeeds()
    return root / "run"


def _seen(tmp_path: Path, alone: Path, disk: str, fault: str) -> dict[str, Any]:
    """Run the driver; return what it saw, after the checks that hold for every fault."""
    _require(tmp_path, disk)
    apart("data", "prepare", write_run_file(tmp_path)).succeeds()
    driver = (sys.executable, "-m", "tests.support.train_on_sick_disk")
    done = subprocess.run(
        [*NAMESPACE, *driver, str(tmp_path), disk, fault, str(alone)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert seen["alive"], seen["said"]
    assert seen["kept"], seen["lost"]
    assert set(seen["codes"].values()) == {0}, seen["said"]
    assert seen["superseded"] == [], seen["generations"]
    assert seen["differs"][1:] == ["", ""], seen["generations"]
    assert seen["audit"][0] == 0, seen["audit"][1]
    assert "none missing, none twice" in seen["audit"][1]
    assert seen["verify"][0] == 0, seen["verify"][1]
    assert seen["left"] == []
    assert "Traceback" not in seen["said"]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["loss", "notice"])
@pytest.mark.parametrize("disk", ["full", "hanging", "read-only"])
def test_a_loss_on_a_sick_disk_costs_no_step_and_changes_no_bit(
    tmp_path: Path, alone: Path, disk: str, fault: str
) -> None:
    seen = _seen(tmp_path, alone, disk, fault)
    assert seen["differs"][0] == "", seen["generations"]
    assert seen["holes"] == []


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["hanging", "read-only"])
def test_records_that_a_lost_agent_could_not_write_are_rebuilt_or_named(
    tmp_path: Path, alone: Path, disk: str
) -> None:
    """The ledger is rebuilt. The losses are lost with the agent, so the report names their steps,
    except the last few, which the survivors report again."""
    seen = _seen(tmp_path, alone, disk, "node")
    (hole,) = seen["holes"]
    found = re.match(r"the journal has no line of step (\d+) to (\d+)\. ", hole)
    assert found, hole
    first, last = map(int, found.groups())
    assert seen["ill_at"] - 10 <= first  # the views show steps a second later
    assert seen["differs"][0].startswith(f"{last - first + 1} of {STEPS} steps have no line")


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="no user and mount namespaces here")
def test_training_goes_on_through_a_full_disk_and_saving_resumes(tmp_path: Path) -> None:
    """One sentence, events, every step in sight, and a ledger without a hole afterwards."""
    module = ("-m", "tests.support.train_on_full_disk")
    seen = json.loads(run_on_small_disk(tmp_path, "12m", *module, str(tmp_path)))
    assert seen["code"] == 0, seen
    assert "the journal cannot be written, its records are kept" in seen["said"]
    assert "the disk is full; free some space" in seen["said"]
    assert "Traceback" not in seen["said"]
    assert (seen["left"], seen["verify"], seen["lost"]) == ([], 0, 0)
    assert seen["skipped"]
    code, text = seen["audit"]
    assert code == 0, text
    assert "none missing, none twice" in text


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="no user and mount namespaces here")
def test_four_checkpoints_fit_where_three_do_and_the_last_one_waits_for_room(
    tmp_path: Path,
) -> None:
    """Both runs end with the state of an undisturbed run, to the bit."""
    disk, other = tmp_path / "disk", tmp_path / "other"
    disk.mkdir()
    module = ("-m", "tests.support.train_to_a_full_end")
    seen = json.loads(run_on_small_disk(disk, "24m", *module, str(disk), str(other)))
    assert (seen["codes"], seen["same"], seen["alive"]) == ([0, 0], [0, 0], True), seen
    assert seen["commits"] == 3
    assert re.search(r"step 80 is not saved and waits in memory: .* are missing", seen["said"])
