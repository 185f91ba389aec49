"""The arithmetic of the benchmarks: intervals, verdicts, and what counts as a token a second."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
from benchmarks.peers.floor import matrices
from benchmarks.peers.rebuild import layout_of
from benchmarks.peers.work import Work
from benchmarks.peers.worker import NAMES
from benchmarks.runtime import layouts, train_step
from benchmarks.runtime.accelerator.journal import speed
from benchmarks.runtime.manifest import measure
from benchmarks.runtime.paired import Estimate, estimate
from benchmarks.runtime.rebuild import LAYOUTS
from benchmarks.runtime.recovering.lines import Line, Lines
from benchmarks.runtime.saving import floors
from benchmarks.runtime.steady import Stretch, row
from benchmarks.runtime.steadying.worker import KINDS, kind_of
from benchmarks.runtime.turns import Pair, losses

from holdfast.config.loading.load import load_config
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.events import CheckpointCaptured, StepDone
from holdfast.layout import Layout
from tests.support.commands import apart
from tests.support.ranks import ROOT


def test_the_interval_holds_the_median_and_narrows_with_more_rounds() -> None:
    few = [0.9, 1.0, 1.3, 1.1, 0.8]
    small, large = estimate(few), estimate(few * 20)
    assert small.median == large.median == statistics.median(few)
    assert small.low < small.median < small.high
    assert large.half_width < small.half_width


@pytest.mark.parametrize(
    ("wall", "median", "low_end"),
    [
        (Estimate(1.02, 1.01, 1.03), "yes", "yes"),
        (Estimate(1.0, 0.99, 1.01), "yes", "NO"),
        (Estimate(0.97, 0.96, 0.98), "NO", "NO"),
        (Estimate(1.02, 0.95, 1.1), "unsure", "unsure"),
        (Estimate(1.2, 1.05, 1.4), "yes", "yes"),
        (Estimate(0.8, 0.6, 0.95), "NO", "NO"),
    ],
)
def test_a_wide_interval_that_holds_the_bar_decides_nothing(
    wall: Estimate, median: str, low_end: str
) -> None:
    assert Pair("a", "b", "c", "not behind", 0.99).verdict(wall) == median
    assert Pair("a", "b", "c", "ahead", 1.0, on_low_end=True).verdict(wall) == low_end
    ahead = {pair.name for pair in train_step.PAIRS if pair.on_low_end}
    assert ahead == {"zero2", "zero3"}


def test_every_axis_is_measured_against_its_pieces_and_the_other_trainers() -> None:
    by_hand = {pair.name for pair in layouts.PAIRS if pair.least == 0.97 and not pair.on_low_end}
    synchronous = {name for name, kind in SCHEDULE_KINDS.items() if not kind.is_asynchronous}
    schedules = {f"pp2-{name}" for name in synchronous - {"1f1b"}}
    contexts = {"cp2", "cp2-ring", "cp2-ulysses"}
    assert by_hand == {"tp2", "ep2", "pp2", "dp_shard2", "zero2-accumulated", *contexts, *schedules}
    others = [pair for pair in layouts.PAIRS if pair.name not in by_hand]
    peers = {pair.peer.split("-")[0] for pair in others if pair.name != "ep2-copies"}
    assert peers == {"deepspeed", "torchtitan"}
    assert all(pair.on_low_end and pair.least == 1.0 for pair in others)
    for pair in (*layouts.PAIRS, *train_step.PAIRS):
        assert {pair.peer, pair.ours} <= set(NAMES), pair.name
    assert {pair.floor for pair in layouts.PAIRS} - {""} <= set(NAMES)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_floor_multiplies_by_every_matrix_once(tp: int, pp: int) -> None:
    work = Work("tiny", 512)
    ranks = [matrices(work, rank, tp, pp) for rank in range(tp * pp)]
    products = sum(rows * columns for shapes in ranks for rows, columns in shapes)
    embedding = 512 * work.config.dim
    table = [row for row in decoder_parameters(work.config) if len(row.shape) == 2]
    assert products == sum(row.size for row in table) - embedding
    assert work.stages(pp) == {1: (3,), 2: (2, 1)}[pp]


def test_layouts_are_named_by_their_degrees() -> None:
    work = Work()
    assert layout_of("pp2_dpshard2", work) == Layout(pp=2, dp_shard=2, stages=(4, 4))
    assert layout_of("dp2_tp2", work) == Layout(dp_replicate=2, tp=2)
    worlds = [[layout_of(one, work).world_size for one in name.split(">")] for name in LAYOUTS]
    assert {tuple(set(sizes)) for sizes in worlds} == {(2,), (4,)}


def test_a_rank_that_knows_no_loss_does_not_count() -> None:
    assert losses([{"losses": [1.0, 2.0]}, {"losses": [3.0, 2.0]}]) == [2.0, 2.0]
    assert losses([{"losses": [None, None]}, {"losses": [3.0, 2.0]}]) == [3.0, 2.0]


def test_tokens_a_second_leave_out_warm_up_and_captures() -> None:
    def step(number: int, compute: float, capture: float = 0.0) -> StepDone:
        phases = {"compute": compute, "reduce": 1.0} | ({"capture": capture} if capture else {})
        return StepDone(2.0, 7, 1.0, 1e-3, 0.0, samples=4, phases=phases, step=number)

    events = [
        step(1, 60.0),
        step(2, 1.0),
        step(3, 1.0, capture=5.0),
        CheckpointCaptured(0, 5.0, 100, step=3),
    ]
    found = speed(events, 128, skip=1)
    assert found.steps == 2
    assert found.tokens_per_second == Estimate(256.0, 256.0, 256.0)
    assert found.phases == {"compute": 1.0, "reduce": 1.0, "capture": 2.5}
    with pytest.raises(SystemExit, match="before step 4"):
        speed(events, 128, skip=3)


def test_the_run_file_for_one_gpu_asks_for_what_is_measured() -> None:
    config = load_config(ROOT / "examples/llama3.2-1b/run.yaml").config
    assert (config.model.vocab_size, config.model.layers, config.model.dim) == (128_256, 16, 2048)
    assert (config.data.sequence_length, config.train.precision) == (4096, "bf16")
    assert (config.train.compile, config.device, config.layout.workers) == (True, "auto", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "count"), [(["4 MB"], 4), pytest.param([], 4 + 2, marks=pytest.mark.slow)]
)
def test_ways_of_saving_are_measured_beside_their_floors(
    cases: list[str], count: int, tmp_path: Path
) -> None:
    """A little state, in real processes with a real mover: every way ends with a row. The table
    of following steps is with the long tests (marker slow)."""
    asked = (*cases, "--quick", "--ranks", "2", "--folder", tmp_path)
    out = apart(*asked, module="benchmarks.runtime.checkpoint", deadline=300).succeeds().out
    assert "failed" not in out, out
    rows = [line for line in out.splitlines() if line.startswith(("DCP async", "ours,"))]
    assert len(rows) == count
    assert list(tmp_path.iterdir()) == []
    assert all(wall > 0 for wall, _ in floors.direct_write(tmp_path, 10_000, 2))


def test_stretches_of_the_steady_run_hold_each_kind_once_a_round() -> None:
    kinds = [kind_of(step, 5) for step in range(1, 5 * 13 + 1)]
    assert kinds[:5] == ["on"] * 5  # warms up
    rounds = [kinds[at : at + 15 : 5] for at in range(5, len(kinds), 15)]
    assert all(sorted(each) == ["floor", "off", "on"] for each in rounds)
    assert rounds[0] != rounds[1]  # in turns


def test_what_the_steady_run_adds_is_told_over_the_bare_work() -> None:
    def stretch(kind: str, step: float, cpu: float, floor: float) -> Stretch:
        seconds = {"agents": 0.1, "movers": 0.0, "workers": cpu, "floor": floor}
        blocked = [{"fence": 0.0004, "copy": 0.0006}, {"copy": 0.002}]
        return Stretch(kind, 10, [step * at for at in range(11)], blocked, seconds)

    kinds = {
        "off": stretch("off", 0.1, 1.0, 0.0),
        "on": stretch("on", 0.101, 1.13, 0.0),
        "floor": stretch("floor", 0.1, 1.0, 0.1),
    }
    told = row("case", [kinds[kind] for kind in KINDS * 2]).split()
    assert told[1:7] == ["4", "100.0", "101.0", "100.0", "1.50", "2.00"]
    assert told[7] == "1.010"
    assert told[10:13] == ["13.0", "10.0", "1.300"]


def test_a_recovery_from_an_exception_begins_when_it_is_raised(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines", lambda: "", 60.0)
    now = time.time()

    def tell(when: float, step: int, generation: int) -> None:
        with (tmp_path / "lines").open("a") as file:
            file.write(f"{now + when} {step} {generation} 0 1 4\n")

    for step in (1, 2, 3):
        tell(step - 10.0, step, 1)

    def deed(here: list[Line]) -> None:
        tell(100.0, 0, 1)
        for step in (4, 5, 6):
            tell(98.5 + step, step, 2)

    found = lines.befall(deed)
    assert found.seconds == pytest.approx(2.5)
    assert found.beyond == pytest.approx(1.5)
    assert found.lost == 0


# --- the benchmarks of this room run, at a size that takes no time --------------------------------
def test_the_manifest_is_measured() -> None:
    model = ModelConfig(
        preset=None, layers=4, dim=16, heads=4, kv_heads=2, ffn_dim=24, vocab_size=64
    )
    found = measure(Layout(2, pp=2, dp_shard=3, tp=2, stages=(2, 2)), model, 4)
    assert found["ranks"] == 24
    assert found["stored_boxes_it_reads"] >= found["boxes_of_one_rank"] > 0  # type: ignore[operator]
    assert found["commit_object_bytes"] > 1000  # type: ignore[operator]


@pytest.mark.slow
def test_exports_are_measured(tmp_path: Path) -> None:
    asked = ("--megabytes", "4", "--shard-megabytes", "2", "--folder", tmp_path)
    done = apart(*asked, module="benchmarks.runtime.export", deadline=120).succeeds()
    assert [line.split()[0] for line in done.out.splitlines()[1:]] == ["hf", "dcp"]
    assert list(tmp_path.iterdir()) == []


# --- the benchmark of restores runs ---------------------------------------------------------------
@pytest.mark.slow
def test_every_source_and_layout_has_a_row_beside_its_floor() -> None:
    done = apart("--quick", module="benchmarks.runtime.restore", deadline=120).succeeds()
    lines = done.out.splitlines()
    bars = [line for line in lines if " of at most " in line]
    rows = [line for line in lines if " onto " in line and line not in bars]
    assert len(rows) == 6
    assert len(bars) == 2 * len(rows) + 3
    assert all(line.endswith((": yes", ": NO")) for line in bars)
    assert bars[-1].startswith("killed process: ")
    for line in rows:
        read = float(line.partition("onto")[2].split()[5])
        assert 1.0 <= read <= 1.05, line
    assert any(line.startswith("killed worker") for line in lines)
