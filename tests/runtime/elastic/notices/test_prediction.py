"""Alarms of a predictor in an agent: what is saved when, and how false alarms end it."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest

from holdfast.elastic.notices.prediction import PredictionWatch, load_prediction_watch
from holdfast.errors import ConfigError, DataError
from holdfast.policy.prediction.models import BaseRateModel, LastEventModel
from holdfast.policy.prediction.predictor import FittedModels, ModelVerdict
from holdfast.policy.prediction.response import ResponsePrices

PRICES = ResponsePrices(save_s=0.1, save_every_s=50.0, recovery_s=5.0)


def watch_of(model: BaseRateModel | LastEventModel, horizon: float = 100.0) -> PredictionWatch:
    verdict = ModelVerdict(0.3, 0.5, 0.5, 0.5)
    fit = FittedModels(
        horizon, (horizon,), 10 * horizon, (model,), None, model.name, {model.name: verdict}, ()
    )
    return PredictionWatch(fit, "a")


def test_after_a_loss_this_nodes_part_is_saved_again_and_again_until_the_horizon_ends() -> None:
    watch = watch_of(LastEventModel(100.0, -log(0.4) / 100, 1e-6))
    watch.observe_nodes({"a", "b", "c"}, 0.0)
    assert watch.check(10.0, PRICES) is None
    watch.observe_nodes({"a", "b"}, 20.0)
    first = watch.check(20.0, PRICES)
    assert first is not None
    assert (first.is_first, first.left_s) == (True, 100.0)
    assert watch.check(20.5, PRICES) is None
    later = watch.check(30.0, PRICES)
    assert later is not None
    assert (later.is_first, later.left_s) == (False, 90.0)
    assert watch.check(121.0, PRICES) is None
    # Alarms about a and b ended; neither was lost.
    assert (watch.policy.record.alarms, watch.policy.record.came_true) == (2, 0)


def test_alarms_about_other_nodes_count_and_lead_to_nothing_here() -> None:
    watch = watch_of(BaseRateModel(-log(0.4) / 100))
    watch.observe_nodes({"b"}, 0.0)  # the node of this agent takes no part yet
    assert watch.check(1.0, PRICES) is None
    watch.observe_nodes(set(), 50.0)
    assert (watch.policy.record.alarms, watch.policy.record.came_true) == (1, 1)


def test_false_alarms_switch_it_off() -> None:
    watch = watch_of(BaseRateModel(-log(0.4) / 100))
    dear = ResponsePrices(save_s=1.0, save_every_s=50.0, recovery_s=5.0)
    watch.observe_nodes({"a"}, 0.0)
    saves = [watch.check(now, dear) is not None for now in range(0, 3000, 5)]
    assert any(saves[:20])
    assert not any(saves[-300:])


def test_a_file_that_is_no_fit_is_refused(tmp_path: Path) -> None:
    assert load_prediction_watch("", "a") is None
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prediction_watch(str(tmp_path / "none.json"), "a")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="no fit"):
        load_prediction_watch(str(tmp_path / "bad.json"), "a")
