"""`make gpu` on a machine without an accelerator: it runs, and a row that fails stops no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.runtime.accelerator.settings import Settings
from benchmarks.runtime.accelerator.several import BUS_FACTORS, NodeLayout, parity
from benchmarks.runtime.accelerator.table import Row, in_groups
from benchmarks.runtime.gpu import ROWS, SUITE
from benchmarks.runtime.gpus import SUITE as SEVERAL
from benchmarks.runtime.precision import PRECISIONS, QUANTIZED, STATES, curve_of, differences

from holdfast_lab.engine.clocks import LEAST_CLOCK, NodePower
from tests.support.commands import Outcome, apart


def quick(out: Path, *arguments: str, module: str = "benchmarks.runtime.gpu") -> Outcome:
    asked = ("--device", "cpu", "--quick", "--out", out, *arguments)
    return apart(*asked, module=module, deadline=1500)


@pytest.mark.slow
def test_a_row_writes_its_figures_into_the_file(tmp_path: Path) -> None:
    done = quick(tmp_path / "gpu.json", "--only", "parity")
    assert done.code == 0, done.out + done.err
    stored = json.loads((tmp_path / "gpu.json").read_text())
    (row,) = stored["rows"]
    assert (row["row"], row["passed"]) == ("parity", True)
    assert row["figures"]["adamw"]["worst_loss"] == 0.0
    assert "parity" in done.out


@pytest.mark.slow
def test_every_row_that_a_cpu_has_passes(tmp_path: Path) -> None:
    """All but the peers, which pip would have to install."""
    done = quick(tmp_path / "gpu.json", "--skip", "peers", "--seconds", "1400")
    assert done.code == 0, done.out + done.err
    told = {r["row"]: r["line"] for r in json.loads((tmp_path / "gpu.json").read_text())["rows"]}
    assert list(told) == [row.name for row in ROWS if row.on_cpu and row.name != "peers"]
    assert "no card: on the CPU. dp 2: the bits of one worker" in told["shared-card"]


@pytest.mark.slow
def test_the_rows_for_several_devices_pass_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpus.json"
    done = quick(out, "--workers", "4", module="benchmarks.runtime.gpus")
    assert done.code == 0, done.out + done.err
    told = {row["row"]: row["line"] for row in json.loads(out.read_text())["rows"]}
    assert list(told) == [row.name for row in SEVERAL.rows if row.on_cpu]
    assert not [name for name, line in told.items() if "not run" in line]
    assert "same bits" in told["dp-gathered-killed"]


def test_a_layout_that_needs_more_devices_says_so(tmp_path: Path) -> None:
    layout = NodeLayout("pp-tp", 4, ())
    found = parity(Settings("cpu", True, tmp_path, workers=3), layout)
    assert found.line == "not run: it needs 4 devices"


@pytest.mark.parametrize(
    ("name", "ranks", "gigabytes"), [("all_reduce", 4, 1.5), ("all_gather", 4, 0.75)]
)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, ranks: int, gigabytes: float) -> None:
    assert BUS_FACTORS[name](ranks) == gigabytes  # for a buffer of 1 GB in a second


def test_a_row_that_fails_says_its_error_in_one_line(tmp_path: Path) -> None:
    told = SUITE.run_row(Row("no such row", 60), Settings("cpu", True, tmp_path))
    assert not told["passed"]
    assert told["line"].startswith("failed: ")
    assert "\n" not in told["line"]
    assert "no such row" in told["error"]


def test_nothing_runs_beside_a_row_that_is_timed() -> None:
    groups = [[row.name for row in group] for group in in_groups(ROWS)]
    assert [name for group in groups for name in group] == list(SUITE.names)
    timed = {
        "floors",
        "capture",
        "train-1b",
        "peers",
        "shared-card",
        *(name for name in SUITE.names if name.startswith("1b-")),
    }
    assert all(len(group) == 1 for group in groups if timed & set(group))
    assert max(map(len, groups)) > 1


# --- the model of caps ----------------------------------------------------------------------------
def test_it_gives_the_published_energy_and_time_under_a_cap() -> None:
    """150 W of 250 W: 13.7 % less energy at 6.8 % more time (arXiv 2205.09646)."""
    device = NodePower(host_w=0.0, idle_w=40.0, busy_w=185.0)
    clock = device.clock_under(150.0)
    longer = 1 / device.rate(clock)
    assert longer == pytest.approx(1.068, abs=0.005)
    assert device.watts(clock) * longer / device.watts(1.0) == pytest.approx(0.863, abs=0.01)


def test_a_cap_above_the_need_changes_nothing_and_a_low_one_ends_at_the_least_clock() -> None:
    node = NodePower(host_w=500.0, idle_w=100.0, busy_w=1000.0)
    assert node.clock_under(2000.0) == 1.0
    assert node.clock_under(10.0) == LEAST_CLOCK
    assert node.rate(1.0) == 1.0
    assert node.watts(1.0) == 1500.0


def test_wrong_watts_are_refused() -> None:
    with pytest.raises(ValueError, match="idle at most busy"):
        NodePower(host_w=0.0, idle_w=200.0, busy_w=100.0)


# --- training in two bytes ------------------------------------------------------------------------
STEPS = 80


@pytest.mark.slow
def test_bf16_and_fp16_stay_near_fp32(tmp_path: Path) -> None:
    curves = {name: curve_of(name, c, STEPS, tmp_path) for name, c in PRECISIONS.items()}
    reference = curves["fp32"].losses
    for precision in ("bf16", "fp16"):
        assert len(curves[precision].losses) == STEPS
        assert differences(curves[precision].losses, reference).max() < 0.01
    assert len(curves["fp16"].skipped) < STEPS / 10
    assert not curves["bf16"].skipped


@pytest.mark.slow
def test_short_state_stays_near_fp32(tmp_path: Path) -> None:
    """Within 1 % at equal tokens. The quickstart's own rate is so high that any rounding moves the
    loss by more."""
    curves = {
        name: curve_of(name, STATES[name], STEPS, tmp_path, rate=1e-3) for name in list(STATES)[:3]
    }
    reference = curves["fp32 state"]
    for name, most in (("bf16 state", 4.0), ("8bit state", 2.2)):
        assert differences(curves[name].losses, reference.losses).max() < 0.01
        assert curves[name].validation == pytest.approx(reference.validation, rel=0.01)
        assert curves[name].state_bytes <= most
    assert reference.state_bytes == 8.0


@pytest.mark.slow
def test_quantized_exchange_stays_near_fp32(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        exact, found = (
            curve_of(name, QUANTIZED[name], STEPS, tmp_path, rate=1e-3, seed=seed)
            for name in ("none", "both")
        )
        assert found.losses != exact.losses
        assert differences(found.losses, exact.losses).max() < 0.01
        assert found.validation == pytest.approx(exact.validation, rel=0.01)
