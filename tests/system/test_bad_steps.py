"""A step that is not finite, or whose loss jumps, is repeated. If the repetition is good, the
device was bad, and the run is the same to the last bit. If its data is bad on every device, the
data is left out, with its reason. From outside, on two nodes and with real processes. One run has
all cases, because each costs seconds to start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.elastic.protocol.fault_orders import CorruptLossRule, FaultOrder, FaultOrders
from holdfast.events import Blamed, GenerationStarted, NonFinite, RunFinished, WorkerLost
from tests.support.commands import within
from tests.support.nodes import losses_of_one_worker, nodes_of, prepared

STEPS = 32
DEVICE, DATA, JUMP = 5, 8, 30
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=4",
    "train.evaluate.every=0",
    "checkpoint.every_steps=100",
)


@pytest.mark.slow
def test_a_device_that_errs_bad_data_and_a_jump_of_the_loss(tmp_path: Path) -> None:
    run_file = prepared(tmp_path)
    undisturbed = losses_of_one_worker(run_file, *SETTINGS)
    faults = FaultOrders(tmp_path / "faults")
    faults.prepare()
    faults.arm(FaultOrder(1, "gradient", "not finite", "backward", step=DEVICE, rank=1))
    faults.set_corrupt_losses(
        CorruptLossRule(DATA, DATA, 2), CorruptLossRule(JUMP, JUMP, 1, times=9.0)
    )
    settings = (*SETTINGS, "layout.workers=2", "cluster.min_nodes=2")
    more = ("cluster.loss_jumps=roll_back", f"cluster.faults={faults.folder}")
    with nodes_of(run_file, tmp_path / "run", *settings, *more) as run:
        run.start("a", "b")
        assert set(run.end().values()) == {0}, run.story()

        assert len(run.events(RunFinished)) == 1, run.story()
        assert run.events(WorkerLost) == [], "nobody is lost by it"
        begun = run.events(GenerationStarted)
        assert [e.step for e in begun] == [0, DEVICE - 1, DATA - 1, DATA - 1, JUMP - 1, JUMP - 1], (
            run.story()
        )
        assert [e.reason for e in begun[1:]] == ["non_finite"] * 3 + ["loss_jump"] * 2
        assert all((e.rung, e.came_from) == (1, [0, 1]) for e in begun[1:]), "nothing is read"

        hit = faults.read_hit(1)
        assert hit is not None
        first, *rest = run.events(NonFinite)
        assert (first.step, first.rank, first.node, first.again) == (
            DEVICE,
            hit.rank,
            hit.node,
            False,
        )
        assert [(e.step, e.microbatches, e.again) for e in rest] == [(DATA, [2], True)] * 2
        assert {e.node for e in rest} == {"a", "b"}, "the other one computed it the second time"
        blamed = run.events(Blamed)
        assert [(e.step, e.blame) for e in blamed] == [
            (DEVICE, "device"),
            (DATA, "data"),
            (JUMP, "data"),
        ], run.story()
        assert blamed[0].devices == [f"process {hit.pid} on {hit.node}"]
        assert [e.microbatches for e in blamed[1:]] == [[2], [1]]

        losses = run.losses()
        assert sorted(losses) == sorted(undisturbed) == list(range(1, STEPS + 1))
        differ = {step for step in losses if losses[step] != undisturbed[step]}
        assert min(differ) == DATA, "up to there it is the same to the last bit"
        assert losses[JUMP] == pytest.approx(losses[JUMP - 1], abs=1.5)

        audit = within("data", "audit", run.outside, "--json").succeeds()
        found = json.loads(audit.out)["skipped"]
        assert sorted(found.values()) == [1, 1]
        reasons = sorted(found, key=lambda reason: f"step {JUMP}" in reason)
        assert reasons[0].startswith(f"step {DATA} is not finite (")
        assert reasons[1].startswith(f"step {JUMP} has a loss of ")
