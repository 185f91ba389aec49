"""Admission of jobs: against formulas, against the runtime's own gangs, and rule by rule."""

from __future__ import annotations

import os
from itertools import pairwise
from math import exp, factorial, log
from pathlib import Path
from random import Random
from statistics import pstdev
from typing import Any

import pytest

from holdfast.plan.cost.collectives import allreduce_s
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.cluster_file import read_cluster
from holdfast.plan.hardware.link import Link
from holdfast_lab.admission.board import LABELS
from holdfast_lab.admission.engine import Run, Setup, admit_jobs
from holdfast_lab.admission.fabric import Fabric, example_cluster
from holdfast_lab.admission.jobs import Job, Rules, Team
from holdfast_lab.admission.outcome import interval, jain, outcome_of
from holdfast_lab.admission.policies import POLICIES
from holdfast_lab.admission.step_time import (
    BUCKET_BYTES,
    PARTS,
    SHIPPED_SIGMA,
    JitterProfile,
    StepModel,
    lognormal_profile,
    profile_of_trace,
)
from holdfast_lab.admission.workload import Workload, make_jobs, slow_nodes
from holdfast_lab.traces.node_changes import DEFAULTS
from holdfast_lab.traces.reading import read_stream
from holdfast_platform.clouds.gangs import GangBoard

INSIDE, OUTSIDE, UPLINK = Link(5e-6, 200e9), Link(1e-5, 10e9), Link(1e-5, 2.5e9)
AT_ONCE = Rules(start_s=0.0, resize_s=0.0)
STEADY = lognormal_profile(0.0)
ALL_POLICIES = pytest.mark.parametrize("name", sorted(POLICIES))


def cluster(nodes: int, devices: int = 8, rack: int = 0) -> Fabric:
    pool = NodePool(
        "pool", nodes, devices, "A100-80", INSIDE, OUTSIDE, "z", rack, across_racks=UPLINK
    )
    return Fabric(Cluster((pool,)))


def job(name: str, at: float, pods: int, seconds: float, **more: Any) -> Job:
    values: dict[str, Any] = {"team": "a", "devices": 8, "estimate_s": seconds} | more
    return Job(name=name, submit_s=at, pods=pods, seconds=seconds, **values)


def run(name: str, fabric: Fabric, jobs: list[Job], rules: Rules = AT_ONCE, **quotas: int) -> Run:
    teams = tuple(Team(team, quota) for team, quota in (quotas or {"a": fabric.devices}).items())
    return admit_jobs(
        Setup(fabric, teams, tuple(jobs), STEADY, rules=rules), POLICIES[name], Random(1)
    )


def started(found: Run) -> dict[str, float]:
    return {state.job.name: state.started_s or 0.0 for state in found.states}


def ended(found: Run) -> dict[str, float]:
    return {state.job.name: state.done_s for state in found.states}


# --- against formulas ---------------------------------------------------------------------------
def erlang_wait_s(servers: int, load: float, mean_s: float) -> float:
    """Mean wait of an M/M/c queue (Erlang's C formula). load: offered, below `servers`."""
    top = load**servers / factorial(servers) * servers / (servers - load)
    waits = top / (sum(load**k / factorial(k) for k in range(servers)) + top)
    return waits * mean_s / (servers - load)


def poisson_jobs(seed: int, number: int, every_s: float, mean_s: float) -> tuple[Job, ...]:
    """Jobs of one device with exponential gaps and durations: what the M/M/c queue assumes."""
    draw = Random(f"{seed}/admission poisson")
    at, jobs = 0.0, []
    for name in range(number):
        at += draw.expovariate(1 / every_s)
        seconds = draw.expovariate(1 / mean_s)
        jobs.append(Job(f"job{name}", "all", at, 1, 1, seconds, seconds))
    return tuple(jobs)


def mean_wait_s(number: int, seed: int) -> float:
    fabric = cluster(1)
    jobs = poisson_jobs(seed, number, every_s=100 / 6.0, mean_s=100.0)
    found = admit_jobs(
        Setup(fabric, (Team("all", 8),), jobs, STEADY, rules=AT_ONCE), POLICIES["gang"], Random(0)
    )
    return outcome_of(found).figures["wait_mean_h"] * 3600


def test_waits_of_single_devices_are_those_of_an_mmc_queue() -> None:
    waits = [mean_wait_s(4000, seed) for seed in range(2)]
    assert sum(waits) / len(waits) == pytest.approx(erlang_wait_s(8, 6.0, 100.0), rel=0.08)


