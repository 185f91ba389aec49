"""The score's arithmetic on records that were written by hand, and its scenarios."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.lab.links import gloo_ring_waits, link_seconds, with_slow_nodes

from holdfast.borders import Border
from holdfast.errors import DataError
from holdfast_lab.engine.holdfast import holdfast
from holdfast_lab.engine.interfaces import CostModel, Policy
from holdfast_lab.score.compression import compare_compressions, compression_verdict
from holdfast_lab.score.gate import gate_checks
from holdfast_lab.score.record import (
    REFERENCE,
    Commit,
    ReferenceTable,
    RunRecord,
    first_new_step_times,
    flight_tokens,
    format_record,
    goodput,
    history_of,
    mean_lost_seconds,
    parse_record,
    parse_reference,
    recovery_times,
    samples_once,
    unrecovered_faults,
)
from holdfast_lab.score.replay import level_0_pairs
from holdfast_lab.score.scenarios import (
    LEVEL_1,
    SCENARIOS,
    draw_scenario,
    interruptions,
    scoring_seeds,
)
from holdfast_lab.score.score import (
    PARTS,
    WEIGHTS,
    GateCheck,
    PairScore,
    Weights,
    literal_formula,
    parse_weights,
    score_pair,
    score_pairs,
)
from tests.support.borders import unknown_entries

TABLE = ReferenceTable({1: 2.0, 2: 4.0})


def commits(*rows: tuple[float, int]) -> tuple[Commit, ...]:
    """Steps of 4 tokens, each with its own 4 samples and a loss that tells the step."""
    return tuple(
        Commit(at, step, 4.0, 2, 1.0 / step, ((4 * step - 4, 4 * step),)) for at, step in rows
    )


def record(*rows: tuple[float, int], **settings: Any) -> RunRecord:
    made = RunRecord("F1", 5, 10.0, ((0.0, 2),), (), commits(*rows), 1.0, 10.0)
    return replace(made, **settings)


STEADY = [(float(n), n) for n in range(1, 11)]
BACK = [(1.0, 1), (2.0, 2), (3.0, 3), (6.0, 2), (7.0, 3), (8.0, 4), (9.0, 5), (10.0, 6)]
"""A fault at 3.5 takes the run back to step 1."""


# --- metrics ------------------------------------------------------------------------------------
def test_a_run_at_the_speed_of_the_table_has_a_goodput_of_one() -> None:
    assert goodput(record(*STEADY), TABLE) == pytest.approx(1.0)


def test_steps_that_are_done_again_count_once() -> None:
    found = record(*BACK, faults=(3.5,))
    assert [c.step for c in history_of(found).kept] == [1, 2, 3, 4, 5, 6]
    assert goodput(found, TABLE) == pytest.approx(6 * 4 / 40)
    assert mean_lost_seconds(found) == pytest.approx(2.0)


def test_the_step_in_flight_counts_by_its_share_if_asked() -> None:
    found = record((1.0, 1), (3.0, 2), seconds=4.0)
    assert flight_tokens(found) == pytest.approx(2.0), "one of two seconds of a step of 4 tokens"
    assert goodput(found, TABLE) == pytest.approx(8 / 16)
    assert goodput(found, TABLE, counts_flight=True) == pytest.approx(10 / 16)
    assert flight_tokens(record((1.0, 1))) == 0.0


def halved(found: RunRecord, last: float) -> RunRecord:
    """The same at twice the compression. last: when its last step comes."""
    times = [c.t_s / 2 for c in found.commits[:-1]] + [last]
    steps = tuple(replace(c, t_s=t) for c, t in zip(found.commits, times, strict=True))
    return replace(found, seconds=found.seconds / 2, commits=steps)


def test_a_compression_is_valid_if_twice_of_it_leaves_the_goodput() -> None:
    table = ReferenceTable({1: 4.0, 2: 8.0})
    once = [record(*STEADY), record(*STEADY, scenario="F0", seed=6), record(*STEADY, seed=7)]
    same = [halved(each, 5.0) for each in reversed(once)]
    rows = compare_compressions(once, TABLE, same, table)
    assert [(row.scenario, row.seeds) for row in rows] == [("F1", 2), ("F0", 1)]
    assert all(row.difference == pytest.approx(0.0) and row.holds for row in rows)
    assert compression_verdict(rows, 10.0).startswith("k = 10 is valid: G at k = 20 differs")

    late = record(*STEADY[:-1])  # nine steps of ten, and a tenth that is not finished
    slower = replace(halved(late, 4.5), commits=halved(late, 4.5).commits[:-1])
    (row,) = compare_compressions([record(*STEADY)], TABLE, [slower], table)
    assert row.difference == pytest.approx(-0.1)
    assert not row.holds
    verdict = compression_verdict([*rows, row], 10.0)
    assert verdict.startswith("k = 10 is NOT valid: G at k = 20 differs by -10.0 % at most (F1")
    assert verdict.endswith("missed by F1)")


def test_without_runs_of_one_seed_a_compression_is_not_validated() -> None:
    rows = compare_compressions([record(*STEADY)], TABLE, [record(*STEADY, seed=9)], TABLE)
    assert rows == []
    assert "not validated" in compression_verdict(rows, 10.0)


def test_the_ideal_follows_the_nodes_that_are_there() -> None:
    found = record(*STEADY, capacity=((0.0, 2), (5.0, 1), (8.0, 0)))
    assert TABLE.tokens(found.capacity, 0.0, 10.0) == pytest.approx(5 * 4 + 3 * 2)
    assert TABLE.tokens(found.capacity, 4.0, 6.0) == pytest.approx(4 + 2)


def test_recovery_ends_with_a_new_step_at_full_speed() -> None:
    found = record(*BACK, faults=(3.5,))
    # step 4 at 8.0 is the first that is new; each later step takes a second, which is full speed
    assert first_new_step_times(found) == [pytest.approx(4.5)]
    assert recovery_times(found, TABLE) == [pytest.approx(4.5)]
    slow = record((1, 1), (2, 2), (5, 3), (8, 4), faults=(2.5,), capacity=((0.0, 2),))
    assert recovery_times(slow, TABLE) == [pytest.approx(7.5)], "never at full speed again"


def test_an_interruption_without_a_later_step_is_counted() -> None:
    assert unrecovered_faults(record(*BACK, faults=(3.5,))) == 0
    assert unrecovered_faults(record(*BACK[:4], faults=(3.5,))) == 0, "its loss is known"
    assert unrecovered_faults(record(faults=(3.5,))) == 1
    assert score_pair(record(*BACK[:3], faults=(3.5, 5.0)), TABLE).unrecovered == 2


def test_samples_that_are_missing_or_repeated_are_found() -> None:
    assert samples_once(record(*BACK)) == ""
    assert "left out" in samples_once(record((1, 1), (2, 3)))
    twice = commits((1, 1), (2, 2))
    again = replace(twice[1], samples=twice[0].samples)
    assert "used again" in samples_once(record(commits=(twice[0], again)))


def test_a_record_survives_its_file() -> None:
    found = record(*BACK, faults=(3.5,), capacity=((0.0, 2), (3.5, 1)), corrupted=1)
    assert parse_record(format_record(found), "r.json") == found


# --- the score ----------------------------------------------------------------------------------
def pair(scenario: str, **values: float) -> PairScore:
    return PairScore(scenario, 5, values.pop("g", 1.0), **values)


FULL = [
    pair("F0", eo=0.9),
    pair("F11", eo=0.8),
    pair("F1", rpo=0.5, rto=0.25),
    pair("F8", jitter=0.6, g=0.6),
    pair("F3", rpo=1.0, rto=0.75, spot=0.7, g=0.7),
]


def test_the_score_is_the_geometric_mean_of_five_parts() -> None:
    found = score_pairs(FULL, [])
    parts = (0.75, 0.5, 0.9 * 0.8, 0.6, 0.7)
    assert [found.vector.parts[p] for p in PARTS] == pytest.approx(list(parts))
    assert found.score == pytest.approx(100 * math.prod(parts) ** 0.2)
    low, high = found.sensitivity or (0.0, 0.0)
    assert low < (found.score or 0.0) < high


def test_half_of_the_score_of_a_loss_is_reached_at_five_percent_of_the_time_between() -> None:
    # lost: 0.5 s of steps of 0.25 s; T_ref is 0.05 x 10 s
    found = score_pair(record(*BACK, faults=(3.5,), step_s=0.25), TABLE)
    assert found.rpo == pytest.approx(0.5)


def test_a_part_at_zero_is_not_made_up_for() -> None:
    nothing = [p if p.scenario != "F8" else pair("F8", jitter=0.0) for p in FULL]
    assert score_pairs(nothing, []).score == 0.0


def test_a_broken_gate_closes_the_score_and_shows_what_it_was() -> None:
    found = score_pairs(FULL, [GateCheck("same loss", False)])
    assert found.score == 0.0
    assert (found.ungated or 0.0) > 50


def test_a_missing_part_gives_no_score_unless_its_weight_is_zero() -> None:
    less = [p for p in FULL if p.scenario != "F8"]
    assert score_pairs(less, []).score is None
    weights = Weights("mine", {**dict.fromkeys(PARTS, 1.0), "J": 0.0})
    assert score_pairs(less, [], weights).score is not None


def test_the_interval_is_of_pairs_and_the_same_each_time() -> None:
    pairs = [replace(p, seed=seed, g=p.g - 0.01 * seed) for p in FULL for seed in range(5)]
    one, two = score_pairs(pairs, []), score_pairs(pairs, [])
    assert one.interval == two.interval
    assert one.g_interval[0] < one.vector.g < one.g_interval[1]


def test_the_literal_formula_is_infinite_without_a_loss() -> None:
    value, words = literal_formula(score_pairs(FULL, []))
    assert value == math.inf
    assert "1/s" in words


# --- the gate -----------------------------------------------------------------------------------
def calm() -> RunRecord:
    return record(*STEADY, scenario="F0")


def test_the_gate_holds_for_equal_losses_and_samples() -> None:
    damaged = record(*BACK, scenario="F10", faults=(3.5,), corrupted=1)
    checks = gate_checks([calm(), record(*BACK, faults=(3.5,)), damaged])
    assert [check.holds for check in checks] == [True, True, True]


def test_another_loss_breaks_the_gate() -> None:
    other = [replace(c, loss=(c.loss or 0.0) * 1.01) for c in commits(*BACK)]
    first, _, last = gate_checks([calm(), record(commits=tuple(other))])
    assert first.holds is False
    assert last.holds is None, "no checkpoint was damaged"


def test_a_damaged_checkpoint_that_was_loaded_breaks_the_gate() -> None:
    after = [c if c.t_s < 3.5 else replace(c, loss=9.0) for c in commits(*BACK)]
    damaged = record(scenario="F10", faults=(3.5,), commits=tuple(after), corrupted=1)
    assert gate_checks([calm(), damaged])[2].holds is False


# --- scenarios ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [n for n, each in SCENARIOS.items() if 1 in each.levels])
def test_a_scenario_is_frozen_and_shrinks_with_k(name: str) -> None:
    run = draw_scenario(name, 7, LEVEL_1)
    assert run == draw_scenario(name, 7, LEVEL_1)
    short = run.compressed(40.0)
    assert short.seconds == pytest.approx(run.seconds / 40)
    assert [e.t_s * 40 for e in short.events] == pytest.approx([e.t_s for e in run.events])
    there: set[str] = set()
    for event in run.events:
        if event.kind == "join":
            assert event.node not in there
            there.add(event.node)
        elif event.kind == "preempt":
            there.remove(event.node)


def test_a_degraded_link_is_as_late_and_as_slow_as_compressed_time() -> None:
    run = draw_scenario("F9", 7, LEVEL_1)
    (first, second) = (e for e in run.events if e.kind == "net")
    assert (first.node, second.node) == ("n1->rest", "n2->rest")
    assert (first.value, first.extra) == (5.7, {"rtt_ms": 153.0})
    short = next(e for e in run.compressed(20.0).events if e.kind == "net")
    assert (short.value, short.extra) == (114.0, {"rtt_ms": 7.65})


def test_a_step_waits_for_each_message_over_the_link() -> None:
    run = draw_scenario("F9", 7, LEVEL_1)
    link = next(e for e in run.events if e.kind == "net")
    assert gloo_ring_waits(4) == 12
    assert link_seconds(link, 3, 0.0) == pytest.approx(3 * 0.0765)
    payload = 5.7e9 / 8  # one second of the link
    assert link_seconds(link, 3, payload) == pytest.approx(3 * 0.0765 + 1)
    assert link_seconds(replace(link, value=0.0), 3, payload) == pytest.approx(3 * 0.0765)
    slow = [e for e in with_slow_nodes(run, 20.0, 3, 0.0).events if e.t_s > 0]
    assert [(e.kind, e.node, e.t_s) for e in slow] == [("slow", n, 240.0) for n in ("n1", "n2")]
    assert slow[0].value == pytest.approx(1 + 3 * 0.0765 / 20)


def test_scoring_seeds_are_none_of_the_seeds_for_tuning() -> None:
    assert min(scoring_seeds(5)) > 4
    assert scoring_seeds(3) == scoring_seeds(5)[:3]


def test_poisson_failures_come_every_twenty_to_sixty_steps() -> None:
    runs = [draw_scenario("F2", seed, LEVEL_1) for seed in range(30)]
    count = sum(len(interruptions(run.events)) for run in runs)
    steps = sum(run.seconds for run in runs) / LEVEL_1.step_s
    assert 20 <= steps / count <= 60


# --- level 0 ------------------------------------------------------------------------------------
def made(cost: CostModel) -> Policy:
    return holdfast(cost)


def test_a_simulated_policy_is_scored_without_files() -> None:
    pairs = level_0_pairs(made, ["F0", "F1", "F8", "F11", "F12"], [5])
    found = score_pairs(pairs, [])
    assert found.score is not None
    assert all(0 <= p.g <= 1.0 for p in pairs)
    by_name = {p.scenario: p for p in pairs}
    assert by_name["F0"].g > by_name["F8"].g
    for one, two in itertools.pairwise(level_0_pairs(made, ["F1", "F1"], [5])):
        assert one == two


# --- files from outside ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("border", "read", "value"),
    [
        (WEIGHTS, parse_weights, {"version": "v", "weights": dict.fromkeys(PARTS, 0.2)}),
        (REFERENCE, parse_reference, {"tokens_per_s": {"1": 12.0}}),
    ],
)
def test_a_key_that_is_not_known_is_refused(
    border: Border, read: Callable[[str, str], object], value: dict[str, object]
) -> None:
    assert read(json.dumps(value), "t.json")
    for name, more in unknown_entries(border).items():
        with pytest.raises(DataError, match=rf"t\.json.*{name}"):
            read(json.dumps(value | {name: more}), "t.json")


@pytest.mark.parametrize("rate", ["NaN", "Infinity", "0", "-1"])
def test_a_throughput_is_a_number_above_0(rate: str) -> None:
    with pytest.raises(DataError, match="no table of throughputs"):
        parse_reference(f'{{"tokens_per_s": {{"1": {rate}}}}}', "t.json")
