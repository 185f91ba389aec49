"""float16: a gradient that overflows skips the step on all ranks alike, and training recovers.

What is not finite for another reason stays an error, with the rank and parameter that it names.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from holdfast.core.sharding.run_table import run_state_table
from holdfast.core.sharding.state_table import LOSS_SCALE_ROW
from holdfast.errors import NonFiniteError
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.loss_scale import LossScale
from holdfast.training.engine.vote import StepVerdict, Wishes, verdict_from_words, verdict_words
from tests.runtime.training.test_recover import check_reports, survivors, undisturbed
from tests.support.layouts import case, engine_for
from tests.support.layouts import one_step as layout_step
from tests.support.marks import in_campaign
from tests.support.nan_gradient import spoil_once
from tests.support.ranks import RankContext, rank_values
from tests.support.step_recovery import DIES, OVERFLOWING
from tests.support.tiny_training import CPU, digest, engine, one_step, tiny, train

GOOD = StepVerdict(10, 20.0, 1.0, is_whole=True, is_finite=True, requests=Wishes())
OVERFLOW = StepVerdict(10, 20.0, math.inf, is_whole=True, is_finite=False, requests=Wishes())
NAN_LOSS = StepVerdict(10, math.nan, math.nan, is_whole=True, is_finite=False, requests=Wishes())


def _alone(**changes: Any) -> StepEngine:
    store = torch.distributed.HashStore()
    return engine(tiny(train__precision="fp16", **changes), 0, store)


def _take(scale: LossScale, verdict: StepVerdict) -> StepVerdict:
    scale.begin()
    return scale.settle(scale.judge(verdict))


def test_the_scale_halves_at_an_overflow_and_doubles_after_2000_good_steps() -> None:
    scale = LossScale(24, CPU, is_dynamic=True)
    skipped = _take(scale, OVERFLOW)
    assert skipped.is_skipped
    assert [skipped.loss_scale, skipped.mean_norm] == [2.0**16, 0.0]
    assert verdict_from_words(verdict_words(skipped)).is_skipped
    for _ in range(2000):
        assert _take(scale, GOOD).loss_scale == 2.0**15
    assert _take(scale, GOOD).loss_scale == 2.0**16


def test_nothing_is_skipped_at_the_smallest_scale_or_for_a_loss_that_is_not_finite() -> None:
    scale = LossScale(24, CPU, is_dynamic=True)
    assert not scale.judge(NAN_LOSS).can_be_applied
    scale.state()[0].tensor[0] = -15
    assert _take(scale, OVERFLOW).is_skipped
    assert not _take(scale, OVERFLOW).can_be_applied, "the scale is 1"


def test_other_precisions_have_no_scale() -> None:
    made = engine(tiny(train__precision="bf16"), 0, torch.distributed.HashStore())
    train(made, 1)
    assert made.loss_scale.state() == []
    assert made.loss_scale.factor == 1.0
    assert [v.loss_scale for _, v in made.history.applied_verdicts] == [0.0]


def test_the_state_is_that_of_the_table() -> None:
    made = _alone()
    table = run_state_table(tiny(train__precision="fp16"))
    assert [held.name for held in made.state()] == [row.name for row in table]
    assert table[-1] == LOSS_SCALE_ROW


def test_losses_and_norms_are_those_without_a_scale() -> None:
    plain = engine(tiny(train__precision="fp32"), 0, torch.distributed.HashStore())
    for one, other in zip(train(_alone(), 2), train(plain, 2), strict=True):
        assert one.mean_loss == pytest.approx(other.mean_loss, rel=1e-3)
        assert one.mean_norm == pytest.approx(other.mean_norm, rel=1e-2)


def test_a_lower_scale_changes_no_parameter_that_float16_can_hold() -> None:
    """Scales are powers of two, so only what leaves the dtype's range differs."""
    curves = []
    for exponent in (0, -1):
        made = _alone()
        made.loss_scale.state()[0].tensor[0] = exponent
        curves.append([v.mean_loss for v in train(made, 2)])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_overflows_change_nothing_until_the_scale_fits_and_then_the_run_learns() -> None:
    made = _alone()
    made.loss_scale.state()[0].tensor[0] = 8
    before = [held.tensor.clone() for held in made.state()[:-1]]
    verdicts = train(made, 2)
    assert all(v.is_skipped for v in verdicts)
    for old, held in zip(before, made.state(), strict=False):
        assert torch.equal(old, held.tensor)
    verdicts += train(made, 17, first=3)
    assert not verdicts[-1].is_skipped
    assert verdicts[-1].mean_loss < verdicts[0].mean_loss - 0.05


