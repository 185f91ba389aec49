"""Each failure mode is named with its rank and node, from journals as agents write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.core.json_parsing import parse_json
from holdfast.events import (
    ChangeLeftOut,
    CheckpointRejected,
    Event,
    GenerationStarted,
    LearnerChecked,
    MajorityLacked,
    NonFinite,
    NoticeReceived,
    Record,
    RunFailed,
    SourceRejected,
    StateDiffers,
    WorkerHeld,
    WorkerLost,
    WorkerPaced,
    WorkerReady,
    WorkerStarted,
)
from holdfast.layout import Layout, place_layout
from holdfast.report.causes.explain import explain
from holdfast.report.causes.finding import MODES, Evidence, Finding, Mode
from tests.support.commands import within
from tests.support.journal_builder import Scribe
from tests.support.ranks import ROOT

GOLDEN = ROOT / "tests" / "golden" / "runs"
NODES = ("a", "a", "b", "b")
HEARD = "not heard for 1.5 s"
PEER = "a peer was lost during the reduction: Connection closed by peer"


def trained(steps: int = 5, layout: Layout | None = None, nodes: Sequence[str] = NODES) -> Scribe:
    """A run whose ranks 2 and 3 lie on node b."""
    run = Scribe(workers=len(nodes))
    run.start()
    begin(run, "start", layout=layout, nodes=nodes)
    run.steps(1, steps)
    return run


def begin(
    run: Scribe,
    reason: str,
    cause: str = "",
    *,
    layout: Layout | None = None,
    nodes: Sequence[str] = NODES,
    came_from: list[int | None] | None = None,
) -> None:
    topology = place_layout(layout or Layout(len(nodes)), run.generation, tuple(nodes)).to_json()
    start = GenerationStarted(
        topology, reason, came_from=came_from, cause=cause, step=run.last_step
    )
    run.write(start, after=0.25)
    if came_from is None:
        for rank, node in enumerate(nodes):
            run.write(WorkerStarted(rank, 100 + rank, node), after=0.01)


def restart(
    run: Scribe, reason: str, cause: str = "", nodes: Sequence[str] = NODES
) -> Sequence[Finding]:
    run.open_generation()
    begin(run, reason, cause, nodes=nodes)
    run.steps(run.last_step + 1, run.last_step + 2)
    return explain(run.records)


def held(rank: int, why: str) -> Event:
    return WorkerHeld(rank, 5, None, why)


def after(run: Scribe, *events: Event) -> Scribe:
    for event in events:
        run.write(event, after=0.1)
    return run


def only(findings: Sequence[Finding], mode: Mode, rank: int | None, node: str = "b") -> Finding:
    (finding,) = findings
    assert (finding.mode, finding.rank, finding.node) == (mode, rank, node)
    assert finding.evidence
    return finding


REFUSED = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to"


def test_memory_that_was_refused() -> None:
    run = after(trained(), held(2, REFUSED), held(3, PEER), held(0, PEER))
    finding = only(restart(run, "error", f"worker 2: {REFUSED}"), Mode.OUT_OF_MEMORY, 2)
    assert finding.is_certain
    assert finding.evidence[0].place == "1/agent/6"


def test_a_killed_worker_whose_log_says_that_memory_was_short() -> None:
    run = after(trained(), WorkerLost(2, 102, "exit 1: it said nothing", "exit", "b"))
    run.open_generation()
    begin(run, "worker_lost", "worker 2: exit 1: it said nothing")
    line = Evidence("logs/0000000001/rank2.log", "MemoryError")
    finding = only(explain(run.records, lambda g, r: [line]), Mode.OUT_OF_MEMORY, 2)
    assert line in finding.evidence


def test_a_signal_says_nothing_about_its_reason() -> None:
    run = after(trained(), WorkerLost(3, 103, "SIGKILL", "exit", "b"), held(1, PEER))
    finding = only(restart(run, "worker_lost", "worker 3: SIGKILL"), Mode.WORKER_CRASH, 3)
    assert not finding.is_certain
    assert MODES[finding.mode].would_tell in finding.sentence


def test_a_crash_before_the_first_step() -> None:
    run = after(trained(steps=0), held(2, "ValueError: no such shape"), held(3, PEER))
    only(restart(run, "error", "worker 2: ValueError: no such shape"), Mode.STARTUP_CRASH, 2)


def test_a_run_that_fails_before_its_first_step() -> None:
    run = after(trained(steps=0), RunFailed("worker 1 refused to start"))
    only(explain(run.records), Mode.STARTUP_CRASH, None, "")


def test_a_node_that_left_after_a_notice() -> None:
    run = after(trained(), NoticeReceived(30.0, ["b"], False, "notice"))
    for rank in range(4):
        run.write(held(rank, "paused after step 5"))
    finding = only(restart(run, "notice", nodes=("a", "a")), Mode.PREEMPTION, None)
    assert "30 s" in finding.evidence[0].text


def test_a_node_that_was_lost_before_its_notice_was_over() -> None:
    run = after(trained(nodes=("a", "b")), NoticeReceived(30.0, ["b"], False, "notice"))
    after(run, WorkerLost(1, 0, HEARD, "heartbeat", "b"), held(0, PEER))
    only(restart(run, "node_lost", nodes=("a",)), Mode.PREEMPTION, 1)


@pytest.mark.parametrize("is_sure", [True, False])
def test_a_node_that_was_not_heard(is_sure: bool) -> None:
    run = trained(nodes=("a", "b", "c"))
    if is_sure:
        run.write(MajorityLacked("b", ["b"], ["a", "b", "c"], 30.0))
    after(run, WorkerLost(1, 0, HEARD, "heartbeat", "b"), held(0, PEER))
    cause = f"node b was lost ({HEARD})"
    found = restart(run, "node_lost", cause, nodes=("a", "c"))
    assert only(found, Mode.NETWORK_TIMEOUT, 1).is_certain == is_sure


def test_a_coordinator_that_hears_no_other_node() -> None:
    run = trained(nodes=("a", "b", "c"))
    for rank, node in ((2, "c"), (0, "a")):
        lost = WorkerLost(rank, 0, HEARD, "heartbeat", node)
        run.records.append(Record(run.generation, "agent.b", rank, run.at, lost))
    found = restart(run, "node_lost", f"node c was lost ({HEARD})", nodes=("b",))
    assert not only(found, Mode.NETWORK_TIMEOUT, None).is_certain


def test_a_node_whose_agent_ended() -> None:
    run = after(
        trained(nodes=("a", "b")), WorkerLost(1, 0, "its agent has ended", "heartbeat", "b")
    )
    found = restart(run, "node_lost", "node b was lost (its agent has ended)", nodes=("a",))
    finding = only(found, Mode.WORKER_CRASH, 1)
    assert not finding.is_certain
    assert finding.step == 5, "an agent's record has the generation's first step"


def test_a_rank_that_is_stuck_in_an_exchange_and_one_that_hangs() -> None:
    for phase, mode in (("reduce", Mode.NETWORK_TIMEOUT), ("compute", Mode.HANG)):
        cause = f"no progress for 1.5 s in step 6, {phase}, while others wait for it"
        run = after(trained(), WorkerLost(2, 102, cause, "behind", "b"), held(1, PEER))
        only(restart(run, "hang", f"worker 2: {cause}"), mode, 2)


def test_checkpoints_that_were_refused() -> None:
    run = trained()
    run.stop()
    run.start(resumed=True)
    name = "data/0000000001/0000000004-rank00002-0.safetensors"
    why = f"{name}: checksum does not match in bytes [0, 37632)"
    after(run, SourceRejected(2, "run store", "commits/3.json", "a bad byte", step=3))
    begin(run, "resume")
    after(run, held(1, why), CheckpointRejected("commits/4.json", why, step=4))
    damaged, refused = explain(run.records)
    assert (refused.mode, refused.step, refused.rank) == (Mode.CHECKPOINT_CORRUPTION, 4, 2)
    assert (damaged.mode, damaged.step, damaged.rank) == (Mode.CHECKPOINT_CORRUPTION, 3, None)


def test_a_session_without_an_end_that_was_resumed() -> None:
    run = trained()
    lost_at = run.at
    run.start(resumed=True, pause=60.0)
    begin(run, "resume")
    run.stop()
    run.start(resumed=True)
    finding = only(explain(run.records), Mode.RUN_LOST, None, "")
    assert (finding.step, finding.time, finding.is_certain) == (5, lost_at, False)
    assert [item.place for item in finding.evidence] == ["1/rank0/4", "2/agent/0"]


def test_steps_and_states_that_came_out_wrong() -> None:
    why = "step 6: a gradient is not finite on rank 2"
    run = after(trained(), NonFinite(2, "a gradient", "b", step=6), held(2, why), held(0, why))
    only(restart(run, "non_finite", why), Mode.DIVERGENCE, 2)
    only(
        explain(after(trained(), StateDiffers([1], ["head"], True)).records),
        Mode.DIVERGENCE,
        1,
        "a",
    )
    left_out = [ChangeLeftOut(2, 1, "a", "a check found another change", n) for n in (1, 2)]
    only(explain(after(trained(), *left_out).records), Mode.DIVERGENCE, 1, "a")
    checked = LearnerChecked(2, 0, 2, "equal", [1])
    only(explain(after(trained(), checked).records), Mode.DIVERGENCE, 1, "a")


@pytest.mark.parametrize(
    ("waited", "work", "mode"),
    [(0.1, 1.0, Mode.STRAGGLER), (0.8, 1.0, Mode.CONTENTION), (0.9, 3.9, Mode.DATA_SKEW)],
)
def test_what_makes_a_worker_slow(waited: float, work: float, mode: Mode) -> None:
    run = trained()
    run.open_generation()
    begin(run, "worker_joined", came_from=[0, 1, 3, 2])
    paced = WorkerPaced("b", 103, "slow", 4.0, "4 times slower", waited, work)
    # The process of rank 3 has rank 2 in this generation.
    only(explain(after(run, paced, paced).records), mode, 2)


def test_a_placement_that_sends_each_layer_between_nodes() -> None:
    layout = Layout(dp_replicate=2, tp=2)
    good = trained(layout=layout)
    assert explain(good.records) == []
    bad = trained(layout=layout, nodes=("a", "a", "b", "c"))
    finding = only(explain(bad.records), Mode.WRONG_TOPOLOGY, 3, "c")
    bad.open_generation()
    begin(bad, "worker_joined", layout=layout, nodes=("a", "a", "b", "c"))
    assert explain(bad.records) == [finding], "once, though the next generation has it too"
    single = trained(layout=layout, nodes=("a", "b", "c", "d"))
    assert explain(single.records) == [], "no node has two places"


def test_ranks_on_unlike_processors() -> None:
    run = trained()
    for rank in range(4):
        kind = "x86_64 AVX2" if rank == 3 else "x86_64 AVX512"
        run.write(WorkerReady(rank, 0.1, processor=kind))
    only(explain(run.records), Mode.WRONG_TOPOLOGY, 3)


def test_a_healthy_run_has_no_findings() -> None:
    run = trained()
    for rank in range(4):
        run.write(held(rank, "paused after step 5"))
    assert restart(run, "node_joined") == []


def test_every_mode_has_a_runbook() -> None:
    assert MODES.keys() == set(Mode)
    for text in MODES.values():
        assert (ROOT / "docs" / "runbooks" / f"{text.runbook}.md").is_file()


def test_the_command_explains_a_run_whose_nodes_were_killed(tmp_path: Path) -> None:
    """A golden run: nodes were lost, and no record says whether they or the network failed."""
    shutil.copytree(GOLDEN, tmp_path / "runs")
    run = tmp_path / "runs" / "nodes"
    printed = within("explain", run).succeeds().out
    findings = parse_json(within("explain", run, "--json").succeeds().out)["findings"]
    assert findings
    assert within("explain", run).out == printed, "the same journal gives the same bytes"
    assert json.dumps(findings)
    for finding in findings:
        assert finding["node"]
        assert finding["cause"] in printed
        assert finding["evidence"][0]["place"] in printed
