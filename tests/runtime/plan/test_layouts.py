"""From the run file's degrees to a Layout for each replica; too few microbatches are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from benchmarks.runtime.plan_losses import WITHIN, alternatives, losses, measured, words
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.loading.load import LoadedConfig, resolve_config
from holdfast.config.run import RunConfig
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import ActionKind
from holdfast.core.schedule.timing import max_in_flight
from holdfast.core.sharding.reduction_tree import deal
from holdfast.elastic.node.launch_specs import plan_topology
from holdfast.errors import LayoutError, UserError
from holdfast.launch.run.auto_layout import by_microbatch_size, describe_microbatch
from holdfast.launch.start.facts import Facts, resolve
from holdfast.layout import Layout, place_replicas
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.memory.microbatch_size import choose_microbatch_size, microbatch_choices
from holdfast.plan.memory.pass_order import StageBytes, fullest_forward, rank_actions, rank_passes
from holdfast.plan.placing.layouts import layouts_of, max_workers
from holdfast.plan.step_microbatches import microbatches
from tests.runtime.plan.test_planner import EIGHT_BLOCKS


def config(train: dict[str, Any] | None = None, **layout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"sequence_length": 16},
            "model": EIGHT_BLOCKS,
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


# --- the layouts that the planner chooses after losses, and every other one, executed -------------
@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_the_chosen_layout_is_close_to_the_best_that_is_measured(number: int) -> None:
    loss = next(islice(losses(), number, None))
    times = {words(each): measured(loss, each) for each in alternatives(loss)}
    assert times[words(loss.chosen)] <= (1 + WITHIN) * min(times.values()), times


# --- the size of a microbatch ---------------------------------------------------------------------
KEY = "train.microbatch_size"
MODEL = ("model.preset=tiny", "model.vocab_size=512", "data.sequence_length=64", "device=cpu")


def run_of(*words: str) -> LoadedConfig:
    return resolve_config(None, "command line", [*MODEL, f"{KEY}=auto", *words])


def test_the_sizes_are_those_that_the_batch_and_the_layout_allow() -> None:
    words = ("train.batch_size=24", "train.batch_warmup=[{from_step: 2, batch_size: 12}]")
    config = run_of(*words, "layout.workers=2", "layout.dp_shard=2").config
    assert [choice.size for choice in microbatch_choices(config)] == [12, 6, 4, 2]
    config = run_of("train.batch_size=24", "layout.workers=4").config
    assert [choice.size for choice in microbatch_choices(config)] == [6, 4, 3, 2, 1]


def test_the_largest_that_fits_is_taken() -> None:
    config = run_of("train.batch_size=16", "layout.workers=1").config
    choices = list(microbatch_choices(config))
    assert [choice.size for choice in choices] == [16, 8, 4, 2, 1]
    for choice in choices:
        found, _ = choose_microbatch_size(config, choice.peak)
        assert found is not None
        assert found.size == max(each.size for each in choices if each.peak <= choice.peak)
    least = min(choice.peak for choice in choices)
    assert choose_microbatch_size(config, least - 1)[0] is None


def test_the_choice_is_printed_and_a_resume_keeps_it() -> None:
    facts = Facts(detect_hardware())
    of_one = run_of("layout.workers=1", "train.memory.device_gb=1")
    loaded = resolve(of_one, facts, (by_microbatch_size,)).validated()
    assert loaded.config.train.microbatch_size == 16
    assert describe_microbatch(loaded)[0].startswith(f"{KEY} is 16: ")
    facts = replace(facts, stored=json.loads(json.dumps(loaded.to_json())))
    with_less = run_of("layout.workers=4", "train.memory.device_gb=0.00001")
    again = resolve(with_less, facts, (by_microbatch_size,))
    assert again.config.train.microbatch_size == 16


def test_a_task_is_refused() -> None:
    with pytest.raises(UserError, match="know no task; use a number"):
        run_of("task.name=mine:Task")


# --- what a rank keeps at most under each schedule, from the schedule's own table -----------------
RANKS, MICROBATCHES = 4, 8
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipev": 2}
"""With the stages of a rank."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_kept_at_most_is_what_the_table_says(name: str) -> None:
    """Each pass keeps one byte, and as much between the halves of its backward."""
    table = build_schedule(name, RANKS, MICROBATCHES, SCHEDULES[name])
    is_folded = name in ("zbv", "dualpipev")
    layout = Layout(pp=RANKS, stages=(1,) * table.stages, is_folded=is_folded)
    (replica,) = place_replicas([layout], 1, ("node",) * RANKS).replicas
    for pp, most in enumerate(max_in_flight(table)):
        stages = {stage: StageBytes(1, 1) for stage in table.stages_of(pp)}
        assert replica.stages_at(pp) == tuple(stages)
        assert fullest_forward(name, replica, pp, MICROBATCHES, stages) == (most, most)
        actions = rank_actions(name, replica, pp, MICROBATCHES)
        last = list(rank_passes(actions, stages, frozenset()))[-1]
        assert (last.kept_besides, last.in_flight) == (0, 1), "the step's last pass is alone"


def test_gradients_of_a_microbatch_wait_for_the_next_ones_on_each_stage() -> None:
    """The first of two siblings stays, on each of the two stages of a rank, until the second."""
    layout = Layout(pp=2, stages=(1, 1, 1, 1), is_folded=True)
    (replica,) = place_replicas([layout], 1, ("node",) * 2).replicas
    actions = rank_actions("zbv", replica, 0, 2)
    stages = {stage: StageBytes(1, 1) for stage in replica.stages_at(0)}
    found = list(rank_passes(actions, stages, frozenset({0})))
    ends = [each for each in found if each.kind is ActionKind.BACKWARD_WEIGHT]
    assert [each.stays for each in ends].count(True) == 2
    for stage in stages:
        first, second = (each for each in ends if each.stage == stage)
        assert (first.stays, stage in first.waiting) == (True, False)
        assert (second.stays, stage in second.waiting) == (False, True)