def test_a_nan_in_a_weight_is_named_as_in_other_precisions() -> None:
    made = _alone()
    row = [row.name for row in made.parameters.table].index("layers.0.ffn.gate.weight")
    made.parameters.master_tensors[row].view(-1)[0] = math.nan
    made.parameters.refresh()
    with pytest.raises(NonFiniteError) as caught:
        one_step(made, 1)
    assert caught.value.parameter == "layers.0.ffn.gate.weight"


def test_a_gradient_that_is_nan_at_every_scale_is_named_in_the_end() -> None:
    made = _alone()
    made.loss_scale.state()[0].tensor[0] = -15  # the scale is 2
    weight = list(made.objective.parameters())[3]
    weight.register_hook(lambda gradient: gradient * math.nan)
    assert one_step(made, 1).is_skipped
    with pytest.raises(NonFiniteError) as caught:
        one_step(made, 2)
    assert caught.value.parameter == made.parameters.table[3].name


def _overflows_once(rank: RankContext, name: str, at_rank: int) -> list[Any]:
    """One rank's part of the sum of step 2 is not finite: what every rank does and holds."""
    made = engine_for(rank, name)
    layout_step(made, 1)
    before = digest_of_weights(made)
    if rank.rank == at_rank:
        spoil_once(made._gradients.reducers[0])  # type: ignore[attr-defined]
    skipped = layout_step(made, 2)
    stayed = digest_of_weights(made) == before
    layout_step(made, 3)
    scales = [v.loss_scale for _, v in made.history.applied_verdicts]
    found = [skipped.is_skipped, stayed, scales, digest_of_weights(made) != before]
    made.close()
    return found


def digest_of_weights(made: StepEngine) -> int:
    return hash(tuple(held.tensor.numpy().tobytes() for held in made.state()[:-1]))


@pytest.mark.parametrize(
    ("name", "at_rank"),
    [("fp16.dp2", 1), *(in_campaign(f"fp16.{n}", 1) for n in ("pp2-tp2", "shard2-dp2", "tp2"))],
)
def test_an_overflow_on_one_rank_is_skipped_on_all(name: str, at_rank: int) -> None:
    found = rank_values(_overflows_once, case(name).world_size, {"name": name, "at_rank": at_rank})
    assert found == [[True, True, [2.0**16, 2.0**16, 2.0**15], True]] * case(name).world_size


def _curve(rank: RankContext) -> list[Any]:
    made = engine(tiny(train__precision="fp16"), rank.rank, rank.store(), replicas=rank.world_size)
    made.loss_scale.state()[0].tensor[0] = OVERFLOWING
    return [[v.mean_loss.hex(), v.norm.hex(), v.is_skipped] for v in train(made, 6)] + [
        digest(made)
    ]


@pytest.mark.slow
def test_bit_equal_for_any_number_of_replicas_with_skipped_steps() -> None:
    curves = [curve for replicas in (1, 2, 3) for curve in rank_values(_curve, replicas)]
    assert all(curve == curves[0] for curve in curves)
    assert [step[2] for step in curves[0][:3]] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("when", ["forward", "told 1", "voted", "applied"])
def test_a_rank_is_lost_in_a_step_that_is_skipped(when: str) -> None:
    found = survivors("fp16.dp3", 2, when, "fp16.dp2", [0, 1])
    (alone,) = undisturbed("fp16.one")
    assert alone["curve"][str(DIES)][1] == 0, "it is skipped"
    for value in found:
        assert value["curve"] == alone["curve"]  # bit by bit
        assert value["digest"] == alone["digest"]
    check_reports(found, alone["curve"], when)
