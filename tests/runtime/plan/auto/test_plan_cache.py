"""Plans are kept: the same search is answered at once, a like one begins with what is known."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import LayoutError
from holdfast.plan.auto import plan_cache
from holdfast.plan.auto.plan_cache import PlanCache, Rules
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
