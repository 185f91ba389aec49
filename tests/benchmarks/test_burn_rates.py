"""Rules of objectives: each fires in a total outage, clears in time, and never at the budget."""

from __future__ import annotations

import shutil

import pytest
from benchmarks.lab.burn_rates import (
    PERIODS,
    PYRRA,
    STEPS_S,
    TARGETS,
    every_rule,
    run_promtool,
    simulate,
)

from holdfast.report.alerts.objectives import WANTED, burn_rules


@pytest.mark.parametrize("step_s", STEPS_S)
def test_every_rule_fires_clears_and_is_silent_at_the_budget(step_s: float) -> None:
    for target, period, rule in every_rule(step_s):
        found, name = simulate(rule, step_s), f"{target} {period} {rule}"
        assert found.fires_s is not None, name
        assert found.fires_s <= rule.outage_s + step_s + 15, name
        assert found.clears_s is not None, name
        assert found.clears_s <= 2 * rule.short_s, name
        assert not found.fires_at_budget, name


def test_every_target_has_a_page_and_no_rule_that_cannot_fire() -> None:
    for target in TARGETS:
        for hours in PERIODS.values():
            rules, missing = burn_rules(target, 3600.0 * hours)
            assert "page" in {rule.severity for rule in rules}
            assert all(rule.threshold < 1 for rule in rules)
            impossible = [one for one in WANTED if one.factor * (1 - target) >= 1]
            assert len([text for text in missing if "at most 1" in text]) == len(impossible)


def test_long_steps_make_windows_longer_or_leave_a_rule_out() -> None:
    short, _ = burn_rules(0.99, 6 * 3600.0)
    long, missing = burn_rules(0.99, 6 * 3600.0, step_s=600.0)
    assert any("longer than the period" in text for text in missing)
    assert min(rule.long_s for rule in long) > max(rule.long_s for rule in short)


def test_other_generators_have_rules_that_cannot_fire() -> None:
    assert PYRRA["critical"][0] * (1 - 0.9) > 1


def test_prometheus_agrees_with_the_simulation() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool in PATH: apt install prometheus")
    assert run_promtool((0.5, 0.99), ("6h",)) == []
