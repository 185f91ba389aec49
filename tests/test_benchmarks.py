"""The arithmetic of the benchmarks: intervals, verdicts, and what counts as a token a second."""

from __future__ import annotations

import statistics

import pytest
from benchmarks.gpu import speed
from benchmarks.paired import Estimate, estimate
from benchmarks.train_step import PAIRS, Pair

from holdfast.config.load import load
from holdfast.events import CheckpointCaptured, StepDone
from tests.ranks import ROOT


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
        (Estimate(1.2, 1.05, 1.4), "unsure", "unsure"),
    ],
)
def test_a_verdict_needs_a_narrow_interval(wall: Estimate, median: str, low_end: str) -> None:
    assert Pair("a", "b", "c", "not behind", 0.99).verdict(wall) == median
    assert Pair("a", "b", "c", "ahead", 1.0, on_low_end=True).verdict(wall) == low_end
    assert {pair.name for pair in PAIRS if pair.on_low_end} == {"zero2", "zero3"}


def test_tokens_a_second_leave_out_warm_up_and_captures() -> None:
    def step(number: int, compute: float, capture: float = 0.0) -> StepDone:
        phases = {"compute": compute, "reduce": 1.0} | ({"capture": capture} if capture else {})
        return StepDone(2.0, 7, 1.0, 1e-3, 0.0, samples=4, phases=phases, step=number)

    events = [
        step(1, 60.0), step(2, 1.0), step(3, 1.0, capture=5.0),
        CheckpointCaptured(0, 5.0, 100, step=3),
    ]  # fmt: skip
    found = speed(events, 128, skip=1)
    assert found.steps == 2
    assert found.tokens_per_second == Estimate(256.0, 256.0, 256.0)
    assert found.phases == {"compute": 1.0, "reduce": 1.0, "capture": 2.5}
    with pytest.raises(SystemExit, match="before step 4"):
        speed(events, 128, skip=3)


def test_the_run_file_for_one_gpu_asks_for_what_is_measured() -> None:
    config = load(ROOT / "examples/llama3.2-1b/run.yaml").config
    assert (config.model.vocab_size, config.model.layers, config.model.dim) == (128_256, 16, 2048)
    assert (config.data.sequence_length, config.train.precision) == (4096, "bf16")
    assert (config.train.compile, config.device, config.layout.workers) == (True, "auto", 1)
