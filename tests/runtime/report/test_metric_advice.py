"""Metrics of an objective in the report: means of the newest steps, and advice outside ranges."""

from __future__ import annotations

import pytest

from holdfast.report.ledger.metric_advice import HEALTHY, advise, summarise_metrics
from holdfast.training.objectives.registry import OBJECTIVES


@pytest.mark.parametrize(
    ("name", "mean", "said"),
    [
        ("frac_reward_zero_std", 0.79, ""),
        ("frac_reward_zero_std", 0.9, "above 0.8: most groups have one reward"),
        ("entropy", 0.01, "below 0.05"),
        ("entropy", 0.3, ""),
        ("entropy", 2.0, "above 0.5"),
        ("kl", 0.6, "raise objective.beta"),
        ("completions/clipped_ratio", 0.9, "rollout.max_tokens"),
        ("reward", -5.0, ""),
    ],
)
def test_advice_is_given_outside_the_healthy_range(name: str, mean: float, said: str) -> None:
    found = advise(name, mean)
    assert said in found
    assert bool(said) == bool(found)


def test_advice_is_about_metrics_that_exist_and_the_newest_steps() -> None:
    from holdfast.config.sections.train import METRICS

    assert {*HEALTHY} <= {*METRICS}
    assert "grpo" in OBJECTIVES
    steps = [{"kl": 0.0, "reward": 0.0}] * 30 + [{"kl": 3.0}] * 20
    kl, reward = summarise_metrics(steps)
    assert (kl.first, kl.last, reward.last) == (0.0, 3.0, 0.0)
    assert "above 0.5" in kl.advice
    assert reward.advice == ""
