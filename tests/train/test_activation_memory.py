"""Activations that are kept for the backward pass: counted exactly, and as the formulas say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.plan.activations import activations_of, has_formula
from holdfast.train.activation_meter import ActivationMeter
from tests.support.layouts import VOCABULARY, case, config_of, engine_of
from tests.support.layouts import topology_of as place
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import feed

POLICIES = ("none", "selective", "full")
WITHIN = 0.05


def _measured(
    rank: RankContext, name: str, policies: Sequence[str], size: int
) -> dict[str, tuple[int, int, int]]:
    """(counted, by the formulas, left after the step) of this rank, for each policy."""
    found = {}
    for policy in policies:
        of = case(name)
        changes = {"train__recompute": policy, "train__batch_size": 4 * size}
        wide = {"model__dim": 32, "model__ffn_dim": 88}
        config = config_of({**of.changes, **changes, **wide, "train__microbatch_size": size})
        assert has_formula(config)
        topology = place(of, config)
        made = engine_of(config, topology, rank.rank, rank.store(policy))
        _step(made, 1, size, config.data.sequence_length)
        meter = ActivationMeter(made.objective)
        _step(made, 2, size, config.data.sequence_length)
        said = activations_of(config, topology, made.groups.coordinate).total
        found[policy] = (meter.peak, said, meter.live_bytes())
        meter.close()
        made.close()
    return found


def _step(made: Any, step: int, size: int, length: int) -> None:
    shard, shards = made.groups.coordinate.dp_shard, made.groups.degree("dp_shard")
    share = made.begin(step)
    made.compute([feed(step, j, size, shard, shards, VOCABULARY, length) for j in share])
    made.apply(made.reduce())


LAYOUTS = [
    ("fp32.pp2", 4),
    ("ring.fp32.cp2", 4),
    *(
        in_campaign(name, size)
        for name, size in (
            ("one", 4),
            ("fp32.one", 8),
            ("bf16.one", 4),
            ("fp32.qknorm.one", 2),
            ("fp32.tp2", 4),
            ("plain.fp32.tp2", 4),
            ("fp32.tp4", 4),
            ("fp32.pp4", 4),
            ("gpipe.fp32.pp2", 4),
            ("fp32.pp2-tp2", 4),
            ("bf16.pp2", 4),
            ("zero1.2", 4),
            ("fp32.cp2", 4),
            ("heads.ulysses.fp32.cp2", 4),
            ("long.fp32.cp4", 4),
            ("long.ring.fp32.pp2-cp2", 4),
        )
    ),
]


@pytest.mark.parametrize(("name", "size"), LAYOUTS)
def test_the_peak_is_as_the_formulas_say(name: str, size: int) -> None:
    arguments = {"name": name, "policies": POLICIES, "size": size}
    for rank, value in enumerate(
        rank_values(_measured, case(name).world_size, arguments, deadline=240)
    ):
        for policy, (counted, said, _) in value.items():
            assert abs(said - counted) <= WITHIN * counted, (rank, policy, said, counted)
        none, selective, full = (value[policy][0] for policy in POLICIES)
        assert full < selective < none
