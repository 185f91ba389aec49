"""Sites that come and go in a simulation of rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.core.sharding.state_table import learner_shares
from holdfast.plan.cost.rounds import CodecChoice, RoundModel, Site
from holdfast.plan.objective.recovery_costs import RUNG_S
from holdfast_lab.engine.round_replay import RoundHistory, RoundRun, replay_rounds
from holdfast_lab.traces.events import TraceEvent, in_order
from tests.support.commands import within, write_run_file
from tests.support.tiny_training import tiny

CODEC = CodecChoice("int8", 1_000_000)
START = [TraceEvent(0.0, "join", name, value=1.0) for name in "ab"]
ROUND_S = 3 * 10 * 1.0 + 2.0
"""Of two sites, the first with two of three learners, whose payloads take 1 s each; and alone."""


def replay(*events: TraceEvent, until_s: float = 1e4, **changes: object) -> RoundHistory:
    given = {"outer__learners": 3, "outer__every_steps": 10, "checkpoint__memory_every_steps": 1}
    config = tiny(train__steps=20, layout__workers=2, **(given | changes))
    sites = tuple(Site(f"site-{name}", 1, 1e6, usd_per_gb=0.1) for name in "ab")
    model = RoundModel(learner_shares(3, 2), 1_000_000, sites, 1.0, usd_per_hour=7.2)
    run = RoundRun(config, model, CODEC, lambda node: f"site-{node.name}", RUNG_S, 5.0)
    return replay_rounds(run, in_order([*START, *events]), until_s)


def test_rounds_of_sites_that_stay_cost_what_the_plan_says() -> None:
    history = replay()
    (only,) = history.generations
    assert only.hosts == {"a": (0, 1), "b": (2,)}
    assert history.rounds == 20
    assert history.wall_s == pytest.approx(5.0 + 20 * only.round_s)
    assert history.link_bytes == {"site-a": 20 * 2e6, "site-b": 20 * 1e6}
    assert history.link_usd == pytest.approx(20 * 3e6 * 0.1 / 1e9)
    assert history.machine_usd == pytest.approx(7.2 * history.wall_s / 3600)
    assert history.hosted_elsewhere == 0


def test_the_learners_of_a_lost_site_continue_on_the_other_one_until_it_returns() -> None:
    begins = 5.0 + 4.5 * replay().generations[0].round_s
    lost = TraceEvent(begins, "fail", "b")
    back = TraceEvent(begins + 50, "join", "b", value=1.0)
    history = replay(lost, back)
    first, alone, again = history.generations
    assert (first.rounds, alone.first_round, alone.reason) == (4, 5, "lost")
    assert alone.hosts == {"a": (0, 1, 2)}
    assert (again.reason, again.hosts) == ("joined", {"a": (0, 1), "b": (2,)})
    assert (history.sites_lost, history.sites_regained) == (1, 1)
    assert history.hosted_elsewhere == alone.rounds
    assert history.rounds == 20
    whole = history.training_s + history.repeated_s + history.waited_s + history.stopped_s
    assert whole == pytest.approx(history.wall_s)


def test_without_snapshots_a_loss_repeats_the_rounds_since_the_save() -> None:
    seconds = replay().generations[0].round_s
    lost = TraceEvent(5.0 + 7.5 * seconds, "fail", "b")
    history = replay(lost, checkpoint__memory_every_steps=0, checkpoint__every_steps=5)
    _, alone = history.generations
    assert (alone.repeated, alone.first_round) == (2, 6)
    assert history.repeated_s == pytest.approx(2 * seconds)


def test_with_too_few_nodes_the_run_stops_until_one_returns() -> None:
    lost = TraceEvent(100.0, "fail", "a")
    back = TraceEvent(500.0, "join", "a", value=1.0)
    history = replay(lost, back, cluster__min_nodes=2, until_s=2000)
    assert history.stopped_s == pytest.approx(500 + 5 - 100, rel=0.05)


@pytest.mark.slow
def test_the_command_has_the_figures_of_the_plan(tmp_path: Path) -> None:
    path = write_run_file(tmp_path)
    within("data", "prepare", path).succeeds()
    rows = "[{name: a, nodes: [n0], mbit_s: 10}, {name: b, nodes: [n1], mbit_s: 10}]"
    words = (str(path), "outer.learners=2", f"cluster.sites={rows}", "train.steps=50")
    (tmp_path / "t.csv").write_text("0,add,n0\n0,add,n1\n900000,remove,n1\n")
    plan = json.loads(within("plan", *words, "--json").succeeds().out)
    found = within("simulate", *words, "--trace", str(tmp_path / "t.csv"), "--json")
    simulated = json.loads(found.succeeds().out)
    open_links = rows.replace(", mbit_s: 10", "")
    unknown = within("plan", str(path), "outer.learners=2", f"cluster.sites={open_links}")
    unknown.refuses("the link of a is not known", "--measured RUN")
    none = plan["rounds"][0]
    assert simulated["rounds"] == 50
    left = sum(simulated["link_bytes"].values())
    assert left == pytest.approx(50 * none["leaving_bytes"])
    assert simulated["generations"][0]["hosts"] == {"n0": [0], "n1": [1]}
    within("simulate", *words, "--trace", str(tmp_path / "t.csv"), "--policy", "restart").refuses(
        "--policy has no effect"
    )
