"""`holdfast plan`: a table for people, numbers for programs, a sentence for the impossible."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.machine.hardware import detect_hardware
from holdfast.plan.hardware.calibration import calibration_path, write_calibration
from tests.runtime.cli.conftest import Trained
from tests.runtime.plan.hardware.test_fit import measured_by_hand
from tests.support.commands import apart, within, write_run_file
from tests.support.ranks import ROOT

SMALL = (
    "model.layers=3",
    "model.dim=64",
    "model.heads=4",
    "model.kv_heads=2",
    "model.vocab_size=512",
    "train.batch_size=16",
    "layout=auto",
)
WIDE = ("train.batch_size=512", "train.microbatch_size=auto")
HUGE = (*SMALL, "model.layers=96", "model.dim=16384", "model.ffn_dim=49152", "model.heads=128")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path)


def test_the_table_marks_the_chosen_layout_and_adds_up(run_file: Path) -> None:
    out = within("plan", run_file, *SMALL, "--cluster", "2x4xA100-80").out
    assert "2 x 4 A100-80" in out
    rows = [line for line in out.splitlines() if line.endswith("<- chosen")]
    assert len(rows) == 1
    assert "a step of" in out
    assert "by stage:" in out
    assert "run 'holdfast calibrate'" in out  # the constants are assumed


def test_the_last_lines_name_the_key_of_a_better_layout_by_another_objective(
    run_file: Path, tmp_path: Path
) -> None:
    machines = tmp_path / "c.yaml"
    machines.write_text(
        "pools:\n  own: {nodes: 1, devices: 2, device: A100-80, usd_per_hour: 0}\n"
        "  paid: {nodes: 1, devices: 2, device: A100-80, usd_per_hour: 9}\n"
    )
    asked = ("plan", run_file, *SMALL, *WIDE, "--cluster", machines)
    lines = within(*asked).out.splitlines()
    [cheapest] = [line for line in lines if line.startswith("cheapest: ")]
    assert "$0.00 per 1e9 tokens" in cheapest
    assert cheapest.endswith("plan.objective=tokens_per_usd")
    assert lines[-1].startswith("next: holdfast launch ")
    assert f"plan.cluster={machines}" in lines[-1]
    again = within(*asked, "plan.objective=tokens_per_usd").out.splitlines()
    assert any("<- chosen" in line and "0.00" in line for line in again)


def test_a_run_in_fp32_is_told_what_bf16_gives(run_file: Path) -> None:
    wide = (*SMALL, "model.dim=1024", "model.ffn_dim=4096", "data.sequence_length=512")

    def hints(*asked: str) -> list[str]:
        lines = within("plan", run_file, *wide, *asked).succeeds().out
        return [each for each in lines.splitlines() if each.startswith("another precision: ")]

    machines = ("--cluster", "2x1xA100-80")
    [hint] = hints("train.precision=fp32", *machines)
    assert hint.endswith(" train.precision=bf16")
    assert "train.precision=fp32" not in hint
    assert hints(*machines) == [hint.replace("train.precision=fp32 ", "")]
    assert hints("train.precision=bf16", *machines) == []
    assert hints("--cluster", "2x1xV100-32") == []  # it has no bf16


def test_json_has_the_layouts_with_their_keys_and_parts(run_file: Path) -> None:
    asked = (run_file, *SMALL, "--cluster", "4xaws/us-east-1/p4d.24xlarge", "--json")
    value = json.loads(within("plan", *asked).out)
    best = value["layouts"][0]
    assert best["values"]["layout.workers"] == best["devices"] <= 32
    idle = [note for note in value["notes"] if "stay idle" in note]
    assert bool(idle) == (best["devices"] < 32)
    assert sum(best["parts"].values()) == pytest.approx(best["step_s"])
    assert best["usd_per_hour"] > 0
    assert best["score"] <= min(layout["score"] for layout in value["layouts"])
    again = json.loads(within("plan", *asked).out)
    assert (value.pop("source"), again.pop("source")) == ("searched", "from the plan cache")
    assert again == value


def test_the_plan_cache_is_named(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = ("plan", run_file, *SMALL, "--cluster", "2x4xA100-80")
    titles = [within(*asked).out.splitlines()[0] for _ in range(2)]
    assert titles[1] == f"{titles[0]}, from the plan cache"
    for path in (tmp_path / "cache" / "holdfast" / "plans").iterdir():
        path.write_text("{")
    both = within(*asked)
    assert both.out.splitlines()[0] == titles[0]
    assert "is damaged" in both.err
    larger = within("plan", run_file, *SMALL, "--cluster", "4x4xA100-80").out
    assert larger.splitlines()[0].endswith(", searched from a cached plan")
    after_loss = within("plan", run_file, *SMALL, "--cluster", "3x4xA100-80").out
    assert after_loss.splitlines()[0].endswith(", from the plan cache")  # it is a next plan


def test_the_sources_of_the_numbers_are_said(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_calibration(measured_by_hand("cpu"), calibration_path(detect_hardware().node))
    out = within("plan", run_file, *SMALL, "--cluster", "here").out
    assert "note: the numbers of cpu were measured here on 2026-11-26" in out
    assert "is assumed" not in out
    zones = tmp_path / "zones.yaml"
    pool = "{nodes: 1, devices: 2, device: A100-80, zone: %s}"
    zones.write_text(f"pools:\n  a: {pool % 'east'}\n  b: {pool % 'west'}\n")
    out = within("plan", run_file, *SMALL, "--cluster", zones).out
    assert "no link is given between the zones east and west: 0.31 GB/s of a device" in out


def test_limits_of_the_run_file_hold(run_file: Path) -> None:
    asked = (run_file, *SMALL, "layout.tp=2", "--cluster", "8xA100-80", "--json")
    layouts = json.loads(within("plan", *asked).out)["layouts"]
    assert {layout["values"]["layout.tp"] for layout in layouts} == {2}


def test_given_ways_are_those_of_the_plan(run_file: Path) -> None:
    given = {"layout.virtual_stages": 3, "layout.sequence_parallel": False}
    words = ("layout.schedule=interleaved", "layout.pp=2", "layout.tp=2", "model.layers=12")
    words += tuple(f"{key}={str(value).lower()}" for key, value in given.items())
    asked = (run_file, *SMALL, *words, "--cluster", "4xA100-80", "--json")
    layouts = json.loads(within("plan", *asked).out)["layouts"]
    for key, value in given.items():
        assert {layout["values"][key] for layout in layouts} == {value}


def test_no_layout_needs_more_than_a_device_has_to_give() -> None:
    run = ROOT / "examples" / "spot-losses" / "run.yaml"
    asked = ("plan", run, "--cluster", "8xH100-80", "layout.pp=4", "layout.schedule=interleaved")
    for layout in json.loads(within(*asked, "--json").out)["layouts"]:
        assert layout["peak_bytes"] <= layout["room"]


def test_a_runner_up_is_no_slower_among_the_neighbours() -> None:
    run = ROOT / "examples" / "spot-losses" / "run.yaml"
    asked = ("plan", run, "--cluster", "8x8xA100-80", "--json")
    value = json.loads(within(*asked).out)
    best, *others = value["layouts"]
    slower = {each["differs"]: each["slower"] for each in value["neighbours"]}
    size = best["values"]["train.microbatch_size"]
    others = [other for other in others if other["values"]["train.microbatch_size"] == size]
    axes = ("pp", "dp_shard", "cp", "tp")
    seen = 0
    for other in others:
        group = {axis: other["values"][f"layout.{axis}"] for axis in axes}
        degrees = ", ".join(f"{axis} {n}" for axis, n in group.items() if n > 1)
        count = other["devices"] // math.prod(group.values())
        if (found := slower.get(f"{count} x {degrees}")) is not None:
            seen += 1
            assert found <= other["step_s"] / best["step_s"] - 1 + 1e-9
    assert seen


def test_layouts_on_several_pools_name_them(run_file: Path) -> None:
    out = within("plan", run_file, *SMALL, "--cluster", "1xA100-80+1xH100-80").out
    assert re.search(r"1 replica on [AH]100-80 .*<- chosen", out)


def test_memory_of_unlike_devices_stands_beside_that_of_each(run_file: Path) -> None:
    asked = (*SMALL, "layout.pp=2", "layout.workers=2", "--cluster", "1xA100-80+1xH200")
    out = within("plan", run_file, *asked).out
    line = next(line for line in out.splitlines() if line.startswith("memory of a device"))
    assert len(set(re.findall(r" of (\d[\d.]* GiB)", line))) == 2
    assert {"node of A100-80", "node of H200"} <= {  # next plans
        line.split("  ")[1] for line in out.splitlines() if line.startswith("  node of")
    }


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((*SMALL, "device=cuda"), ("device is cuda, and this machine has none", "--cluster")),
        (
            ("--compare", "layout.tp=1", "layout.tp=2", "--what-if", "lost=1"),
            ("about one", "a call of their own"),
        ),
        (
            (*HUGE, "--cluster", "16x8xA100-80", "layout.workers=8"),
            ("no layout fits", "on 8 devices", "use layout.workers="),
        ),
        ((*HUGE, "--cluster", "8xA100-80"), ("no layout", "fits", "use")),
        ((*SMALL, "--cluster", "8xA100-8O"), ("no device 'A100-8O'", "use A100-80")),
        ((*SMALL, "--objective", "speed"), ("plan.objective is 'speed'", "use time")),
        ((*SMALL, "--cluster", "none.yaml"), ("cannot be read", "16x8xH100-80")),
        ((*SMALL, "layout.stages=[1,2]", "layout.pp=2"), ("layout.stages", "layout show")),
    ],
)
def test_impossible_demands_get_one_sentence(
    asked: tuple[str, ...], words: tuple[str, ...], run_file: Path
) -> None:
    within("plan", run_file, *asked).refuses(*words)


def test_the_planner_imports_no_torch(run_file: Path) -> None:
    asked = ["plan", str(run_file), *SMALL, "--cluster", "8xA100-80", "--json"]
    code = (
        "import sys\n"
        "from holdfast.cli.main import main\n"
        f"assert main({asked!r}) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_layout_show_and_schedule_take_the_chosen_layout(run_file: Path) -> None:
    shown = within("layout", "show", run_file, *SMALL, "plan.cluster=8xA100-80", "--json")
    assert shown.code == 0, shown.err
    assert "layout: " in shown.err
    layout = json.loads(shown.out)["layout"]
    assert (layout["mode"], layout["workers"]) == ("auto", 8)
    drawn = within("layout", "schedule", run_file, *SMALL, "layout.pp=2")
    assert "on 2 ranks" in drawn.out


def test_a_free_layout_trains_and_the_report_shows_plan_and_measurement(run_file: Path) -> None:
    done = apart("train", run_file, "layout=auto", "layout.tp=2", folder=run_file.parent)
    assert done.code == 0, done.err
    assert "layout: 1 x tp 2, the" in done.err
    resolved = json.loads((run_file.parent / "run" / "resolved.json").read_text())
    layout = resolved["config"]["layout"]
    assert (layout["mode"], layout["workers"]) == ("auto", 2)
    assert resolved["origins"]["layout.workers"]["kind"] == "planned"
    plan = json.loads(within("report", run_file.parent / "run", "--json").out)["plan"]
    assert plan["predicted_s"] > 0
    assert plan["measured_s"] > 0
    assert plan["predicted_bytes"] > 0
    assert "tp" in plan["within"]
    again = within("train", run_file, "layout=auto", "layout.tp=2")
    assert again.code == 0  # the same layout: the run is finished
    assert "this run is finished" in again.err


def test_a_run_with_a_given_layout_has_a_prediction_too(trained: Trained) -> None:
    assert "planned " in within("report", trained.folder, "--output", "page.html").err


def test_a_dear_run_is_not_begun_without_a_terminal_to_ask(
    run_file: Path, trained: Trained
) -> None:
    dataset = f"data.folder={trained.root / 'dataset'}"
    asked = (dataset, "train.steps=10000000", "train.batch_size=8", "plan.ask_above_usd=1")
    asked += ("plan.cluster=2xaws/us-east-1/p4d.24xlarge",)
    refused = within("train", run_file, *asked)
    words = ("this run costs $", "plan.ask_above_usd is 1", "pass --yes")
    refused.refuses_last(*words, code=4)
    assert "planned: " in refused.err
    assert not (run_file.parent / "run" / "run.yaml").exists()


def test_timeline_neighbours_and_drawing(run_file: Path, tmp_path: Path) -> None:
    drawn = tmp_path / "step.svg"
    asked = (run_file, *SMALL, "layout.pp=3", "--cluster", "6xA100-80", "--svg", drawn)
    out = within("plan", *asked).out
    assert "one step of a replica, its first 6 of 8 microbatches, in milliseconds:" in out
    assert "rank 2  " in out
    assert "why not:" in out
    assert re.search(r"  recompute full: [\d.]+% slower: recompute adds", out)
    assert drawn.read_text().startswith("<svg")
    value = json.loads(within("plan", *asked[:-2], "--json").out)
    slower = [each["slower"] for each in value["neighbours"] if each["slower"] is not None]
    assert slower == sorted(slower)
    within("plan", *asked[:-1], tmp_path / "none" / "step.svg").refuses_last(
        "cannot be written", "name a file in a folder"
    )


def test_a_comparison_stands_part_by_part(run_file: Path) -> None:
    both = ("--compare", "layout.tp=2", "layout.tp=1,layout.pp=2")
    out = within("plan", run_file, *SMALL, "--cluster", "4xA100-80", *both).out
    assert "  bubble" in out
    assert re.search(r"is [\d.]+% faster than layout", out)
    value = json.loads(
        within("plan", run_file, *SMALL, "--cluster", "4xA100-80", *both, "--json").out
    )
    assert list(value) == list(both[1:])
    alone = within("plan", run_file, *SMALL, "layout.tp=2", "--cluster", "4xA100-80", "--json")
    assert value["layout.tp=2"] == {
        key: each
        for key, each in json.loads(alone.out).items()
        if key not in ("neighbours", "next_plans")
    }


def test_a_loss_leaves_a_layout_or_says_that_none_fits(run_file: Path) -> None:
    asked = (run_file, *SMALL, "--cluster", "4x2xA100-80", "--what-if")
    out = within("plan", *asked, "lost=2").out
    assert "without 2 nodes of A100-80: " in out
    assert "of the throughput" in out
    assert "no layout fits" in within("plan", *asked, "lost=4").out
    value = json.loads(within("plan", *asked, "lost=node:A100-80", "--json").out)
    assert value["what_if"]["devices"] <= 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3", ("this is not a loss", "write lost=3 (nodes)")),
        ("lost=rack:A100-80", ("racks of the pool A100-80 are not known", "lost=node:A100-80")),
        ("lost=9", ("has 4 nodes", "use lost=4 or fewer")),
        ("lost=node:b", ("no pool 'b'", "use lost=node:A100-80")),
        ("lost=zone:x", ("in the zone 'x'", "use lost=1")),
    ],
)
def test_losses_that_cannot_be_read_name_one_that_can(
    text: str, words: tuple[str, ...], run_file: Path
) -> None:
    asked = (run_file, *SMALL, "--cluster", "4x2xA100-80", "--what-if", text)
    done = within("plan", *asked)
    done.refuses_last(*words)
    assert done.out == ""  # before the plan is printed


def test_failures_of_the_machines_are_counted(run_file: Path) -> None:
    asked = (run_file, *SMALL, "--cluster", "4xaws/us-east-1/p4d.24xlarge:spot")
    out = within("plan", *asked).out
    assert "availability" in out
    assert "next plans:" in out
    plans = json.loads(within("plan", *asked, "--json").out)["next_plans"]
    assert {each["loss"] for each in plans} >= {"node", "half of the spot pool"}
    assert all(each["share"] <= 1 for each in plans)
    found = within("plan", *asked, "--objective", "goodput_per_usd", "--json")
    assert json.loads(found.out)["objective"] == "goodput_per_usd"
    soon = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    ended = ("train.steps=1000000000", "--objective", "finish_by", f"plan.finish_by={soon}")
    assert "no layout is done in 0.01" in within("plan", *asked, *ended).out
    late = within("plan", *asked, "--objective", "finish_by", "plan.finish_by=2020-01-01")
    late.refuses("has passed", "use a later date")