@pytest.mark.slow
def test_waits_of_many_single_devices_are_those_of_an_mmc_queue_within_3_per_cent() -> None:
    waits = [mean_wait_s(40_000, seed) for seed in range(5)]
    assert sum(waits) / len(waits) == pytest.approx(erlang_wait_s(8, 6.0, 100.0), rel=0.03)


@pytest.mark.parametrize("pods", [2, 8, 32])
def test_the_slowest_of_exponential_draws_is_the_harmonic_number(pods: int) -> None:
    points = 20_000
    ratios = tuple(-log(1 - (k + 0.5) / points) for k in range(points))
    found = JitterProfile(ratios, "exponential").expected_max((1.0,) * pods)
    assert found == pytest.approx(sum(1 / k for k in range(1, pods + 1)), rel=2e-3)


def test_the_slowest_of_a_group_with_slow_nodes_is_the_mean_of_draws() -> None:
    profile, draw = lognormal_profile(0.2), Random(3)
    factors = (1.0, 1.0, 1.3, 1.6)
    drawn = [max(f * draw.choice(profile.ratios) for f in factors) for _ in range(40_000)]
    assert profile.expected_max(factors) == pytest.approx(sum(drawn) / len(drawn), rel=5e-3)


def test_a_runs_amplification_is_the_order_statistic_of_its_jitter() -> None:
    fabric, jitter = cluster(8), lognormal_profile(0.3)
    jobs = (job("one", 0.0, 8, 1000.0),)
    found = admit_jobs(Setup(fabric, (Team("a", 64),), jobs, jitter), POLICIES["gang"], Random(0))
    draw = Random(5)
    maxima = [max(draw.lognormvariate(0, 0.3) for _ in range(8)) for _ in range(20_000)]
    expected = sum(maxima) / len(maxima) / exp(0.3**2 / 2)
    assert outcome_of(found).figures["amplification"] == pytest.approx(expected, rel=0.01)


def test_a_slow_node_multiplies_the_entire_groups_computing() -> None:
    fabric = cluster(4)
    model = StepModel(fabric, STEADY, {2: 1.5})
    one = job("one", 0.0, 4, 100.0, compute_s=2.0)
    parts = dict(zip(PARTS, model.step(one, [0, 1, 2, 3]).parts, strict=True))
    assert parts["slow_node"] == pytest.approx(1.0)
    assert parts["useful"] == 2.0
    assert parts["jitter"] == 0.0


def test_a_step_across_racks_costs_what_the_planners_links_say() -> None:
    fabric = cluster(8, rack=4)
    model = StepModel(fabric, STEADY, {})
    one = job("one", 0.0, 4, 100.0, compute_s=0.6, gradient_bytes=4e9, microbatches=4)
    parts = dict(zip(PARTS, model.step(one, [0, 1, 4, 5]).parts, strict=True))
    last = BUCKET_BYTES / 8
    hidden = 0.6 / 4 * 2 / 3

    def exposed(link: Link) -> float:
        rest = max(0.0, allreduce_s(link, 4e9 - last, 4) - hidden)
        return allreduce_s(link, last, 4) + rest

    assert parts["collective"] == pytest.approx(exposed(OUTSIDE))
    assert parts["collective"] + parts["slow_link"] == pytest.approx(exposed(UPLINK))


@pytest.mark.skipif("HOLDFAST_DATA" not in os.environ, reason="needs the public traces")
def test_the_shipped_jitter_is_like_that_of_the_public_trace() -> None:
    path = Path(os.environ["HOLDFAST_DATA"]) / "jitter/bytedance-straggler/data/trace-SE.parquet"
    profile = profile_of_trace(read_stream(path.read_bytes(), path.name, DEFAULTS))
    assert pstdev(log(ratio) for ratio in profile.ratios) == pytest.approx(SHIPPED_SIGMA, rel=0.05)
    for pods in (2, 8):
        alone = (1.0,) * pods
        shipped = lognormal_profile().expected_max(alone)
        assert profile.expected_max(alone) == pytest.approx(shipped, rel=0.04)


# --- what holds for every policy ----------------------------------------------------------------
def busy_setup(seed: int) -> Setup:
    fabric = Fabric(example_cluster(zones=2, racks=2, nodes=4))
    teams = (Team("red", 64), Team("green", 40), Team("blue", 24))
    jobs = make_jobs(Workload(load=1.2, days=1.5), fabric, seed)
    jitter = lognormal_profile()
    return Setup(fabric, teams, jobs, jitter, slow_nodes(fabric, seed, 0.2), Rules())


