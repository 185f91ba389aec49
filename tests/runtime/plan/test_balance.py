"""`layout.balance`: the chosen stages against every other split, and what they depend on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.run_table import run_state_table
from holdfast.core.sharding.state_table import local_boxes, state_table
from holdfast.elastic.node.launch_specs import plan_topology
from holdfast.errors import LayoutError
from holdfast.layout import Layout, Replica, Stages, Topology, place_replicas
from holdfast.plan.memory.estimate import rank_estimate
from holdfast.plan.memory.stage_memory import PipelineMemory
from holdfast.plan.placing.balance import planned_stages, stage_times, times_of_stages
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.loss_impact import impact_of_loss
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


# --- what a loss leaves, against a count of single elements ---------------------------------------
LAYOUTS = (
    {"workers": 4},
    {"workers": 4, "pp": 2, "tp": 2},
    {"workers": 4, "dp_shard": 2},
    {"workers": 6, "pp": 3},
    {"workers": 4, "tp": 4},
    {"workers": 5, "replicas": [{"pp": 3}, {"pp": 2}]},
    {"workers": 6, "replicas": [{"tp": 2}, {"dp_shard": 2}, {"pp": 2, "stages": [1, 2]}]},
)


def run_of(layout: dict[str, object], zero: int = 3) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"sequence_length": 16},
            "model": {
                "preset": None,
                "layers": 3,
                "dim": 8,
                "heads": 4,
                "kv_heads": 2,
                "ffn_dim": 8,
                "vocab_size": 11,
                "tied_embeddings": True,
            },
            "train": {"batch_size": 32, "microbatch_size": 2},
            "layout": {**layout, "zero": zero},
        }
    )


def elements(boxes: tuple[Box, ...]) -> set[tuple[object, ...]]:
    return {
        (box.name, *place)
        for box in boxes
        for place in product(
            *(range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
        )
    }


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(LAYOUTS), st.data())
def test_gone_is_what_no_rank_outside_holds(layout: dict[str, object], data: st.DataObject) -> None:
    asked = run_of(layout)
    topology = plan_topology(asked, 1, "here")
    everyone = range(topology.world_size)
    lost = data.draw(st.frozensets(st.sampled_from(everyone), min_size=1))
    loss = impact_of_loss(asked, topology, lost)

    table = state_table(asked.model)
    held = [elements(local_boxes(topology, table, rank)) for rank in everyone]
    left = set[tuple[object, ...]]().union(*(held[r] for r in everyone if r not in lost))
    everything = set[tuple[object, ...]]().union(*held)
    assert loss.of == 4 * len(everything)
    assert loss.gone == 4 * len(everything - left)
    positions = {
        p for s in table if any(e[0] == s.name for e in everything - left) for p in s.positions
    }
    assert loss.positions == tuple(sorted(positions))

    assert sorted(loss.broken + loss.whole) == list(range(len(topology.replicas)))
    for index in loss.whole:
        assert lost.isdisjoint(topology.replicas[index].ranks)
    alive = {r for index in loss.broken for r in topology.replicas[index].ranks} - lost
    assert set(loss.waiting) == alive


def test_a_whole_replica_left_means_nothing_is_gone() -> None:
    asked = run_of({"workers": 8, "pp": 2, "dp_shard": 2})
    loss = impact_of_loss(asked, plan_topology(asked, 1, "here"), frozenset({3}))
    assert (loss.broken, loss.whole, loss.waiting, loss.gone) == ((0,), (1,), (0, 1, 2), 0)


def test_after_the_loss_of_a_learner_no_replica_continues_at_once() -> None:
    """Each has the state of its own optimizer alone."""
    keys = ("layout.workers=2", "outer.learners=2", "train.batch_size=8", "model.preset=tiny")
    asked = resolve_config(None, "", keys).config
    loss = impact_of_loss(asked, plan_topology(asked, 1, "here"), frozenset({1}))
    moments = sum(spec.nbytes for spec in run_state_table(asked) if spec.of_learners)
    assert (loss.broken, loss.whole, loss.learners) == ((1,), (), 1)
    assert 0 < loss.gone == moments / 2


def test_zero_1_keeps_parameters_on_every_rank() -> None:
    """A lost rank of dp_shard takes its moments along, and under zero 1 nothing else."""
    for zero, tensors in ((1, 2), (2, 3), (3, 3)):
        asked = run_of({"workers": 2, "dp_shard": 2}, zero)
        loss = impact_of_loss(asked, plan_topology(asked, 1, "here"), frozenset({1}))
        one = sum(s.nbytes for s in state_table(asked.model) if s.name.startswith("model."))
        assert loss.gone % tensors == 0
        assert 0.4 < loss.gone / tensors / one < 0.5, "11 rows of vocabulary: 6 and 5"


def test_a_rank_that_is_not_there() -> None:
    asked = run_of({"workers": 4})
    with pytest.raises(LayoutError, match="rank 4 is not in a world of 4; use ranks 0 to 3"):
        impact_of_loss(asked, plan_topology(asked, 1, "here"), frozenset({1, 4}))
