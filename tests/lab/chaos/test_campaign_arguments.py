"""What `holdfast chaos` looks at before it trains anything: layouts that no node would start with,
a run file that is somebody else's, faults that nobody named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.format.manifest import commit_key
from holdfast.errors import RunFolderError
from holdfast_lab.chaos.actions import (
    FAULT_ACTIONS,
    NotPossibleNowError,
    damage_newest,
    flip_memory_bits,
)
from holdfast_lab.chaos.campaign import CampaignSettings, plan_runs
from holdfast_lab.chaos.catalog import FAULTS
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


# --- what is done to processes from outside is really done ----------------------------------------
SIZE = 100_000
HOLDS_MEMORY = f"""
import mmap, os
fd = os.memfd_create("state")
os.truncate(fd, {SIZE})
memory = mmap.mmap(fd, {SIZE})  # it has a descriptor of its own
print("ready", flush=True)
input()
print(sum(memory[:]))
"""


def test_memory_that_is_mapped_is_changed_and_each_bit_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_MEMORY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        changed = flip_memory_bits(process.pid)
        found, _ = process.communicate("\n", 30)
    assert changed == int(found) == 9


def test_only_the_newest_checkpoint_is_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "0000000001"
    folder.mkdir(parents=True)
    (tmp_path / "commits").mkdir()
    with pytest.raises(NotPossibleNowError, match="no older"):
        damage_newest(tmp_path, lambda file, older: None)
    for step in (10, 20):
        (tmp_path / commit_key(1, step)).write_text("")
        for rank in (0, 1):
            (folder / f"{step:010d}-rank{rank:05d}-0.safetensors").write_text(f"{step}/{rank}")
    pairs: list[tuple[str, str]] = []
    key = damage_newest(
        tmp_path, lambda file, older: pairs.append((file.read_text(), older.read_text()))
    )
    assert key == commit_key(1, 20)
    assert sorted(pairs) == [("20/0", "10/0"), ("20/1", "10/1")]
    assert set(FAULT_ACTIONS) <= {part.action for fault in FAULTS.values() for part in fault.parts}
