"""From the run file's degrees to a Layout for each replica; too few microbatches are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.run import RunConfig
from holdfast.core.schedule.named import build_schedule
from holdfast.core.sharding.reduction_tree import deal
from holdfast.elastic.node.launch_specs import plan_topology
from holdfast.errors import LayoutError
from holdfast.layout import Layout
from holdfast.plan.placing.layouts import layouts_of, max_workers
from holdfast.plan.step_microbatches import microbatches


def config(train: dict[str, Any] | None = None, **layout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"sequence_length": 16},
            "model": {
                "preset": None,
                "layers": 8,
                "dim": 32,
                "heads": 4,
                "kv_heads": 2,
                "ffn_dim": 32,
                "vocab_size": 64,
            },
            "train": {"batch_size": 16, "microbatch_size": 2, **(train or {})},
            "layout": layout,
        }
    )


def test_equal_replicas() -> None:
    assert layouts_of(config(workers=3)) == (Layout(),) * 3
    layouts = layouts_of(config(workers=16, pp=2, dp_shard=2, tp=2))
    assert layouts == (Layout(pp=2, dp_shard=2, tp=2, stages=(4, 4)),) * 2


def test_stages_of_the_run_file_win() -> None:
    (layout,) = layouts_of(config(workers=3, pp=3, stages=[1, 4, 3]))
    assert layout.stages == (1, 4, 3)


def test_unlike_replicas_side_by_side() -> None:
    asked = config(workers=5, replicas=[{"pp": 3, "stages": [3, 3, 2]}, {"dp_shard": 2}])
    topology = plan_topology(asked, 7, "here")
    assert [replica.ranks for replica in topology.replicas] == [(0, 1, 2), (3, 4)]
    assert [replica.stages for replica in topology.replicas] == [(3, 3, 2), ()]
    assert [replica.degree("dp_shard") for replica in topology.replicas] == [1, 2]
    assert (topology.generation, topology.nodes) == (7, ("here",) * 5)


def refused(asked: RunConfig) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        layouts_of(asked)
    return caught.value


def test_workers_must_be_planned() -> None:
    error = refused(config(pp=2))
    assert (error.where, error.remedy) == ("layout.workers", "use a multiple of 2")


def test_a_replica_without_a_microbatch_is_refused() -> None:
    error = refused(config(workers=20, tp=2))
    assert error.where == "layout.workers"
    assert str(error) == (
        "layout.workers: layout.workers 20 make 10 replicas, but step 1 has 8 microbatches of 2 "
        "samples, so 2 would have nothing to do; use 16 workers or fewer"
    )
    layouts_of(config(workers=16, tp=2))


def test_the_smallest_batch_counts() -> None:
    warm = {"batch_warmup": [{"from_step": 1, "batch_size": 4}, {"from_step": 9, "batch_size": 8}]}
    assert microbatches(config(warm)) == {1: 2, 9: 4}
    error = refused(config(warm, workers=3))
    assert "step 1 has 2 microbatches" in error.message
    assert error.remedy == "use 2 workers or fewer"
    late = {"steps": 8, "batch_warmup": [{"from_step": 9, "batch_size": 2}]}
    assert len(layouts_of(config(late, workers=3))) == 3, "the run ends before that batch"


def test_too_few_microbatches_for_1f1b() -> None:
    error = refused(config(workers=12, pp=4))
    assert str(error) == (
        "layout.pp: layout.pp 4 under 1f1b needs 4 microbatches a replica, but step 1 has 8, of "
        "which replica 0 gets 3; use layout.schedule=gpipe or layout.workers 8"
    )
    layouts_of(config(workers=12, pp=4, schedule="gpipe"))
    unlike = refused(config(workers=6, replicas=[{"pp": 5}, {}], train={"batch_size": 8}))
    assert unlike.where == "layout.replicas.0.pp"
    assert unlike.remedy == (
        "use layout.schedule=gpipe or layout.replicas.0.pp 2 with layout.workers 3"
    )


def test_a_shorter_pipeline_is_offered_with_what_changes_with_it() -> None:
    few = {"batch_size": 6}
    assert refused(config(few, workers=4, pp=4)).remedy == (
        "use layout.schedule=gpipe or layout.pp 3 with layout.workers 3"
    )
    layouts_of(config(few, workers=3, pp=3))
    assert refused(config(few, workers=4, pp=4, stages=[2, 2, 2, 2])).remedy == (
        "use layout.schedule=gpipe or layout.pp 3 with layout.workers 3 and layout.stages=[]"
    )


@given(
    pp=st.integers(1, 8),
    tp=st.sampled_from([1, 2]),
    replicas=st.integers(1, 9),
    batches=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_refused_is_exactly_what_no_schedule_can_run(
    pp: int, tp: int, replicas: int, batches: list[int], schedule: str
) -> None:
    train = {
        "batch_size": 2 * batches[0],
        "batch_warmup": [
            {"from_step": 1 + step, "batch_size": 2 * size}
            for step, size in enumerate(batches[1:], 1)
        ],
    }
    asked = config(train, workers=pp * tp * replicas, pp=pp, tp=tp, schedule=schedule)
    try:
        layouts_of(asked)
    except LayoutError as error:
        assert not _can_run(asked)
        remedy = str(error.remedy)
        for offer in re.split(r", | or ", remedy):
            values = dict(re.findall(r"layout\.(\w+)[ =](\w+)", offer))
            if not values:
                continue
            changed = asked.model_dump() | {"layout": asked.layout.model_dump() | values}
            layouts_of(RunConfig.model_validate(changed))
        for number in re.findall(r"use (\d+) workers? or fewer", remedy):
            fewer = {"workers": int(number)}
            if min(microbatches(asked).values()) < pp:
                fewer |= {"schedule": "gpipe"}  # no number of workers is few enough for 1f1b
            changed = asked.model_dump() | {"layout": asked.layout.model_dump() | fewer}
            layouts_of(RunConfig.model_validate(changed))
    else:
        assert _can_run(asked)


def _can_run(asked: RunConfig) -> bool:
    layout = asked.layout
    for number in microbatches(asked).values():
        for share in deal(number, layout.workers // layout.ranks):
            try:
                build_schedule(layout.schedule, layout.pp, len(share))
            except LayoutError:
                return False
    return True


def test_the_machine_gets_whole_replicas_that_have_work() -> None:
    assert max_workers(config(), 1) == 1
    assert max_workers(config(pp=2, tp=2), 11) == 8
    assert max_workers(config(pp=2, tp=2), 1) == 4, "at least one replica"
    assert max_workers(config(), 64) == 8, "no more replicas than microbatches"
    assert max_workers(config(pp=4), 64) == 8, "1f1b: four microbatches a replica"
    assert max_workers(config(pp=4, schedule="gpipe"), 64) == 32
    assert max_workers(config(replicas=[{"pp": 3}, {"pp": 2}]), 64) == 5
