"""`layout: auto`: what the run file gives is a limit, the rest is chosen, and stays chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config.loading.load import LoadedConfig, resolve_config
from holdfast.core.transports import NodeLinks
from holdfast.errors import ConfigError, LayoutError
from holdfast.launch.run.auto_layout import choose_layout
from holdfast.launch.start.facts import Facts
from holdfast.layout import Layout, place_layout
from holdfast.machine.hardware import HardwareInfo
from holdfast.plan.auto import plan_cache
from holdfast.plan.auto.choices import given_choice, values_of
from holdfast.plan.auto.machines import REPORT_S, Machines, here, machines_of
from holdfast.plan.auto.plan_cache import PlanCache, Rules
from holdfast.plan.auto.prediction import Predictor
from holdfast.plan.auto.search_run import limits_of, plan_run, why_not_searched, with_plan
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.search.limits import (
    FROM_CACHE,
    SEARCHED,
    SEARCHED_FROM_CACHE,
    Limits,
    step_seconds,
)
from holdfast.plan.search.search import search
from holdfast.plan.search.warm_start import first_layouts
from tests.support.plan_brute_force import small_problem
from tests.support.ranks import ROOT

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


def test_a_microbatch_that_is_not_named_is_searched_and_a_run_keeps_its_own() -> None:
    loaded = resolve_config(RUN.replace(", microbatch_size: 2", ""), "run.yaml", ())
    assert limits_of(loaded).microbatch == 0
    stored = {"config": {"train": {"microbatch_size": 4}}}
    sizes = []
    for facts in (Facts(BOX), Facts(BOX, stored=stored)):
        chosen = choose_layout(loaded, facts)
        sizes.append(chosen.values["train.microbatch_size"])
    assert sizes[0][1] != "that of the run"
    assert sizes[1] == (4, "that of the run")
    again = loaded.with_values({"train.microbatch_size": sizes[1]})
    assert limits_of(again).microbatch == 4


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


# --- plans are kept -------------------------------------------------------------------------------
LIMITS = Limits(schedules=("1f1b", "zb-h1"))


def allow_all(_: Choice) -> bool:
    return True


RULES = Rules(step_seconds, allow_all, "time")


@pytest.fixture
def problem() -> Problem:
    return small_problem(3)[0]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_the_same_search_is_answered_from_the_cache(problem: Problem, tmp_path: Path) -> None:
    first = PlanCache(tmp_path).search(problem, LIMITS, RULES)
    again = PlanCache(tmp_path).search(problem, LIMITS, RULES)
    assert (first.source, again.source) == (SEARCHED, FROM_CACHE)
    assert replace(again, source=SEARCHED) == first == search(problem, LIMITS)


@pytest.mark.parametrize("change", ["batch", "limits", "words", "memory", "sources"])
def test_what_changes_the_answer_is_searched(
    problem: Problem, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlanCache(tmp_path).search(problem, LIMITS, RULES)
    other, limits, rules = problem, LIMITS, RULES
    if change == "batch":
        work = replace(problem.workload, batch=problem.workload.batch * 2)
        other = replace(problem, workload=work)
    elif change == "limits":
        limits = replace(LIMITS, zero=(1,))
    elif change == "words":
        rules = replace(RULES, words="tokens_per_usd")
    elif change == "memory":
        other = replace(problem, memory_share=0.9)
    else:
        monkeypatch.setattr(plan_cache, "planner_digest", lambda: "a newer planner")
    found = PlanCache(tmp_path).search(other, limits, rules)
    assert found.source == (SEARCHED if change == "sources" else SEARCHED_FROM_CACHE)
    assert found.best.score == pytest.approx(search(other, limits).best.score)
    assert len(files(tmp_path)) == 2


def test_an_objective_with_a_date_only_begins_with_the_cache(
    problem: Problem, tmp_path: Path
) -> None:
    rules = replace(RULES, is_timeless=False)
    sources = [PlanCache(tmp_path).search(problem, LIMITS, rules).source for _ in range(2)]
    assert sources == [SEARCHED, SEARCHED_FROM_CACHE]


def test_nodes_that_must_agree_take_no_warm_plan(problem: Problem, tmp_path: Path) -> None:
    other = replace(problem, memory_share=0.9)
    PlanCache(tmp_path).search(other, LIMITS, RULES)
    assert PlanCache(tmp_path).search(problem, LIMITS, RULES).source == SEARCHED_FROM_CACHE
    agreed = [
        PlanCache(tmp_path, starts_warm=False).search(problem, LIMITS, RULES) for _ in range(2)
    ]
    assert [each.source for each in agreed] == [SEARCHED, FROM_CACHE]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"digest": 1, "plan": {}}'])
def test_a_damaged_file_is_named_and_searched_again(
    problem: Problem, tmp_path: Path, content: str
) -> None:
    first = PlanCache(tmp_path).search(problem, LIMITS, RULES)
    (path,) = files(tmp_path)
    path.write_text(content)
    cache = PlanCache(tmp_path)
    assert cache.search(problem, LIMITS, RULES).best == first.best
    assert len(cache.notes) == 1
    assert str(path) in cache.notes[0]
    assert "damaged" in cache.notes[0]
    assert PlanCache(tmp_path).search(problem, LIMITS, RULES).source == FROM_CACHE


def test_a_changed_byte_is_found(problem: Problem, tmp_path: Path) -> None:
    PlanCache(tmp_path).search(problem, LIMITS, RULES)
    (path,) = files(tmp_path)
    path.write_text(path.read_text().replace('"tried": ', '"tried": 1'))
    cache = PlanCache(tmp_path)
    assert cache.search(problem, LIMITS, RULES).source == SEARCHED
    assert "its digest is another one" in cache.notes[0]


def test_a_folder_that_cannot_be_written_stops_no_search(problem: Problem, tmp_path: Path) -> None:
    blocked = tmp_path / "plans"
    blocked.write_text("a file")
    cache = PlanCache(blocked)
    assert cache.search(problem, LIMITS, RULES).best == search(problem, LIMITS).best
    assert any("is not kept" in note for note in cache.notes)


def test_the_folder_does_not_grow_without_end(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "_KEPT", 3)
    for number in range(5):
        PlanCache(tmp_path).search(problem, LIMITS, replace(RULES, words=str(number)))
        for age, path in enumerate(files(tmp_path)):
            os.utime(path, (age, age))
    assert len(files(tmp_path)) == 3


def test_nothing_that_fits_is_not_kept(problem: Problem, tmp_path: Path) -> None:
    with pytest.raises(LayoutError):
        PlanCache(tmp_path).search(problem, replace(LIMITS, tp=64), RULES)
    assert not files(tmp_path)


def test_first_layouts_are_layouts_of_the_other_problem() -> None:
    """Pairs of problems with one model. No first layout breaks a limit, or needs devices that are
    not there. Each has all microbatches, and fits."""
    seen = 0
    for seed in range(9):
        problem, limits = small_problem(seed)
        try:
            result = search(problem, limits)
        except LayoutError:
            continue
        known = [each.choice for each in (result.best, *result.runners_up)]
        pools = problem.cluster.pools
        smaller = Cluster(tuple(replace(p, nodes=max(1, p.nodes - 1)) for p in pools))
        more = Cluster(tuple(replace(p, nodes=p.nodes + 1) for p in pools))
        work = replace(problem.workload, batch=problem.workload.batch * 3)
        for other, own in (
            (replace(problem, cluster=smaller), limits),
            (replace(problem, cluster=more), limits),
            (replace(problem, workload=work), limits),
            (problem, replace(limits, dp_shard=1)),
            (problem, replace(limits, recompute=("full",))),
        ):
            found = first_layouts(other, own, step_seconds, allow_all, known)
            for first in found:
                seen += 1
                assert Evaluator(other).cost(first).fits
                assert first.microbatches * first.microbatch == other.workload.batch
                assert first.devices <= other.cluster.size
                assert own.dp_shard in (0, *(g.dp_shard for g in first.replicas))
                assert {w for g in first.replicas for w in g.recompute} <= set(own.recompute)
            assert search(other, own, first=found).best.score == pytest.approx(
                search(other, own).best.score
            )
    assert seen > 12


def test_a_layout_that_a_rule_refuses_is_no_first_one(problem: Problem) -> None:
    known = search(problem, LIMITS).best.choice
    assert first_layouts(problem, LIMITS, step_seconds, lambda c: c != known, [known]) == []
    gone = Cluster(tuple(replace(p, name=f"new-{p.name}") for p in problem.cluster.pools))
    other = replace(problem, cluster=gone)
    assert first_layouts(other, LIMITS, step_seconds, allow_all, [known]) == []


def test_two_processes_have_the_same_key(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; import sys\n"
        "from holdfast.plan.auto.plan_cache import PlanCache, Rules\n"
        "from holdfast.plan.search.limits import step_seconds\n"
        "from tests.support.plan_brute_force import small_problem\n"
        "problem, limits = small_problem(1)\n"
        "rules = Rules(step_seconds, lambda c: True, '')\n"
        "print(PlanCache(Path(sys.argv[1])).search(problem, limits, rules).source)\n"
    )
    sources = [
        subprocess.run(
            [sys.executable, "-c", code, tmp_path],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in (1, 2)
    ]
    assert sources == [SEARCHED, FROM_CACHE]


def test_nodes_on_the_same_cores_are_predicted_as_workers_of_one_node() -> None:
    loaded = run_of("layout.workers=4")
    predict = Predictor(loaded.config, box(loaded, cores=2))
    apart, together = (
        place_layout(Layout(dp_replicate=4), 1, nodes) for nodes in (tuple("abcd"), ("box",) * 4)
    )
    alone = predict(apart)
    shared = predict(apart, dict.fromkeys("abcd", "one machine"))
    assert shared.seconds == predict(together).seconds
    assert shared.parts["compute"] > 2.5 * alone.parts["compute"], "each had two cores, now a half"
    assert shared.parts["update"] > alone.parts["update"] + 2 * REPORT_S * 0.99