@ALL_POLICIES
def test_all_devices_and_all_steps_are_accounted_for(name: str) -> None:
    setup = busy_setup(4)
    found = admit_jobs(setup, POLICIES[name], Random(0))
    model = StepModel(setup.fabric, setup.jitter, setup.slow)
    board = found.observer.board
    assert board.free == [node.devices for node in setup.fabric.nodes]
    assert set(board.used.values()) == {0}
    for state in found.states:
        each = state.job
        steps = each.seconds / model.ideal_s(each)
        assert state.ledger.seconds["useful"] == pytest.approx(
            steps * each.compute_s * each.size, rel=1e-6
        )
        assert min(state.ledger.seconds.values()) >= -1e-6


@ALL_POLICIES
def test_labels_sum_to_the_devices_that_were_held(name: str) -> None:
    jobs = [job(f"j{k}", 0.0, 1 + k % 3, 500.0 + 70 * k, priority=k % 2) for k in range(12)]
    rules = Rules(start_s=30.0, save_s=200.0)
    found = run(name, cluster(4, rack=2), jobs, rules, a=20, b=12)
    held = sum(state.ledger.held for state in found.states)
    assert held == pytest.approx(found.observer.used_s)
    assert set(found.states[0].ledger.seconds) == set(LABELS)


@ALL_POLICIES
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    one, two = (admit_jobs(busy_setup(2), POLICIES[name], Random(9)) for _ in range(2))
    assert outcome_of(one) == outcome_of(two)


# --- rule by rule -------------------------------------------------------------------------------
def test_partial_groups_deadlock_pod_by_pod_and_gangs_do_not() -> None:
    jobs = (job("one", 0.0, 3, 100.0), job("two", 0.0, 3, 100.0))
    setup = Setup(cluster(4), (Team("a", 32),), jobs, STEADY, rules=AT_ONCE)
    pods = [admit_jobs(setup, POLICIES["pods"], Random(seed)) for seed in range(12)]
    gang = admit_jobs(setup, POLICIES["gang"], Random(0))
    # Two pods each: 9 of 15 equally likely ways to place four of six pods.
    blocked = [each for each in pods if each.observer.deadlocks]
    assert 3 <= len(blocked) <= 11
    for each in blocked:
        assert each.observer.deadlock_s == pytest.approx(each.observer.deadlocks * 4 * 8 * 600.0)
        assert sum(state.timeouts for state in each.states) >= 2
        assert each.end_s > 700
    assert gang.observer.deadlocks == 0
    assert ended(gang) == pytest.approx({"one": 100.0, "two": 200.0})


def test_gangs_start_in_the_order_of_the_runtimes_own_controller() -> None:
    draw = Random(7)
    jobs = [job(f"{k:02}", 0.0, draw.randint(1, 4), 100.0 + 7.1 * k) for k in range(25)]
    found = started(run("gang", cluster(4), jobs))
    board, clock = GangBoard(queue_ahead=1), 0.0
    for number in range(4):
        board.add_host(f"h{number}", "g")
    for each in jobs:
        board.submit({"g": each.pods})
    begun, ends = dict[str, float](), dict[int, float]()
    while len(begun) < len(jobs) or ends:
        for number in board.advance():
            begun[jobs[number].name] = clock
            ends[number] = clock + jobs[number].seconds
        first = min(ends, key=lambda number: ends[number])
        clock = ends.pop(first)
        for host in board.gangs[first].hosts:
            board.end(host, first, 0)
    assert found == pytest.approx(begun)


def test_a_team_takes_its_quota_back_from_a_borrower() -> None:
    jobs = [job("lent", 0.0, 4, 5000.0), job("own", 1000.0, 2, 100.0, team="b")]
    found = run("gang", cluster(4), jobs, Rules(start_s=0.0, save_s=300.0), a=16, b=16)
    lent = found.states[0]
    assert started(found)["own"] == 1000.0
    assert lent.evictions == 1
    assert lent.ledger.seconds["lost"] == pytest.approx(100.0 * 32)  # since the save at 900 s
    assert lent.done_s == pytest.approx(1100.0 + 4100.0)


def test_without_reclaim_the_owner_waits_and_hard_quotas_lend_nothing() -> None:
    jobs = [job("lent", 0.0, 4, 5000.0), job("own", 1000.0, 2, 100.0, team="b")]
    waits = run("gang", cluster(4), jobs, Rules(start_s=0.0, reclaims=False), a=16, b=16)
    teams = (Team("a", 16, 0), Team("b", 16, 0))
    half = (job("half", 0.0, 2, 100.0), job("more", 0.0, 1, 100.0))
    hard = admit_jobs(
        Setup(cluster(4), teams, half, STEADY, rules=AT_ONCE), POLICIES["gang"], Random(0)
    )
    assert started(waits)["own"] == pytest.approx(5000.0)
    assert started(hard)["more"] == pytest.approx(100.0)


