"""Rules of train.stop: which steps end a run, with which sentence."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.config.sections.objective import KINDS, ObjectiveConfig
from holdfast.config.sections.train import METRICS, StopRuleConfig
from holdfast.policy.detection.stop_rules import StopRule, StopRules


def first_stop(rule: StopRule, values: list[float]) -> tuple[int, str] | None:
    rules = StopRules([rule])
    for step, value in enumerate(values, start=1):
        if decision := rules.add(step, {"loss": 1.0, rule.metric: value}):
            return step, decision.sentence
    return None


@pytest.mark.parametrize(
    ("rule", "values", "step", "said"),
    [
        (StopRule("loss", 2, below=1.0), [3, 0.5, 1.0, 0.9], 3, "loss is 0.75 in the mean of 2"),
        (StopRule("kl", 1, above=2.0), [1, 2, 2.5], 3, "kl is 2.5 in the mean of 1 steps, above 2"),
        (StopRule("reward", 2, falls=0.5), [0, 1, 1, 0.6, 0.3], 5, "below its best mean 1"),
        (StopRule("reward", 3, falls=0.5), [1, 0, 1, 0], None, ""),
        (StopRule("reward", 3, below=0.5), [0, 0], None, ""),
    ],
)
def test_a_rule_ends_the_run_at_its_step(
    rule: StopRule, values: list[float], step: int | None, said: str
) -> None:
    found = first_stop(rule, values)
    assert (found and found[0]) == step
    assert said in (found[1] if found else "")


def test_steps_that_are_done_again_count_once_and_other_metrics_do_not() -> None:
    rules = StopRules([StopRule("reward", 3, below=0.5)])
    for step in (1, 2, 1, 2):
        assert rules.add(step, {"reward": 0.0}) is None
    assert rules.add(3, {"loss": 0.0}) is None
    decision = rules.add(4, {"reward": 0.0})
    assert decision is not None
    assert (decision.rule, decision.is_failure) == (0, False)


def test_the_metrics_that_a_rule_may_name_are_those_that_objectives_report() -> None:
    from holdfast.training.objectives.registry import make_objective

    reported = {"loss", "grad_norm"}
    for kind in KINDS:
        keys = {"kind": kind} | ({"teacher": "folder"} if kind == "distill" else {})
        objective = make_objective(ObjectiveConfig.model_validate(keys))
        reported |= set(objective.names) if objective is not None else set()
    assert set(METRICS) == reported


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"metric": "rewrad", "below": 1}, "use reward"),
        ({"metric": "reward"}, "a rule has no limit"),
        ({"metric": "reward", "below": 1, "falls": 1}, "a rule has below and falls"),
    ],
)
def test_a_rule_that_cannot_end_anything_is_refused(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        StopRuleConfig(**rule)
    assert StopRuleConfig(falls=0.1).is_failure
    assert not StopRuleConfig(below=0.1).is_failure
