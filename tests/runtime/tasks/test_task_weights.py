"""Weights that are fractions: the loss is the weighted sum over the sum of the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core.weights import UNIT, from_units, read_weight, shortest, to_units
from holdfast.errors import TaskError
from holdfast.tasks.task.batches import batch_weight
from tests.support.own_tasks import TaskTraining, task_config
from tests.support.ranks import RankContext, rank_values
from tests.support.sample_tasks import EncoderDecoderNet, Weighted


def _first_step(rank: RankContext) -> dict[str, float]:
    config = task_config("Weighted", precision="float64")
    made = TaskTraining(config, "one", rank.rank, rank.store())
    net = EncoderDecoderNet(0.0).double()
    net.load_state_dict(made.engine.objective.get_submodule("model").state_dict())
    made.step(1)
    verdict = made.engine.history.applied_verdicts[-1][1]
    rows = torch.cat([made.batches.microbatch(1, leaf).tensors["tokens"] for leaf in range(6)])
    total, divisor = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:  # token by token, as one would write it by hand
        logits = net(row[None, :4], row[None, 4:8])[0]
        for place, target in enumerate(row[5:]):
            weight = int(target) / 10
            total = total - weight * torch.log_softmax(logits[place], 0)[target]
            divisor += weight
    (total / divisor).backward()
    norm = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()
    made.engine.close()
    return {
        "loss": verdict.mean_loss,
        "reference loss": float(total) / divisor,
        "norm": verdict.mean_norm,
        "reference norm": float(norm),
    }


def test_loss_and_gradient_are_those_of_a_loop_written_by_hand() -> None:
    (found,) = rank_values(_first_step, 1, {})
    assert found["loss"] == pytest.approx(found["reference loss"], rel=1e-7)
    assert found["norm"] == pytest.approx(found["reference norm"], rel=1e-7)


def test_sums_of_weights_do_not_depend_on_their_order() -> None:
    drawn = torch.rand(10_000, generator=torch.Generator().manual_seed(1)).tolist()
    weights = [read_weight(value) for value in drawn]
    assert None not in weights
    known = [weight for weight in weights if weight is not None]
    assert [from_units(to_units(weight)) for weight in known] == known
    assert from_units(to_units(5) + to_units(2.25)) == 7.25
    assert sum(map(to_units, known)) == to_units(sum(sorted(known)))
    assert max(abs(a - b) for a, b in zip(known, drawn, strict=True)) <= UNIT / 2


@pytest.mark.parametrize("value", [True, -1, -0.5, float("nan"), float("inf"), "3", None])
def test_what_is_no_weight_is_refused(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_weight(value) is None
    monkeypatch.setattr(Weighted, "weight", lambda self, batch: value)
    with pytest.raises(TaskError, match=r"weight\(\) returned .*; return a number from 0 on"):
        batch_weight(Weighted(), {})


def test_a_tensor_or_an_array_of_one_number_is_a_weight() -> None:
    for given in (torch.tensor(3), torch.tensor(3.0), np.int64(3), np.float32(3), np.array(3)):
        assert repr(read_weight(given)) == "3"
    for given in (torch.ones(1), torch.tensor(True), torch.tensor(-1), np.float32("nan")):
        assert read_weight(given) is None


def test_whole_numbers_stay_whole_in_the_journal() -> None:
    assert repr(read_weight(7)) == repr(read_weight(7.0)) == repr(shortest(7.0)) == "7"
    assert read_weight(2.5) == 2.5
