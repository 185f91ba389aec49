"""`layout.balance`: the chosen stages against every other split, and what they depend on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.elastic.node.launch_specs import plan_topology
from holdfast.layout import Layout, Replica, Stages, Topology, place_replicas
from holdfast.plan.memory.estimate import rank_estimate
from holdfast.plan.memory.stage_memory import PipelineMemory
from holdfast.plan.placing.balance import planned_stages, stage_times, times_of_stages
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.planner import plan_layout
from tests.support.marks import in_campaign

MODEL = {"preset": None, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 512}


def config(train: dict[str, Any] | None = None, layers: int = 8, **layout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"sequence_length": 32},
            "model": {
                **MODEL,
                "layers": layers,
                "vocab_size": layout.pop("vocabulary", 512),
                "dim": layout.pop("dim", 32),
            },
            "train": {"batch_size": 32, "microbatch_size": 2, **(train or {})},
            "layout": layout,
        }
    )


def splits(blocks: int, stages: int) -> Iterator[Stages]:
    for cuts in combinations(range(1, blocks), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, blocks)))


def worst_estimate(of: RunConfig, stages: Stages) -> int:
    """The highest peak by the estimate of `layout show`, on real topologies."""
    layout = Layout(pp=of.layout.pp, dp_shard=of.layout.dp_shard, tp=of.layout.tp, stages=stages)
    topology = place_replicas([layout], 1, ("node",) * layout.replica_size)
    firsts = (topology.replicas[0].rank_at(pp=pp) for pp in range(layout.pp))
    return max(rank_estimate(of, topology, topology.coordinate(rank)).peak for rank in firsts)


@pytest.mark.parametrize("seed", [0, *map(in_campaign, range(1, 24))])
def test_no_split_has_a_lower_peak(seed: int) -> None:
    draw = random.Random(seed)
    pp, words = draw.choice([2, 3]), ["none", "selective", "full"]
    word: Any = draw.choice([*words, [draw.choice(words) for _ in range(pp)]])
    of = config(
        {"recompute": word, "precision": draw.choice(["fp32", "bf16"])},
        draw.choice([5, 7]) if seed else 5,
        vocabulary=draw.choice([64, 512, 4096]),
        pp=pp,
        tp=draw.choice([1, 2]),
        dp_shard=draw.choice([1, 2]),
        zero=draw.choice([1, 2, 3]),
        schedule=draw.choice(["1f1b", "gpipe"]),
        balance="memory",
    )
    chosen = planned_stages(of, (pp, of.layout.dp_shard, 1, of.layout.tp))
    best = min(worst_estimate(of, each) for each in splits(of.model.layers, pp))
    assert worst_estimate(of, chosen) <= 1.002 * best, chosen


@pytest.mark.parametrize("balance", ["time", "memory"])
@pytest.mark.parametrize(
    ("schedule", "pp", "layers", "vocabulary"),
    [
        ("zbv", 2, 5, 4096),
        in_campaign("zbv", 2, 8, 4096),
        in_campaign("interleaved", 2, 9, 64),
        in_campaign("zbv", 3, 11, 512),
        in_campaign("interleaved", 3, 10, 4096),
        in_campaign("dualpipev", 2, 9, 1024),
        in_campaign("interleaved", 4, 11, 1024),
    ],
)
def test_no_split_over_several_stages_a_worker_is_better(
    balance: str, schedule: str, pp: int, layers: int, vocabulary: int
) -> None:
    of = config(layers=layers, vocabulary=vocabulary, pp=pp, schedule=schedule, balance=balance)
    memory, folded = PipelineMemory(of, (pp, 1, 1, 1)), of.layout.is_folded

    def worst(stages: Stages) -> float:
        placed = Replica(0, tuple(range(pp)), (pp, 1, 1, 1), stages, is_folded=folded)
        times = times_of_stages(of, placed)
        return max(
            sum(times[s] for s in placed.stages_at(worker))
            if balance == "time"
            else memory.peak(worker, {s: stages[s] for s in placed.stages_at(worker)})
            for worker in range(pp)
        )

    chosen = planned_stages(of, (pp, 1, 1, 1))
    assert worst(chosen) <= (1 + 1e-9) * min(map(worst, splits(layers, 2 * pp))), chosen


def test_one_stage_a_worker_has_the_peak_of_the_estimate() -> None:
    """Also with more blocks than the short pipelines have."""
    for changes in ({"zero": 1}, {"zero": 3}, {"tp": 2}):
        of = config(None, 14, dim=256, vocabulary=4096, pp=2, **{"dp_shard": 2, **changes})
        mesh = (2, 2, 1, of.layout.tp)
        memory, stages = PipelineMemory(of, mesh), (9, 5)
        layout = Layout(pp=2, dp_shard=2, tp=of.layout.tp, stages=stages)
        topology = place_replicas([layout], 1, ("node",) * layout.replica_size)
        for pp in range(2):
            at = topology.coordinate(topology.replicas[0].rank_at(pp=pp))
            said = rank_estimate(of, topology, at).peak
            assert memory.peak(pp, {pp: stages[pp]}) == pytest.approx(said, rel=0.01)


def test_a_stage_that_runs_its_blocks_again_has_fewer_of_them() -> None:
    plain = planned_stages(config(layers=9, pp=2, vocabulary=64), (2, 1, 1, 1))
    again = config({"recompute": ["full", "none"]}, 9, pp=2, vocabulary=64)
    assert planned_stages(again, (2, 1, 1, 1))[0] < plain[0]
    whole = stage_times(config({"recompute": "full"}, pp=2), 2)(0, 0, 4)
    kept = stage_times(config(pp=2), 2)(0, 0, 4)
    assert whole == pytest.approx(kept * 4 / 3)
    selective = config({"recompute": "selective"}, pp=2)  # keeps products, not attention
    assert kept < stage_times(selective, 2)(0, 0, 4) < whole


def test_measured_times_stand_in_for_flops() -> None:
    costs = [2, 1, 1, 1, 1, 4, 4, 1, 1, 3]
    assert planned_stages(config(pp=2, balance_costs=costs), (2, 1, 1, 1)) == (5, 3)


def _stages(topology: Topology) -> list[Stages]:
    return [replica.stages for replica in topology.replicas]


def test_a_lost_replica_moves_no_block_of_the_other() -> None:
    of = config(layers=9, pp=2, workers=4, balance="memory", vocabulary=4096)
    both = plan_topology(of, 1, "here")
    assert len(set(_stages(both))) == 1
    assert _stages(both)[0] != planned_stages(config(layers=9, pp=2), (2, 1, 1, 1))
    left = plan_layout(of, [NodePlaces("here", 2)], 2).topology
    assert _stages(left) == _stages(both)[:1]
