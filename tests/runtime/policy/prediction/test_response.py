"""What an alarm leads to: by its chance, by the prices, and by the alarms before it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, inf

import pytest

from holdfast.errors import DataError
from holdfast.policy.prediction.bilstm import SIGNALS_PER_BIN, window_of
from holdfast.policy.prediction.history import ClusterHistory, NodeChange
from holdfast.policy.prediction.models import (
    BaseRateModel,
    HazardModel,
    LastEventModel,
    SmoothingModel,
    rescale,
)
from holdfast.policy.prediction.predictor import FittedModels, ModelVerdict, NodePredictor
from holdfast.policy.prediction.response import ResponsePolicy, ResponsePrices, TrackRecord

CHEAP = ResponsePrices(save_s=0.1, save_every_s=600.0, recovery_s=60.0)
POLICY = ResponsePolicy(600.0, 0.1)


def test_a_cheap_save_is_worth_a_false_alarm() -> None:
    found = POLICY.decide(0.5, CHEAP)
    assert found.action == "save"
    assert found.every_s == pytest.approx((2 * 0.1 * 600 / 0.5) ** 0.5)
    assert 0 < found.false_alarm_s < found.gain_s
    assert found.gain_s < 0.5 * 600 / 2  # no more than the work that is at stake


@pytest.mark.parametrize(
    ("chance", "prices"),
    [
        (0.05, CHEAP),  # below the threshold
        (0.5, ResponsePrices(60.0, 120.0, 60.0)),  # a save costs too much
        (0.5, ResponsePrices(0.1, 2.0, 60.0)),  # it is saved often enough anyway
    ],
)
def test_what_does_not_pay_is_not_done(chance: float, prices: ResponsePrices) -> None:
    assert POLICY.decide(chance, prices).action == "nothing"


def test_a_sure_loss_is_moved_from_if_another_node_can_take_over() -> None:
    prices = ResponsePrices(0.1, 600.0, 60.0, move_s=5.0)
    assert POLICY.decide(0.95, prices).action == "move"
    assert POLICY.decide(0.11, ResponsePrices(0.1, 600.0, 60.0, move_s=30.0)).action == "save"
    assert POLICY.decide(0.95, ResponsePrices(0.1, 600.0, 60.0, move_s=inf)).action == "save"


def test_false_alarms_switch_it_off_and_true_ones_on_again() -> None:
    prices, policy = ResponsePrices(20.0, 600.0, 60.0), POLICY
    assert policy.decide(0.4, prices).action == "save"
    for _ in range(20):
        policy = policy.with_outcome(0.4, was_lost=False)
    off = policy.decide(0.4, prices)
    assert off.action == "nothing"
    assert "0 of 20 alarms came true" in off.reason
    for _ in range(40):
        policy = policy.with_outcome(0.4, was_lost=True)
    assert policy.decide(0.4, prices).action == "save"


def test_the_record_scales_the_chances_within_bounds() -> None:
    assert TrackRecord().scale == 1.0
    assert TrackRecord(100, 10.0, 90).scale == 2.0
    assert TrackRecord(100, 97.0, 0).scale == pytest.approx(0.03)
    assert TrackRecord(4, 2.0, 1).precision == 0.25


# --- the history of nodes, the models that read it, and the file of a fit -------------------------
JOINS = [NodeChange(0.0, "join", name, "z") for name in "abcd"]


def history(*changes: NodeChange) -> ClusterHistory:
    return ClusterHistory((100.0,), 1000.0).update([*JOINS, *changes])


def fitted(*models: BaseRateModel | LastEventModel) -> FittedModels:
    verdict = ModelVerdict(0.5, 1.0, 0.5, 0.7)
    names = [model.name for model in models]
    return FittedModels(
        60.0, (100.0,), 1000.0, models, None, names[-1], dict.fromkeys(names, verdict), ()
    )


def test_exposure_and_losses_are_forgotten_with_the_half_life() -> None:
    known = history(NodeChange(100.0, "lost", "a", "z"))
    found = known.signals("b", 200.0)
    assert found is not None
    # One loss, a half-life ago. Of 100 s, an exposure with that half-life keeps 72.1 s.
    assert found.zone_count.losses[0] == pytest.approx(0.5)
    one = 100 / 0.693147 * (1 - 0.5)
    assert found.zone_count.exposure_s[0] == pytest.approx(4 * one * 0.5 + 3 * one, rel=1e-5)
    assert (found.age_s, found.zone_up, found.since_zone_loss_s) == (200.0, 3, 100.0)


def test_a_node_that_left_is_no_loss_and_a_lost_one_is_not_asked_about() -> None:
    left = history(NodeChange(50.0, "left", "a", "z"))
    found = left.signals("b", 60.0)
    assert found is not None
    assert found.zone_count.losses == (0.0,)
    assert found.since_zone_loss_s is None
    assert left.signals("a", 60.0) is None
    assert left.signals("unknown", 60.0) is None


def test_a_node_that_fails_and_returns_keeps_its_past_and_begins_a_new_age() -> None:
    known = history(NodeChange(100.0, "lost", "a", "z"), NodeChange(150.0, "join", "a", "z"))
    found = known.signals("a", 200.0)
    assert found is not None
    assert (found.age_s, found.since_node_loss_s) == (50.0, 100.0)
    assert found.node.losses[0] == pytest.approx(0.5)


def test_the_chance_of_a_hazard_crosses_the_ages() -> None:
    model = HazardModel((0.0, 100.0), {"": (0.001, 0.1), "z": (0.001, 0.01)})
    found = history().signals("a", 90.0)
    assert found is not None
    assert model.probability(found, 20.0) == pytest.approx(1 - exp(-10 * 0.001 - 10 * 0.01))
    elsewhere = found._replace(zone="another")
    assert model.probability(elsewhere, 20.0) == pytest.approx(1 - exp(-10 * 0.001 - 10 * 0.1))


def test_smoothing_rises_with_losses_of_the_zone_and_of_the_node() -> None:
    quiet = history().signals("b", 200.0)
    burst = history(*(NodeChange(190.0, "lost", name, "z") for name in "cd")).signals("b", 200.0)
    lemon = history(NodeChange(100.0, "lost", "b", "z"), NodeChange(110.0, "join", "b", "z"))
    zone = SmoothingModel(0, 0, 1e-3, 1.0, inf)
    both = SmoothingModel(0, 0, 1e-3, 1.0, 0.3)
    assert quiet is not None
    assert burst is not None
    assert zone.probability(burst, 60.0) > 1.5 * zone.probability(quiet, 60.0)
    own, other = (lemon.signals(name, 200.0) for name in "bc")
    assert own is not None
    assert other is not None
    assert both.probability(own, 60.0) > 1.5 * both.probability(other, 60.0)


def test_the_predictor_is_a_value_and_follows_the_changes() -> None:
    fit = fitted(LastEventModel(60.0, 0.1, 0.001))
    first = NodePredictor.of(fit).update_all(JOINS)
    second = first.update(NodeChange(100.0, "lost", "a", "z"))
    quiet, warned = (p.probability("b", 60.0, 110.0) for p in (first, second))
    assert quiet == pytest.approx(1 - exp(-0.06))
    assert warned == pytest.approx(1 - exp(-6.0))
    assert second.probability("a", 60.0, 110.0) == 0.0
    # Half the horizon at the same hazard.
    assert first.probability("b", 30.0, 110.0) == pytest.approx(1 - exp(-0.03))
    assert rescale(0.19, 60.0, 30.0) == pytest.approx(0.1)


def test_the_window_shows_bursts_oldest_first() -> None:
    known = history(NodeChange(95.0, "lost", "a", "z"), NodeChange(95.0, "lost", "c", "z"))
    window = window_of(known, "b", 100.0, 10.0, 12)
    assert window is not None
    assert {len(row) for row in window} == {SIGNALS_PER_BIN}
    assert window[-1][0] == 0.5  # two of four were lost in the last bin
    assert [row[0] for row in window[:-1]] == [0.0] * 11
    assert (window[-2][2], window[-1][2]) == (1.0, 0.5)
    assert window_of(known, "a", 100.0, 10.0, 12) is None


def test_the_file_of_a_fit_reads_as_it_was_written() -> None:
    fit = fitted(BaseRateModel(0.01), LastEventModel(60.0, 0.1, 0.001))
    text = json.dumps(fit.to_json())
    assert FittedModels.from_text(text, "f") == fit
    for spoilt in ("{}", "[", text.replace('"base rate"', '"magic"'), text.replace("0.01", '"x"')):
        with pytest.raises(DataError, match="no fit of a predictor"):
            FittedModels.from_text(spoilt, "f")
    broken = replace(fit, chosen="unknown")
    with pytest.raises(DataError, match="not among the models"):
        FittedModels.from_text(json.dumps(broken.to_json()), "f")
