"""One node's fault is that node's: the other nodes continue, with the losses of a run without it.

A node that lacks a folder, a disk or a permission ends with its sentence. A helper process that is
stopped (SIGSTOP) delays no node, even if a worker is lost meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import GenerationStarted, MajorityLacked, RunStopped, StepDone, WorkerStarted
from tests.support.commands import start, within
from tests.support.marks import in_campaign
from tests.support.nodes import QUICK, Nodes, in_bucket, losses_of_one_worker, nodes_of, prepared
from tests.support.processes import children_of, stop
from tests.support.small_disk import has_namespaces

STEPS = 40
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=10",
)
THREE = ("layout.workers=3", "cluster.gather_seconds=120")
MOUNT = 'mount -t tmpfs -o "$0" none "$1" && shift && exec "$@"'
FAULTS = {
    "missing": ("", "there is no folder"),
    "a file": ("", "there is no folder"),
    "full": ("size=16k", "make room and run the same command again"),
    "read-only": ("ro", "cannot be written (Read-only file system)"),
    "no right": ("", "cannot be written (Permission denied)"),
}
QUICKLY_S = 10.0
"""Seconds until the next step: it takes 1 on a quiet machine, and took 25 to 75."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(run_file: Path) -> dict[int, float]:
    return losses_of_one_worker(run_file, *SETTINGS)


def _start_faulty(nodes: Nodes, fault: str, folder: Path, name: str) -> None:
    """Start a node whose folder for states has the fault."""
    options, _ = FAULTS[fault]
    before: list[str] = []
    place = Path("/sys") if fault == "no right" else folder
    if fault == "a file":
        folder.write_text("")
    if options:
        folder.mkdir()
        before = ["unshare", "--mount", "sh", "-c", MOUNT, options, str(folder)]
    nodes.start(name, settings=[f"train.memory.folder={place}"], before=before)


@pytest.mark.parametrize("returns", [in_campaign(False), True])
@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[pytest.mark.slow] * (f != "missing")) for f in FAULTS]
)
def test_a_node_that_cannot_work_ends_and_the_other_nodes_continue(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path, fault: str, returns: bool
) -> None:
    """In the first generation, or joining one that trains."""
    if os.geteuid() != 0 or not has_namespaces():
        pytest.skip("mounts need root")
    good, gate = tmp_path / "good", FaultOrders(tmp_path / "gate")
    good.mkdir()
    gate.prepare(20 if returns else STEPS)
    settings = (*SETTINGS, *THREE, "cluster.min_nodes=2", "train.memory.optimizer=file")
    wait = ("cluster.gather_seconds=1",) * returns
    with nodes_of(
        run_file, tmp_path / "run", *settings, *wait, f"cluster.faults={gate.folder}"
    ) as nodes:
        nodes.start("a", "b", settings=[f"train.memory.folder={good}"])
        if returns:
            nodes.wait_step(20, nodes={"a", "b"})
        _start_faulty(nodes, fault, tmp_path / "bad", "c")
        if returns:
            nodes.wait_until(lambda: nodes.agents["c"].poll() is not None, "c does not end")
            gate.open_gate(STEPS)
        assert nodes.end() == {"a": 0, "b": 0, "c": 2}, nodes.story()
        own = nodes.said.partition("--- c\n")[2]
        assert "holdfast: c is left out of the run: train.memory.folder: " in own
        assert FAULTS[fault][1] in own
        assert "left out of the run: train.memory.folder" in nodes.said.partition("--- c\n")[0]
        assert "Traceback" not in nodes.said
        assert nodes.losses() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faulty", "codes"), [("c", (3, 3, 2)), ("a", (2, 3, 3)), ("abc", (2, 2, 2))]
)
def test_too_few_nodes_remain_or_none(
    run_file: Path, tmp_path: Path, faulty: str, codes: tuple[int, ...]
) -> None:
    settings = (*SETTINGS, *THREE, "cluster.min_nodes=3", "train.memory.optimizer=file")
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        for name in "abc":
            folder = tmp_path / "missing" if name in faulty else tmp_path
            nodes.start(name, settings=[f"train.memory.folder={folder}"])
        assert tuple(nodes.end().values()) == codes, nodes.story()
        if 3 in codes:
            (stopped,) = nodes.events(RunStopped)
            assert stopped.reason.startswith(f"{faulty} is left out (train.memory.folder: ")
            assert "2 of at least 3 nodes" in stopped.reason


