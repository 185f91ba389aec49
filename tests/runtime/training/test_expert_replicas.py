"""`layout.expert_replicas auto`: copies of hot experts keep the curve, and even out the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.options.expert_copies.apply import plan_dispatch
from holdfast.options.expert_copies.cost import copy_bytes
from holdfast.parallel.axes.expert_parallel import routed_layers
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.training.engine.engine import StepEngine
from tests.runtime.training.test_parity import LEAST_MARGIN, choice_margins
from tests.support.layouts import (
    assert_all_state,
    case,
    config_of,
    curve_of,
    engine_for,
    load_complete,
    pieces,
    save_pieces,
)
from tests.support.ranks import RankContext, rank_values

BYTES = 8  # of a float64


def skew(made: StepEngine) -> None:
    """Let most tokens of every block take expert 0, and some expert 1."""
    held = made.parameters
    for row, box, tensor in zip(held.table, held.boxes, held.master_tensors, strict=True):
        if row.name.endswith("router.choice_bias"):
            for place in range(tensor.shape[0]):
                tensor[place] = {0: 0.8, 1: 0.1}.get(box.offsets[0] + place, 0.0)
    held.refresh()


def body(rank: RankContext, name: str, steps: int) -> dict[str, Any]:
    """Train with a skewed router under a layout; what remains goes into the folder."""
    config = config_of({**case(name).changes, "train__steps": steps})
    traffic = TrafficCounter()
    made = engine_for(rank, name, config, traffic=traffic)
    skew(made)
    margins, chosen = choice_margins(made.objective), list[list[int]]()
    layers = routed_layers(made.objective.decoder)  # type: ignore[arg-type, union-attr]
    for layer in layers:
        layer.router.register_forward_hook(lambda _, x, found: chosen.append(found.counts.tolist()))
    found = curve_of(made, steps)
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces(made))
    out = {
        **found,
        "margin": min(margins),
        "loads": [layer.take_load() for layer in layers],
        "chosen": chosen,
        "sent": traffic.bytes_by_kind.get("ep", 0),
        "pp": made.groups.coordinate.pp,
    }
    made.close()
    return out


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("ep2.shard2", 4),
        *(
            pytest.param(name, 20, marks=pytest.mark.slow)
            for name in (
                *("ep2.shard2", "ep4.shard4", "ep2.shard4", "ep2.zero2.2", "ep2.shard2-tp2"),
                *("ep2.pp2-shard2", "ep2.shard2-dp2", "full.ep4.shard4", "ep2.cp2"),
                *("ep4.shard2-cp2",),
            )
        ),
    ],
)
def test_copies_keep_the_curve_and_even_out_the_load(name: str, steps: int, tmp_path: Path) -> None:
    alone = tmp_path / "one"
    alone.mkdir()
    (one,) = rank_values(body, 1, {"name": "shallow.sigmoid.one", "steps": steps}, folder=alone)
    whole = load_complete(alone / "0.npz")
    name, size = f"shallow.sigmoid.copies.{name}", case(f"sigmoid.{name}").world_size
    found = rank_values(body, size, {"name": name, "steps": steps}, folder=tmp_path, deadline=240)
    for value in found:
        np.testing.assert_allclose(value["losses"], one["losses"], rtol=1e-10, atol=0)
        np.testing.assert_allclose(value["norms"], one["norms"], rtol=1e-10, atol=0)
        assert value["margin"] > LEAST_MARGIN
    assert_all_state(whole, [tmp_path / f"{rank}.npz" for rank in range(size)], 1e-10)
    for stage in {value["pp"] for value in found}:
        ranks = [value["loads"] for value in found if value["pp"] == stage]
        for of_block in zip(*ranks, strict=True):
            _, before, after, copies = zip(*of_block, strict=True)
            assert sum(before) == sum(after)
            assert sum(copies) > 0
            assert max(after) < 0.8 * max(before)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 2e-3)])
def test_copies_keep_the_curve_in_lower_precision(precision: str, tolerance: float) -> None:
    """In bf16 a rank computes its own experts by grouped products, and its copy apart from them."""
    without, found = (
        rank_values(body, 2, {"name": f"wider.sigmoid.{precision}.{copies}ep2.shard2", "steps": 8})
        for copies in ("", "copies.")
    )
    for one, other in zip(without, found, strict=True):
        np.testing.assert_allclose(other["losses"], one["losses"], rtol=tolerance, atol=0)
        assert not any(one["loads"])
    assert sum(copies for value in found for *_, copies in value["loads"]) > 0


@pytest.mark.slow
def test_a_copy_costs_what_the_formula_says_ep2() -> None:
    """The formulas of `layout show`, and the rows that travel."""
    name = "shallow.sigmoid.copies.ep2.shard2"
    config = config_of(case(name).changes)
    found = rank_values(body, 2, {"name": name, "steps": 3})
    for me, other in ((0, 1), (1, 0)):
        sent = 0
        for mine, theirs in zip(found[me]["chosen"], found[other]["chosen"], strict=True):
            counts = [mine, theirs] if me == 0 else [theirs, mine]
            plan = plan_dispatch(counts, me)
            rows = plan.sent[other] + sum(plan.came[other])
            copies = len(plan.lent) + (plan.lender is not None)
            sent += 2 * rows * config.model.dim * BYTES + copies * copy_bytes(config, 1)
            sent += 8 * len(mine)
        assert found[me]["sent"] == pytest.approx(sent, rel=0.02)
        assert sum(copies for *_, copies in found[me]["loads"]) == sum(
            plan_dispatch([a, b], me).lender is not None
            for a, b in zip(found[0]["chosen"], found[1]["chosen"], strict=True)
        )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_with_copies_are_bit_equal(replicas: int) -> None:
    """Every rank ends with the bits that a single replica has."""
    alone, several = (
        rank_values(
            curve,
            2 * count,
            {"name": f"shallow.sigmoid.copies.ep2.shard2-dp{count}", "steps": 4},
            deadline=240,
        )
        for count in (1, replicas)
    )
    for rank, value in enumerate(several):
        assert value == alone[rank % 2]


def curve(rank: RankContext, name: str, steps: int) -> list[Any]:
    """What must be the same to the bit."""
    found = body(rank, name, steps)
    return [*found["losses"], *found["norms"], found["digest"]]
