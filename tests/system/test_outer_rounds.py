"""Learners that train apart, from outside: the hash of every round is that of an undisturbed run,
whatever becomes of the workers that compute them.

A schedule is drawn from a seed. Even seeds draw a number of workers, the rounds after which one of
them gets SIGKILL or SIGSTOP, and the round after which all leave. The run then continues with
another number. Odd seeds draw two sites with a network of their own. Each schedule has a site that
leaves and returns, one whose link is cut and mended, and one whose link is slow.
`HOLDFAST_OUTER_SCHEDULES` says how many schedules are tried.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from holdfast.config.loading.load import load_config
from holdfast.core.data.lineage import split_effective
from holdfast.core.round_bytes import bytes_to_each
from holdfast.core.sharding.state_table import learner_shares
from holdfast.elastic.protocol.fault_orders import FaultOrder, FaultOrders
from holdfast.events import (
    ChangeLeftOut,
    GenerationStarted,
    LearnerChecked,
    NodesPresent,
    OuterRound,
    Record,
    SiteLinkMeasured,
    StepDone,
    WorkerLost,
    WorkerStarted,
)
from holdfast.launch.run.rounds import by_codec, sites_of, values_of_change
from holdfast.launch.run.runs import open_run
from holdfast.launch.start.facts import Facts
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.cost.rounds import CodecChoice, RoundModel, Site
from holdfast.plan.objective.recovery_costs import RUNG_S
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from holdfast_lab.chaos.network import DEVICE, Network, why_unavailable
from holdfast_lab.engine.round_replay import RoundRun, replay_rounds
from holdfast_lab.traces.events import TraceEvent, in_order
from tests.support.checkpoints import newest_tensors
from tests.support.commands import Outcome, apart, start, within
from tests.support.followed_run import FollowedRun
from tests.support.nodes import Nodes, nodes_of
from tests.support.ranks import wait_until

ROUNDS, LEARNERS, INNER_STEPS, BATCH = 20, 3, 8, 6
SETTINGS = (
    f"train.steps={ROUNDS}",
    f"train.batch_size={BATCH}",
    "train.evaluate.every=0",
    "train.schedule.warmup_steps=2",
    f"outer.learners={LEARNERS}",
    f"outer.every_steps={INNER_STEPS}",
    "checkpoint.every_steps=1000",
    "checkpoint.memory_every_steps=1",
    "cluster.threads_per_worker=1",
)
HOWS = {
    "none": (),
    "int4": ("outer.codec.name=int4",),
    "topk": ("outer.codec.name=topk",),
    "fragments": ("outer.fragments=2", f"outer.every_steps={2 * INNER_STEPS}", "model.layers=2"),
    "overlap": ("outer.overlap_steps=3",),
}
HOWS["both"] = (*HOWS["fragments"], *HOWS["overlap"])
"""By name, more settings; a round has as many inner steps with each."""
SITES = ("a", "b")
SAMPLES = f"{ROUNDS * BATCH * INNER_STEPS:,} samples in {ROUNDS} steps: none missing, none twice"


def hashes(folder: Path) -> dict[int, set[str]]:
    """The hashes of each round that any worker has written."""
    found: dict[int, set[str]] = {}
    for record in read_journal(FolderStore(folder)):
        if isinstance(record.event, OuterRound):
            found.setdefault(record.event.step, set()).add(record.event.sha256)
    return found


def _alone(run_file: Path, how: str) -> Path:
    """The folder of an undisturbed run, whose one worker computes all learners."""
    folder = run_file.parent / f"outer-{how}"
    if not folder.exists():
        run = FollowedRun(folder, _train(run_file, folder, 1, how))
        run.finish()
    return folder


def test_a_worker_that_is_killed_changes_no_round(run_file: Path, tmp_path: Path) -> None:
    """With fragments: two rounds, with a fragment each, send together what one round without
    fragments does, and what `holdfast plan` predicts for it."""
    folder, how = tmp_path / "killed", "both"
    run = FollowedRun(folder, _train(run_file, folder, 2, how))
    run.until(lambda record: _is_done(record, 4))
    os.kill(run.pids[1], signal.SIGKILL)
    run.finish()
    assert len(run.events(WorkerLost)) == 1
    _check(folder, _alone(run_file, how))
    hosts = {(e.rank, tuple(e.learners)) for e in run.events(OuterRound) if e.step == ROUNDS}
    assert sum(len(learners) for _, learners in hosts) == LEARNERS
    assert "equal" in within("audit", "replay", folder, "--step", "2").succeeds().out
    sent = {e.step: e.sent_bytes for e in run.events(OuterRound) if e.rank == 0 and e.step < 4}
    values = values_of_change(open_run(folder).config)
    (to_each,) = set(bytes_to_each(learner_shares(LEARNERS, 2), values, 0))
    assert sent[2] + sent[3] == pytest.approx(to_each, rel=0.02)
    assert max(sent[2], sent[3]) < 0.55 * to_each
    more = ("model.layers=2", "--sites", "2x1@100,20", "--measured", folder, "--json")
    plan = json.loads(within("plan", run_file, *SETTINGS, *more).succeeds().out)
    other = within("plan", run_file, *SETTINGS, "data.sequence_length=8", *more)
    other.refuses("--measured", "data.sequence_length")
    none, *coded = plan["rounds"]
    assert none["sent_bytes"] == to_each
    assert 0 < plan["inner_step_s"] < 60
    assert all(cost["leaving_bytes"] < none["leaving_bytes"] for cost in coded)


@pytest.mark.slow
def test_a_worker_that_sends_a_wrong_change_is_named(run_file: Path, tmp_path: Path) -> None:
    """It multiplies the change of one of its learners by -10, once. The round is applied without
    that learner, and `holdfast explain` names the rank."""
    folder, faults = tmp_path / "cheated", FaultOrders(tmp_path / "faults")
    faults.prepare()
    faults.arm(FaultOrder(1, "cheat", "wrong change", "changed", step=5, rank=1))
    more = ("outer.trust.checks=1", f"cluster.faults={faults.folder}", "layout.workers=2")
    run = FollowedRun(folder, start("train", run_file, f"folder={folder}", *SETTINGS, *more))
    run.finish()
    (out,) = run.events(ChangeLeftOut)
    assert (out.step, out.rank, out.count) == (5, 1, 1)
    verdicts = [event.verdict for event in run.events(LearnerChecked)]
    assert sorted(verdicts) == ["differs"] + ["equal"] * (ROUNDS * LEARNERS - 1)
    found = hashes(folder)
    assert all(len(of_round) == 1 for of_round in found.values())
    alone = hashes(_alone(run_file, "none"))
    assert [step for step in found if found[step] == alone[step]] == [1, 2, 3, 4]
    assert "rank 1 computed learner" in within("explain", folder).out


@pytest.mark.slow
def test_a_wrong_change_may_stop_the_run(run_file: Path, tmp_path: Path) -> None:
    folder, faults = tmp_path / "stopped", FaultOrders(tmp_path / "faults")
    faults.prepare()
    faults.arm(FaultOrder(1, "cheat", "wrong change", "changed", step=5, rank=1))
    words = "outer.trust.checks=1", "outer.trust.on_mismatch=stop", "layout.workers=2"
    more = (f"folder={folder}", *SETTINGS, f"cluster.faults={faults.folder}", *words)
    ended = apart("train", run_file, *more)
    assert ended.code not in (0, None)
    assert "round 5: rank 1" in ended.err + ended.out
    assert max(hashes(folder)) == 4, "the round was not applied"


def test_the_codec_of_auto_is_the_fastest_at_the_start_and_then_fixed(
    run_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "auto"
    words = (f"folder={folder}", *SETTINGS, "layout.workers=2", "outer.codec.name=auto")
    refused = within("plan", run_file, *words)
    assert refused.code == 2
    run = apart("train", run_file, *words, "train.steps=1", _sites(1)).succeeds()
    assert "outer.codec.name is int4" in run.err + run.out
    resolved = json.loads((folder / "resolved.json").read_text())
    assert resolved["config"]["outer"]["codec"]["name"] == "int4"
    facts = Facts(detect_hardware(), stored=resolved)
    chosen = by_codec(load_config(run_file, [*words, _sites(10**6)]), facts)
    assert chosen == {"outer.codec.name": ("int4", "that of the run")}


def _sites(mbit_s: int) -> str:
    return f"cluster.sites=[{{name: a, mbit_s: {mbit_s}}}, {{name: b, mbit_s: {mbit_s}}}]"


SCHEDULES = int(os.environ.get("HOLDFAST_OUTER_SCHEDULES", "4"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_any_schedule_of_losses_and_returns_has_the_same_rounds(
    run_file: Path, tmp_path: Path, seed: int
) -> None:
    how = list(HOWS)[seed // 2 % len(HOWS)]
    chooser, folder = random.Random(seed), tmp_path / "disturbed"
    if seed % 2:
        _disturb_sites(run_file, folder, how, chooser)
        _check(folder, _alone(run_file, how))
        _check_replay(folder)
        return
    points = sorted(chooser.sample(range(1, ROUNDS - 6), 4))
    leave_at = points.pop(chooser.randrange(len(points)))
    faults = {point: chooser.choice((signal.SIGKILL, signal.SIGSTOP)) for point in points}
    before = {point: fault for point, fault in faults.items() if point < leave_at}
    after = {point: fault for point, fault in faults.items() if point > leave_at}
    _disturb(run_file, folder, how, chooser, before, leave_at).succeeds()
    _disturb(run_file, folder, how, chooser, after, None).succeeds()
    lost = [r.event for r in read_journal(FolderStore(folder)) if isinstance(r.event, WorkerLost)]
    assert len(lost) >= len(faults)
    _check(folder, _alone(run_file, how))


def _disturb(
    run_file: Path,
    folder: Path,
    how: str,
    chooser: random.Random,
    faults: dict[int, signal.Signals],
    leave_at: int | None,
) -> Outcome:
    """Train with a number of workers that is drawn, and hit one of them after each of some
    rounds."""
    before = len(read_journal(FolderStore(folder))) if folder.exists() else 0
    process = _train(run_file, folder, chooser.choice((1, 2, 3)), how)
    run, due, pids, hit = FollowedRun(folder, process), dict(faults), dict[int, int](), 0
    for record in islice(run.records(), before, None):
        event = record.event
        if isinstance(event, GenerationStarted):  # a worker that stays has another rank
            came_from = enumerate(event.came_from or ())
            pids = {rank: pids[was] for rank, was in came_from if was is not None}
        if isinstance(event, WorkerStarted):
            pids[event.rank] = event.pid
        # Late reports of a generation that was already hit do not count.
        if not isinstance(event, OuterRound) or record.generation <= hit or not pids:
            continue
        if due and event.step >= min(due):
            try:
                os.kill(pids[chooser.choice(sorted(pids))], due[min(due)])
            except ProcessLookupError:
                continue  # it was replaced, and the journal will say so
            hit = record.generation
            del due[min(due)]
        elif not due and leave_at is not None and event.step >= leave_at:
            leave_at = None
            process.send_signal(signal.SIGTERM)
    ended = run.end()
    assert not due, f"the run ended before the rounds {sorted(due)}: {ended.err}"
    return ended


def _disturb_sites(run_file: Path, folder: Path, how: str, chooser: random.Random) -> None:
    """Train on two sites. After rounds that are drawn, a site leaves and returns, a link is cut and
    mended, and a link is slow from then on."""
    if reason := why_unavailable():
        pytest.skip(reason)
    gate = FaultOrders(folder.parent / "gate")
    gate.prepare(0)
    places = chooser.choice(((1, 1), (1, 2), (2, 1)))
    link = chooser.choice(("", ", mbit_s: 100"))
    rows = ", ".join(f"{{name: site-{name}, nodes: [{name}]{link}}}" for name in SITES)
    settings = (
        *(*SETTINGS, *HOWS[how], f"layout.workers={sum(places)}"),
        *(f"cluster.faults={gate.folder}", f"cluster.sites=[{rows}]"),
    )
    with Network() as network, nodes_of(run_file, folder, *settings) as sites:
        network.up(SITES)

        def begin(name: str) -> None:
            own = (*network.settings(name), f"cluster.places={places[SITES.index(name)]}")
            sites.start(name, settings=own, before=network.command(name))

        for name in SITES:
            begin(name)
        _open_until(gate, sites, partial(_has_round_of, sites, [set(SITES)], 0))
        for kind in chooser.sample(("leaves", "cut", "slow"), 3):
            for _ in range(chooser.randrange(3)):
                _open_one(gate, sites)
            name, left = chooser.sample(SITES, 2)
            if kind == "slow":
                rate = ("tbf", "rate", "3mbit", "burst", "8kb", "latency", "200ms")
                command = (*network.command(name), "tc", "qdisc", "add", "dev", DEVICE, "root")
                subprocess.run((*command, *rate), check=True)
                continue
            _open_one(gate, sites, waits=False)  # it hits a round that is open
            step = max(sites.losses())
            if kind == "cut":
                network.cut(name)
            elif chooser.random() < 0.5:
                sites.kill(name)
            else:
                sites.agents[name].terminate()
            # If the link is cut, either of the two may continue.
            alone = [{left}] if kind == "leaves" else [{name}, {left}]
            _open_until(gate, sites, partial(_has_round_of, sites, alone, step))
            if name in sites.agents and kind == "leaves":
                sites.agents.pop(name).communicate(timeout=60)
            begun = time.time()
            if kind == "cut":
                network.heal(name)
            else:
                begin(name)
            sites.wait_until(partial(_are_present, sites, begun), f"no {name}")
            step = max(sites.losses())
            _open_until(gate, sites, partial(_has_round_of, sites, [set(SITES)], step))
        gate.open_gate(ROUNDS)
        assert set(sites.end().values()) == {0}, sites.story()
        measured = sites.events(SiteLinkMeasured)
    assert bool(measured) == (not link)
    if measured:
        found = sites_of(load_config(run_file, list(settings)), measured=folder)
        assert {site.bandwidth for site in found} == {measured[-1].mbit_s * 1e6 / 8}


def _check_replay(folder: Path) -> None:
    """A simulation in which the sites come and go at the same rounds has the same host of each
    learner in each round."""
    records = list(split_effective(read_journal(FolderStore(folder)))[0])
    nodes = {
        record.generation: record.event.topology["nodes"]
        for record in records
        if isinstance(record.event, GenerationStarted)
    }
    real: dict[int, dict[str, tuple[int, ...]]] = {}
    for record in sorted(records, key=lambda record: getattr(record.event, "rank", 0)):
        event = record.event
        if isinstance(event, OuterRound) and event.learners:
            node = nodes[record.generation][event.rank]
            hosts = real.setdefault(event.step, {})
            hosts[node] = (*hosts.get(node, ()), *event.learners)
    config = open_run(folder).config
    places = {name: max(of.count(name) for of in nodes.values()) for name in SITES}
    sites = tuple(Site(f"site-{name}", places[name], 1e6) for name in SITES)
    shares = learner_shares(LEARNERS, sum(places.values()))
    model = RoundModel(shares, values_of_change(config), sites, inner_s=1.0)
    run = RoundRun(config, model, CodecChoice("none", 0), lambda n: f"site-{n.name}", RUNG_S, 0.0)
    events = [TraceEvent(0.0, "join", name, value=float(places[name])) for name in real[1]]
    for step in range(2, ROUNDS + 1):
        last = replay_rounds(run, in_order(events), 1e9).generations[-1]
        for name in real[step - 1].keys() ^ real[step].keys():
            rounds = step - last.first_round + (0.5 if name in real[step - 1] else -0.5)
            begins = last.started_s + rounds * last.round_s
            kind, value = ("fail", 0.0) if name in real[step - 1] else ("join", float(places[name]))
            wait = 0.0 if kind == "fail" else config.cluster.settle_seconds
            events.append(TraceEvent(begins - wait, kind, name, value=value))
    simulated = {
        generation.first_round + n: dict(generation.hosts)
        for generation in replay_rounds(run, in_order(events), 1e9).generations
        for n in range(generation.rounds)
    }
    assert simulated == real, events


def _open_one(gate: FaultOrders, sites: Nodes, *, waits: bool = True) -> None:
    """Let the run do one more round."""
    step = max(sites.losses(), default=0) + 1
    gate.open_gate(max(step, gate.gate or 0))
    if waits:
        sites.wait_step(step)


def _open_until(gate: FaultOrders, sites: Nodes, due: Callable[[], bool]) -> None:
    """Let the run do a round every two seconds until this is true."""
    while not due():
        assert (gate.gate or 0) < ROUNDS, sites.story()
        _open_one(gate, sites, waits=False)
        sites.wait_until(lambda: due() or max(sites.losses(), default=0) == gate.gate, "no round")
        with suppress(TimeoutError):
            wait_until(due, seconds=2.0)


def _has_round_of(sites: Nodes, memberships: list[set[str]], after: int) -> bool:
    """Return True if a generation of one of these memberships has done a later round."""
    done = [r for r in sites.records() if isinstance(r.event, StepDone) and r.event.step > after]
    return any(sites.nodes(number) in memberships for number in {r.generation for r in done})


def _are_present(sites: Nodes, begun: float) -> bool:
    """Return True if a coordinator has seen both sites since a wall time."""
    return any(
        isinstance(record.event, NodesPresent) and record.event.nodes.keys() >= set(SITES)
        for record in sites.records()
        if record.time > begun
    )


def _train(run_file: Path, folder: Path, workers: int, how: str) -> subprocess.Popen[str]:
    more = f"layout.workers={workers}", *HOWS[how]
    return start("train", run_file, f"folder={folder}", *SETTINGS, *more)


def _is_done(record: Record, step: int) -> bool:
    return isinstance(record.event, OuterRound) and record.event.step >= step


def _check(folder: Path, alone: Path) -> None:
    """Every round, all state at the end and the ledger are those of the undisturbed run."""
    expected = hashes(alone)
    assert sorted(expected) == list(range(1, ROUNDS + 1))
    assert all(len(found) == 1 for found in expected.values())
    assert len(set.union(*expected.values())) == ROUNDS, "the weights move in each round"
    assert hashes(folder) == expected
    assert newest_tensors(folder, ROUNDS) == newest_tensors(alone, ROUNDS)
    assert SAMPLES in within("data", "audit", folder).succeeds().out
