"""What an alarm leads to: by its chance, by the prices, and by the alarms before it."""

from __future__ import annotations

from math import inf

import pytest

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
