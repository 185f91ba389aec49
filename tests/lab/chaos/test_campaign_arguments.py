"""What `holdfast chaos` looks at before it trains anything: layouts that no node would start with,
a run file that is somebody else's, faults that nobody named."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import RunFolderError
from holdfast_lab.chaos.campaign import CampaignSettings, plan_runs
from holdfast_lab.chaos.layouts import CHAOS_LAYOUTS, parse_layout
from holdfast_lab.chaos.sample_run import (
    EXPERT_OVERRIDES,
    RUN_FILE,
    SAMPLE_OVERRIDES,
    run_file_text,
    write_run_file,
)
from holdfast_lab.commands import chaos
from tests.support.commands import within


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--layout", "tp=2,workers=5", "--nodes", "5"],
            ["--layout", "workers=5 make no whole replicas of 2", "use workers=10"],
        ),
        (["--layout", "dp_shard=2,workers=5"], ["use workers=4 or workers=6"]),
        (["--layout", "tp=2,pp=2,workers=2"], ["no whole replicas of 4", "use workers=4"]),
        (["--layout", "tp=3,workers=6"], ["layout.tp 3 does not divide model.heads 2", "use 2"]),
        (["--layout", "dp_shard=2,ep=4"], ["layout.ep 4 does not divide layout.dp_shard 2"]),
        (["--layout", "workers=9"], ["make 9 replicas, but step 1 has 6 microbatches"]),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_anything_is_trained(
    arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    within("chaos", "--no-network", "--out", out, *arguments).refuses(*words)
    assert not out.exists()


def test_a_layout_that_does_not_fit_the_run_file_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    run_file, out = write_run_file(tmp_path / "own"), tmp_path / "out"
    arguments = ("chaos", run_file, "model.layers=1", "--no-network", "--out", out)
    within(*arguments, "--layout", "tp,pp", "--faults", "2 kill").refuses(
        "layout.pp 2 is more than model.layers 1", "use 1"
    )
    assert not out.exists()


def test_every_layout_that_has_a_name_fits_the_tiny_model(tmp_path: Path) -> None:
    with_experts = (*SAMPLE_OVERRIDES, *EXPERT_OVERRIDES)
    settings = CampaignSettings(("false",), tmp_path / RUN_FILE, with_experts, tmp_path, 1, ())
    work = plan_runs(list(CHAOS_LAYOUTS.values()), 25 * len(CHAOS_LAYOUTS))
    chaos._check_layouts(work, settings, run_file_text(tmp_path))


def test_blanks_around_layouts_say_nothing(tmp_path: Path) -> None:
    assert parse_layout(" tp ") == CHAOS_LAYOUTS["tp"]
    assert parse_layout(" tp=2 , workers=4", 2) == parse_layout("tp=2,workers=4", 2)
    assert chaos._shapes("replicated, tp", 0) == [CHAOS_LAYOUTS["replicated"], CHAOS_LAYOUTS["tp"]]
    arguments = ("chaos", "--no-network", "--out", tmp_path / "out", "--faults", "pipeline")
    within(*arguments, "--layout", "pp, tp").refuses("none of these faults can happen in tp")


@pytest.mark.parametrize("faults", ["", "  ", ","])
def test_faults_that_nobody_named_are_no_whole_run(faults: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    within("chaos", "--faults", faults, "--out", out).refuses("--faults", "neither", "--list")
    assert not out.exists()


def test_a_run_file_of_somebody_else_is_not_taken_for_the_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(RUN_FILE).write_text("name: mine\n")
    within("chaos", "--out", ".").refuses("run.yaml", "did not write", "holdfast chaos run.yaml")
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]
    changed = run_file_text(tmp_path / "out").replace("dim: 16", "dim: 32")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RUN_FILE).write_text(changed)
    with pytest.raises(RunFolderError, match="did not write"):
        write_run_file(tmp_path / "out")


def test_a_run_file_of_its_own_is_taken_up_again_wherever_it_lies_now(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    written = write_run_file(out).read_bytes()
    assert write_run_file(out).read_bytes() == written
    moved = out.rename(tmp_path / "moved")
    assert write_run_file(moved).read_bytes() == written
