"""Activations that are kept for the backward pass: counted exactly, and as the formulas say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from benchmarks.runtime.activation_meter import ActivationMeter

from holdfast.config.run import RunConfig
from holdfast.layout import Coordinate, Topology
from holdfast.plan.memory.activations import RankShape, activations_of, has_formula
from tests.support.layouts import RECOMPUTE, VOCABULARY, case, config_of, engine_of
from tests.support.layouts import topology_of as place
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import feed

POLICIES = ("none", "selective", "full")
KEPT = ("none", "attention", "activation", "most", "full")
CUT = ("none", "full", "cut", "selective", "cut-most")
STAGED = ("none", "staged", "unstaged")
WITHIN = 0.05


def _measured(
    rank: RankContext, name: str, policies: Sequence[str], size: int
) -> dict[str, tuple[int, int, int]]:
    """(counted, by the formulas, what may be counted too) of this rank, for each policy."""
    found = {}
    for policy in policies:
        of = case(name)
        changes = {**RECOMPUTE[policy], "train__batch_size": 4 * size}
        wide = {"model__dim": 32, "model__ffn_dim": 88}
        config = config_of({**of.changes, **changes, **wide, "train__microbatch_size": size})
        assert has_formula(config)
        topology = place(of, config)
        made = engine_of(config, topology, rank.rank, rank.store(policy))
        _step(made, 1, size, config.data.sequence_length)
        meter = ActivationMeter(made.objective)
        _step(made, 2, size, config.data.sequence_length)
        meter.peak = 0  # what one step's messages leave to the next is noted from here on
        _step(made, 3, size, config.data.sequence_length)
        at = made.groups.coordinate
        said = activations_of(config, topology, at).total
        found[policy] = (meter.peak, said, _late_sum(config, topology, at))
        meter.close()
        made.close()
    return found


def _late_sum(config: RunConfig, topology: Topology, at: Coordinate) -> int:
    """Bytes of a block's sum over tp. When the pass ends, each of gloo's two threads may not have
    dropped the last one that it made."""
    replica = topology.replicas[at.replica]
    if config.layout.sequence_parallel or replica.degree("tp") == 1:
        return 0
    shape = RankShape.of(config, replica, at)
    return shape.item * shape.stream_tokens * config.model.dim


def _step(made: Any, step: int, size: int, length: int) -> None:
    shard, shards = made.groups.coordinate.dp_shard, made.groups.degree("dp_shard")
    share = made.begin(step)
    made.compute([feed(step, j, size, shard, shards, VOCABULARY, length) for j in share])
    made.apply(made.reduce())


EACH_POLICY = (
    *("one", "bf16.one", "fp32.tp2", "plain.fp32.tp2", "fp32.tp4", "att2.fp32.tp4"),
    *("att2ffn1.fp32.tp4", "att1ffn1.bf16.tp2", "plain.att1ffn1.fp32.tp2"),
    *("att2ffn2.fp32.pp2-tp4", "fp32.pp4", "gpipe.fp32.pp2", "fp32.pp2-tp2", "bf16.pp2"),
    *("zero1.2", "fp32.cp2", "ring.fp32.cp2", "heads.ulysses.fp32.cp2", "long.fp32.cp4"),
    *("long.ring.fp32.pp2-cp2", "interleaved.fp32.pp2", "eight.interleaved.bf16.pp4"),
)
EXPERTS = (
    *("experts.fp32.one", "experts.bf16.one", "experts.fp32.tp2", "experts.fp32.pp2"),
    *("experts.interleaved.fp32.pp2", "experts.ep2.fp32.shard2", "sigmoid.fp32.one"),
)
WITH_CUT = ("plain.fp32.tp2", "plain.fp32.tp4", "plain.bf16.tp2")
WITH_CUT += ("plain.fp32.pp2-tp2", "plain.bf16.pp2-tp2")
LAYOUTS = [
    ("fp32.pp2", 4, POLICIES),
    ("ring.fp32.cp2", 4, ("none", "full")),
    ("plain.fp32.tp2", 4, ("none", "cut")),
    in_campaign("fp32.one", 8, POLICIES),
    in_campaign("fp32.qknorm.one", 2, POLICIES),
    in_campaign("qknorm.att1.fp32.tp2", 3, POLICIES),
    *(in_campaign(name, 4, POLICIES) for name in EACH_POLICY),
    *(in_campaign(name, 4, ("none", "full")) for name in EXPERTS),
    *(in_campaign(n, 4, KEPT) for n in ("fp32.one", "bf16.one", "fp32.tp2", "fp32.pp2", "zero1.2")),
    *(in_campaign(name, 4, CUT) for name in WITH_CUT),
    *(
        in_campaign(n, 4, STAGED)
        for n in ("fp32.pp2", "bf16.pp2", "gpipe.fp32.pp2", "fp32.pp2-tp2")
    ),
]


@pytest.mark.parametrize(("name", "size", "policies"), LAYOUTS)
def test_the_peak_is_as_the_formulas_say(name: str, size: int, policies: Sequence[str]) -> None:
    arguments = {"name": name, "policies": policies, "size": size}
    for rank, value in enumerate(
        rank_values(_measured, case(name).world_size, arguments, deadline=240)
    ):
        for policy, (counted, said, late) in value.items():
            print(f"{name} rank {rank} {policy}: counted {counted}, formula {said}")
            error = min(abs(said + number * late - counted) for number in range(3))
            assert error <= WITHIN * counted, (rank, policy, said, counted)
        least = value[policies[-1]][0]
        if policies in (POLICIES, KEPT):
            assert least < min(value[policy][0] for policy in policies[1:-1])
        assert least <= max(value[policy][0] for policy in policies) == value["none"][0]
