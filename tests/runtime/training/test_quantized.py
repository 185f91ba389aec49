"""Shards that send each other codes of few bits (`layout.quantized`), in complete steps."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.options.quantized.keys import OptionKeys
from tests.runtime.training.test_recover import survivors
from tests.support.layouts import case, train_layout
from tests.support.ranks import rank_values
from tests.support.step_recovery import undisturbed

STEPS = 4


def _run(layout: str) -> list[dict[str, Any]]:
    arguments = {"name": f"shallow.wider.{layout}", "steps": STEPS}
    return rank_values(train_layout, case(layout).world_size, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["qweights", "qgradients", "qboth"])
@pytest.mark.parametrize("zero", ["shard2", "zero2.2"])
def test_another_curve_near_the_exact_one(which: str, zero: str) -> None:
    exact, found = _run(f"fp32.{zero}")[0], _run(f"{which}.fp32.{zero}")[0]
    assert found["losses"][1:] != exact["losses"][1:]
    assert found["losses"] == pytest.approx(exact["losses"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replicas_change_no_bit(precision: str) -> None:
    """One replica and two have one curve, and all ranks of a place one state."""
    one, two = (_run(f"qboth.{precision}.{name}") for name in ("shard2", "dp2-shard2"))
    assert [found["losses"] for found in two] == [one[0]["losses"]] * 4
    assert {found["digest"] for found in two} == {found["digest"] for found in one}


@pytest.mark.slow
def test_one_of_two_replicas_is_killed() -> None:
    found = survivors("qboth.fp32.dp2-shard2", 3, "voted", "qboth.fp32.shard2", [0, 1])
    alone = undisturbed("qboth.fp32.shard2")[0]
    for value in found:
        assert value["curve"] == alone["curve"]


def test_the_start_says_what_is_given_up() -> None:
    of_shards = {"layout": {"dp_shard": 2, "quantized": "both"}}
    (line,) = OptionKeys().notices(RunConfig.model_validate(of_shards).layout)
    assert line.startswith("layout.quantized both: ")
    assert "another layout gives another curve" in line
    assert not list(OptionKeys().notices(RunConfig.model_validate({}).layout))


@pytest.mark.parametrize("layout", [{}, {"dp_shard": 2, "zero": 1}, {"tp": 2}])
def test_a_layout_without_shards_is_refused(layout: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"use layout\.quantized: none"):
        RunConfig.model_validate({"layout": {"quantized": "weights", **layout}})


def test_what_was_not_tried_with_experts_is_refused() -> None:
    sizes = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 128}
    given = {
        "model": {"preset": None, "experts": {"count": 4}, **sizes},
        "layout": {"dp_shard": 2, "ep": 2, "quantized": "both"},
        "train": {"precision": "bf16"},
    }
    with pytest.raises(ValueError, match=r"layout\.ep 2: use layout\.quantized: none"):
        RunConfig.model_validate(given)
    exact = {"layout": {"dp_shard": 2}, "train": {"precision": "fp8"}}
    with pytest.raises(ValueError, match=r"model\.experts: use train\.precision bf16"):
        RunConfig.model_validate(given | exact)