@pytest.mark.parametrize(
    ("helper", "names"),
    [
        ("fork_server", "a"),
        pytest.param("mover", "abc", marks=pytest.mark.slow),
        pytest.param("fork_server", "abc", marks=pytest.mark.slow),
        pytest.param("mover", "a", marks=pytest.mark.slow),
        ("agent", "a"),
        pytest.param("agent", "abc", marks=pytest.mark.slow),
        pytest.param("coordinator", "abc", marks=pytest.mark.slow),
        pytest.param("coordinator", "ab", marks=pytest.mark.slow),
    ],
)
def test_a_helper_that_is_stopped_delays_nobody_though_a_worker_is_lost(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path, helper: str, names: str
) -> None:
    """A run of one node has one worker and no standby, so it needs its helpers at once."""
    if in_bucket():
        pytest.skip("the processes are the same")
    gate = FaultOrders(tmp_path / "gate")
    gate.prepare(20)
    settings = (*SETTINGS, f"cluster.faults={gate.folder}")
    workers = (*THREE[1:], f"layout.workers={len(names)}")
    with nodes_of(run_file, tmp_path / "run", *settings, *workers) as nodes:
        if len(names) > 1:
            nodes.start(*names)
        else:
            quick = [word for word in QUICK if "places" not in word]
            command = ("train", run_file, f"folder={nodes.place}", *quick, *settings)
            nodes.agents["a"] = start(*command, "layout.workers=1")
        nodes.wait_step(20)
        module = {"mover": "checkpoint.mover.main", "fork_server": "elastic.worker.fork_server"}
        node = "a"
        if len(names) > 1 and helper in ("agent", "coordinator"):
            leads = helper == "coordinator"
            node = next(name for name in names if (name == nodes.leader) is leads)
        pid = nodes.agents[node].pid
        if helper in module:
            (process,) = children_of(pid, f"holdfast.{module[helper]}")
            pid = process.pid
        lost = [e for e in nodes.events(WorkerStarted) if e.node == node or len(names) == 1]
        stop(pid)
        os.kill(lost[0].pid, signal.SIGKILL)
        begun = time.time()
        gate.open_gate(STEPS)
        assert set(nodes.end().values()) == {0}, nodes.story()
        first = min(
            r.time for r in nodes.records() if isinstance(r.event, StepDone) if r.time > begun
        )
        print(f"{helper} of {node} of {names}: the next step {first - begun:.1f} s after the kill")
        assert first - begun < QUICKLY_S, nodes.story()
        words = f"the {helper.replace('_', ' ')} (process {pid}) was stopped for "
        if helper not in module:
            words = f"(process {pid}) was stopped; it works again"
        assert words in nodes.said
        assert nodes.losses() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a", "b"])
def test_an_agent_that_is_stopped_is_left_out_and_returns(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path, victim: str
) -> None:
    """The worker that is lost meanwhile is that of the stopped agent, or another node's. The limit
    is not that of three heartbeats."""
    gate = FaultOrders(tmp_path / "gate")
    gate.prepare(20)
    settings = (*SETTINGS, *THREE, "cluster.min_nodes=2", f"cluster.faults={gate.folder}")
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start("a", "b", "c", settings=["cluster.beat_seconds=10"])
        nodes.wait_step(20, nodes={*"abc"})
        stopped = next(name for name in "abc" if name != nodes.leader)
        node = stopped if victim == "a" else nodes.leader
        lost = next(e for e in nodes.events(WorkerStarted) if e.node == node)
        nodes.signal(stopped, signal.SIGSTOP)
        os.kill(lost.pid, signal.SIGKILL)
        begun = time.time()
        gate.open_gate(30)
        nodes.wait_step(21, after=1)
        assert time.time() - begun < QUICKLY_S, nodes.story()
        nodes.signal(stopped, signal.SIGCONT)
        nodes.wait_generation({*"abc"}, after=nodes.newest)
        gate.open_gate(STEPS)
        assert set(nodes.end().values()) == {0}, nodes.story()
        assert all(e.came_from is not None for e in nodes.events(GenerationStarted)[1:])
        assert nodes.losses() == undisturbed


@pytest.mark.slow
def test_one_of_two_nodes_says_that_it_lacks_a_majority(run_file: Path, tmp_path: Path) -> None:
    """All processes of the coordinator's node are stopped, then killed."""
    settings = ("train.steps=100000", "train.evaluate.every=0", "layout.workers=2")
    with nodes_of(run_file, tmp_path / "run", *settings, "cluster.gather_seconds=120") as nodes:
        nodes.start("a", "b", settings=["cluster.alone_seconds=3600"])
        nodes.wait_step(5, nodes={"a", "b"})
        stopped = nodes.leader
        rest = "b" if stopped == "a" else "a"
        agent = psutil.Process(nodes.agents[stopped].pid)
        processes = [*agent.children(recursive=True), agent]
        for process in processes:
            process.suspend()
        begun = time.time()
        nodes.wait_until(lambda: nodes.events(MajorityLacked), "no word of the majority")
        (said,) = [r for r in nodes.records() if isinstance(r.event, MajorityLacked)]
        assert isinstance(said.event, MajorityLacked)
        assert said.time - begun < QUICKLY_S, nodes.story()
        assert (said.event.node, said.event.reached) == (rest, [rest])
        assert sorted(said.event.nodes) == ["a", "b"]
        assert "waiting for a majority at step" in within("status", nodes.outside).out
        doctor = within("doctor", nodes.outside)
        assert doctor.code == 1, doctor.out
        assert "reaches no majority of the nodes: nothing is committed" in doctor.out
        for process in processes:
            process.kill()
        nodes.wait_generation({rest}, after=1)
        nodes.agents.pop(stopped).wait(QUICKLY_S)
        nodes.leave(rest)
        assert "no majority. It does not reach" in nodes.said
