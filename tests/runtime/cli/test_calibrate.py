"""`holdfast calibrate`: what it writes and prints, and that an interruption changes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from holdfast.api.progress import StageProgress
from holdfast.cli import calibrate as command
from holdfast.errors import UserError
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.hardware.calibration import calibration_path, read_calibration
from holdfast.plan.hardware.fit import fit_calibration
from holdfast.plan.hardware.this_machine import detect_machine
from holdfast.training.measure.measure_machine import Stopwatch, count_operations, measure
from tests.runtime.plan.hardware.test_fit import made_samples
from tests.support.commands import apart
from tests.support.processes import runs
from tests.support.ranks import wait_until


def fake_rank(folder: Path, after: str = "") -> None:
    """A module that prints made-up measurements at once, in the place of the real one."""
    samples = [vars(each) for each in made_samples()]
    lines = [{"torch": "2.13.0", "operations": len(samples), "ranks": 2}, *samples]
    folder.joinpath("fake_rank.py").write_text(
        "import json, os, pathlib, sys, time\n"
        f"pathlib.Path({str(folder)!r}, 'pid' + sys.argv[1]).write_text(str(os.getpid()))\n"
        f"for line in json.loads({json.dumps(lines)!r}):\n"
        f"    print(json.dumps(line), flush=True)\n    {after or 'pass'}\n"
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's files, in which the fake rank measures."""
    fake_rank(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(command, "RANK_MODULE", "fake_rank")
    return calibration_path(detect_hardware().node)


def test_it_writes_what_plans_of_this_machine_read(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.calibrate(seconds=5, write=None, json=False)
    printed = capsys.readouterr()
    assert "cpu bf16   800 GFLOP/s" in printed.out
    assert f"written to {machine}" in printed.err
    here = detect_machine()
    assert here.calibration is not None
    cpu = here.devices["cpu"]
    assert cpu.peak("bf16") * cpu.reached("bf16").compute == pytest.approx(800e9, rel=0.01)
    assert here.cluster.pools[0].inside == here.calibration.inside


def test_json_and_another_file(
    machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.calibrate(seconds=5, write=tmp_path / "other.json", json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["file"] == str(tmp_path / "other.json")
    assert printed["errors"]["product fp32"] < 0.02
    assert len(printed["samples"]) == len(list(made_samples()))
    assert not machine.exists()


def test_an_interruption_changes_nothing_and_leaves_no_process(
    machine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command.calibrate(seconds=5, write=None, json=True)
    before = machine.read_bytes()
    fake_rank(tmp_path, after="'kind' in line and time.sleep(60)")

    pids = [tmp_path / f"pid{rank}" for rank in (0, 1)]

    def interrupt(*_: object) -> None:
        wait_until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
        raise KeyboardInterrupt

    for pid in pids:  # a rank may have been ended before it wrote its file
        pid.unlink(missing_ok=True)

    monkeypatch.setattr(StageProgress, "show", interrupt)
    with pytest.raises(KeyboardInterrupt):
        command.calibrate(seconds=5, write=None, json=False)
    assert "nothing has changed" in capsys.readouterr().err
    assert machine.read_bytes() == before
    assert not any(runs(int(pid.read_text())) for pid in pids)


def test_a_rank_that_fails_is_named(machine: Path, tmp_path: Path) -> None:
    fake_rank(tmp_path, after="sys.exit('no such device')")
    with pytest.raises(UserError, match=r"ended early \(no such device\); .*holdfast doctor"):
        command.calibrate(seconds=5, write=None, json=False)
    assert not machine.exists()


def test_a_real_core_gives_constants_that_are_possible() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        samples = list(measure(Stopwatch(torch.device("cpu"), 0.0, None)))
    finally:
        torch.set_num_threads(threads)
    assert len(samples) == count_operations(is_host=True, ranks=1)
    found = fit_calibration(samples, None, "2026-11-26", "box", "cpu", torch.__version__)
    for precision in ("fp32", "bf16"):
        one = found.efficiency[precision]
        assert 0 < one.compute <= 1
        assert 0 < one.memory <= 1
        assert found.flops[precision] > 1e9
    assert found.bandwidth > 1e8
    assert found.inside is None


@pytest.mark.slow
def test_the_command_on_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    done = apart("calibrate", "--seconds", "20", "--write", file, "--json")
    assert done.code == 0, done.err
    found = read_calibration(file)
    assert found is not None
    assert found.inside is not None
    assert json.loads(done.out)["errors"].keys() >= {"product fp32", "kernel", "allreduce"}
    assert os.listdir(tmp_path) == ["here.json"]