def test_a_team_of_higher_priority_preempts_its_own_jobs_only() -> None:
    jobs = [
        job("low", 0.0, 2, 1000.0),
        job("other", 0.0, 2, 1000.0, team="b"),
        job("high", 500.0, 2, 100.0, priority=1),
    ]
    found = run("gang", cluster(4), jobs, AT_ONCE, a=16, b=16)
    assert started(found)["high"] == 500.0
    assert [state.evictions for state in found.states] == [1, 0, 0]


def test_an_elastic_job_shrinks_for_an_owner_and_grows_again() -> None:
    jobs = [job("lent", 0.0, 4, 4000.0, min_pods=1), job("own", 1000.0, 2, 1000.0, team="b")]
    found = run("elastic", cluster(4), jobs, AT_ONCE, a=16, b=16)
    lent = found.states[0]
    assert started(found)["own"] == 1000.0
    assert (lent.evictions, lent.resizes) == (0, 2)
    assert lent.ledger.seconds["lost"] == 0.0
    # Half of the pods for 1,000 s: half of the work of that time is left for later.
    assert lent.done_s == pytest.approx(4500.0)


def test_backfill_keeps_the_first_waiting_jobs_place_and_lets_short_ones_pass() -> None:
    jobs = [
        job("runs", 0.0, 3, 1000.0),
        job("large", 1.0, 4, 100.0),
        job("long", 2.0, 1, 2000.0),
        job("short", 3.0, 1, 500.0),
    ]
    backfill = started(run("backfill", cluster(4), jobs))
    gang = started(run("gang", cluster(4), jobs))
    assert backfill["large"] == pytest.approx(1000.0)
    assert backfill["short"] == 3.0
    assert backfill["long"] == pytest.approx(1100.0)
    assert gang["large"] == pytest.approx(2002.0)


def test_near_pods_stand_in_one_rack_and_small_ones_share_a_node() -> None:
    jobs = [job("small1", 0.0, 1, 900.0, devices=2), job("small2", 0.0, 1, 900.0, devices=2)]
    jobs += [job("wide", 1.0, 4, 100.0, gradient_bytes=4e9)]
    near = run("topology", cluster(8, rack=4), jobs)
    far = run("gang", cluster(8, rack=4), jobs)
    assert near.states[2].ledger.seconds["slow_link"] == 0.0
    assert far.states[2].ledger.seconds["slow_link"] > 0.0
    assert ended(far)["wide"] > ended(near)["wide"]
    assert near.observer.fragment_s < far.observer.fragment_s


def test_zones_are_crossed_last() -> None:
    pools = tuple(NodePool(f"p{k}", 2, 8, "A100-80", INSIDE, OUTSIDE, f"z{k}") for k in range(2))
    fabric = Fabric(Cluster(pools))
    slow = fabric.ring_link([1, 2])
    assert slow.bandwidth < OUTSIDE.bandwidth
    assert fabric.ring_link([0, 1]) == fabric.best_link(2, 8) == OUTSIDE
    assert fabric.best_link(3, 8) == slow


@pytest.mark.parametrize(("nodes", "devices"), [(3, 8), (5, 4), (1, 1)])
def test_jobs_are_drawn_for_clusters_of_any_size(nodes: int, devices: int) -> None:
    fabric = Fabric(read_cluster(f"{nodes}x{devices}xA100-80"))
    jobs = make_jobs(Workload(days=60), fabric, seed=0)
    assert jobs
    assert max(job.pods for job in jobs) <= nodes
    assert max(job.devices for job in jobs) == devices


def test_drawn_jobs_offer_the_load_that_was_asked_for() -> None:
    fabric = Fabric(example_cluster())
    found = [make_jobs(Workload(load=0.8, days=20), fabric, seed) for seed in range(4)]
    offered = [sum(j.size * j.seconds for j in jobs) / (20 * 86400 * 512) for jobs in found]
    assert sum(offered) / 4 == pytest.approx(0.8, rel=0.15)
    assert all(a.submit_s <= b.submit_s for a, b in pairwise(found[0]))
    assert all(j.seconds <= j.estimate_s <= 3 * j.seconds for j in found[0])


def test_figures_over_seeds_are_those_of_the_textbook() -> None:
    assert jain([1.0, 1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert interval([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / 3**0.5)
