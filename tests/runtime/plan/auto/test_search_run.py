"""`layout: auto`: what the run file gives is a limit, the rest is chosen, and stays chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.config.loading.load import LoadedConfig, resolve_config
from holdfast.core.transports import NodeLinks
from holdfast.errors import ConfigError, LayoutError
from holdfast.machine.hardware import HardwareInfo
from holdfast.plan.auto.choices import given_choice, values_of
from holdfast.plan.auto.machines import Machines, here, machines_of
from holdfast.plan.auto.search_run import limits_of, plan_run, why_not_searched, with_plan
from holdfast.plan.cost.evaluate import Evaluator

BOX = HardwareInfo("box", "Linux", 4, 2**34, 2**33)
RUN = """\
device: cpu
data: {sequence_length: 64}
model: {preset: tiny, vocab_size: 512}
train: {steps: 4, batch_size: 16, microbatch_size: 2}
layout: auto
"""


def run_of(*overrides: str) -> LoadedConfig:
    return resolve_config(RUN, "run.yaml", overrides)


def box(loaded: LoadedConfig, cores: int = 4) -> Machines:
    return here(loaded.config, replace(BOX, cores=cores), NodeLinks(), None)


def planned(*overrides: str, cores: int = 4) -> LoadedConfig:
    loaded = run_of(*overrides)
    plan = plan_run(loaded, box(loaded, cores))
    return with_plan(loaded, plan, "a test")[0]


def test_a_free_layout_uses_the_cores_of_a_machine_without_accelerators() -> None:
    found = planned()
    assert found.config.layout.workers == 4
    assert found.config.layout.mode == "auto"
    assert str(found.origins["layout.workers"]) == "planned (a test)"
    assert planned(cores=1).config.layout.workers == 1


def test_what_the_run_file_gives_is_kept() -> None:
    found = planned("layout.tp=2", "layout.workers=2", "train.recompute=full")
    layout = found.config.layout
    assert (layout.tp, layout.workers, found.config.train.recompute) == (2, 2, "full")
    assert found.origins["layout.tp"].kind == "command line"
    assert planned("layout.tp=4", cores=1).config.layout.workers == 4  # as without auto


def test_the_same_run_gets_the_same_layout_again() -> None:
    loaded = planned()
    again = plan_run(loaded, box(loaded))  # planned keys are free
    assert limits_of(loaded) == limits_of(run_of())
    assert with_plan(loaded, again, "a test")[0].config == loaded.config


def test_precision_and_microbatch_are_never_changed() -> None:
    loaded = planned("train.precision=bf16", "train.microbatch_size=4")
    assert (loaded.config.train.precision, loaded.config.train.microbatch_size) == ("bf16", 4)
    assert loaded.origins["train.microbatch_size"].kind == "command line"
    free = planned("train.microbatch_size=auto")
    assert free.config.train.microbatch_size > 0
    assert free.origins["train.microbatch_size"].kind == "planned"


def test_rules_of_the_run_file_bind_the_search() -> None:
    """tiny has four heads of which two are key/value heads, and 8-bit state is cut by blocks."""
    loaded = run_of("train.optimizer.name=muon")
    plan = plan_run(loaded, box(loaded))
    for found in (plan.best, *plan.result.runners_up):
        assert all(group.tp == group.dp_shard == 1 for group in found.choice.replicas)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("layout.quantized=both", "layout.dp_shard=2"), "layout.quantized both"),
        (("layout.schedule=pipedream", "layout.pp=3"), "layout.schedule pipedream"),
        (("layout.stages=[1,2]", "layout.pp=2"), "layout.stages"),
    ],
)
def test_runs_beyond_the_search_are_named_by_their_key(
    overrides: tuple[str, ...], key: str
) -> None:
    assert why_not_searched(run_of(*overrides).config) == key


def test_a_layout_as_the_planner_sees_it_goes_both_ways() -> None:
    loaded = run_of("layout.pp=3", "layout.tp=2", "layout.workers=12")
    choice = given_choice(loaded.config, "cpu")
    (group,) = choice.replicas
    assert (group.dp_replicate, group.mesh_shape, group.microbatches) == (2, (3, 1, 1, 2), 4)
    values = values_of(choice)
    assert (values["layout.pp"], values["layout.tp"], values["layout.workers"]) == (3, 2, 12)
    plan = plan_run(loaded, box(loaded))
    assert plan.best.cost.step_s == Evaluator(plan.problem).cost(plan.best.choice).step_s


def test_more_workers_than_devices_are_refused_with_the_number_that_works() -> None:
    loaded = run_of("layout.workers=400")
    with pytest.raises(LayoutError, match=r"has 16 devices; use 16"):
        plan_run(loaded, machines_of(loaded.config, BOX, "2x8xH100-80"))


def test_a_short_form_and_other_objectives_are_accepted_and_mistakes_refused() -> None:
    assert run_of("plan.cluster=2x8xH100-80").config.plan.is_short_cluster
    assert resolve_config(RUN + "plan: {cluster: c.yaml}\n", "a/run.yaml", (), "a").config.plan
    with pytest.raises(ConfigError, match=r"needs an end; use plan.finish_by"):
        run_of("plan.objective=finish_by")
    with pytest.raises(ConfigError, match=r"is no date and time; use 2026-12-24T18:00"):
        run_of("plan.finish_by=tomorrow")


def test_optimizer_state_moves_to_the_host_if_the_run_file_leaves_it_open() -> None:
    wide = ("model.dim=4096", "model.heads=32", "model.kv_heads=32", "model.layers=24")
    wide += ("model.ffn_dim=11008", "train.batch_size=1")
    one = (*wide, "train.precision=bf16", "plan.cluster=1x1xA100-80", "train.microbatch_size=1")

    def plan(*overrides: str) -> LoadedConfig:
        loaded = run_of("device=auto", *one, *overrides)
        machines = machines_of(loaded.config, BOX)
        return with_plan(loaded, plan_run(loaded, machines), "a test")[0]

    free = plan()
    assert free.config.train.memory.optimizer == "host"
    assert str(free.origins["train.memory.optimizer"]) == "planned (a test)"
    assert plan("train.memory.optimizer=host").config.train.memory.optimizer == "host"
    for kept in ("train.memory.optimizer=device", "train.optimizer.name=muon"):
        with pytest.raises(LayoutError, match="fits"):
            plan(kept)
    assert planned().config.train.memory.optimizer == "device"  # a CPU has no other memory
