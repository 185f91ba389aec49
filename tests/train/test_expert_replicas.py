"""`layout.expert_replicas auto`: copies of hot experts keep the curve, and even out the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.expert_parallel import routed_layers
from holdfast.parallel.process_groups import connect
from holdfast.train.build import build_engine
from holdfast.train.engine import StepEngine
from tests.support.layouts import (
    assert_all_state,
    case,
    config_of,
    load_pieces,
    one_step,
    pieces,
    save_pieces,
    topology_of,
)
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import CPU
from tests.train.test_parity import LEAST_MARGIN, choice_margins

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
    of = case(name)
    config = config_of({**of.changes, "train__steps": steps})
    traffic, topology = TrafficCounter(), topology_of(of, config)
    groups = connect(
        topology, rank.rank, rank.store(), CPU, seconds=60.0, traffic=traffic, ep=config.layout.ep
    )
    made = build_engine(config, groups, CPU)
    made.initialise(config.seed)
    skew(made)
    margins = choice_margins(made.objective)
    verdicts = [one_step(made, step) for step in range(1, steps + 1)]
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces(made))
    layers = routed_layers(made.objective.decoder)  # type: ignore[arg-type, union-attr]
    out = {
        "losses": [verdict.mean_loss for verdict in verdicts],
        "norms": [verdict.mean_norm for verdict in verdicts],
        "margin": min(margins),
        "loads": [layer.take_load() for layer in layers],
        "sent": traffic.bytes_by_kind.get("ep", 0),
        "pp": groups.coordinate.pp,
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
                "ep2.shard2",
                "ep4.shard4",
                "ep2.shard4",
                "ep2.zero2.2",
                "ep2.shard2-tp2",
                "ep2.pp2-shard2",
                "ep2.shard2-dp2",
                "full.ep4.shard4",
            )
        ),
    ],
)
def test_copies_keep_the_curve_and_even_out_the_load(
    name: str, steps: int, tmp_path: Path
) -> None:
    alone = tmp_path / "one"
    alone.mkdir()
    (one,) = rank_values(body, 1, {"name": "shallow.sigmoid.one", "steps": steps}, folder=alone)
    whole = {name: values for name, _, values in load_pieces(alone / "0.npz")}
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
            before, after, copies = zip(*of_block, strict=True)
            assert sum(before) == sum(after)
            assert sum(copies) > 0
            assert max(after) < 0.8 * max(before)
