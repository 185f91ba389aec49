"""Real agents, movers, fork servers and workers; real gloo groups; real signals; exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from holdfast.elastic.agent.agent import NodeResult
from holdfast.elastic.agent.run_folder_monitor import FOLDER_GONE_MESSAGE
from holdfast.elastic.agent.shutdown import ShutdownController
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.run_result import EndReason, RunResult
from holdfast.errors import FencedError, RunFolderError
from holdfast.events import (
    Event,
    GenerationStarted,
    NonFinite,
    RestorePointFound,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    SaveWaiting,
    StepDone,
    StopRequested,
    WorkerLost,
)
from holdfast.layout import Layout, place_layout
from holdfast.policy.membership.state import NodeStage
from holdfast.wire.http.client import Client
from holdfast.wire.lifeline import AGENT_SIGNALS
from holdfast.wire.secret import Secret, open_secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_term
from tests.support.ranks import wait_until
from tests.support.trainer_process import Trainer, gone, parent_of, training

RESTARTS = 6
ENDLESS = {"steps": 1_000_000, "pace": 0.02}
IMPATIENT = "tests.support.impatient_trainer"
LOGGED = "agent", "mover"  # processes with a log of their own


def _agent(trainer: Trainer) -> tuple[str, Secret]:
    """Where the trainer's control listens, and the run's secret."""
    holder = newest_term(FolderStore(trainer.folder))[1]
    assert holder is not None
    return str(holder["address"]), open_secret(trainer.folder, {})


def test_lost_worker_mover_and_template_are_replaced(tmp_path: Path) -> None:
    """SIGKILL from outside. A lost worker costs its generation; mover and fork server are replaced
    while training continues, and serve the next one. The older generation is refused, and nothing
    leaks the secret. Then Ctrl-C: save and leave."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    overrides = (
        *("layout.workers=2", "cluster.max_restarts_without_progress=5"),
        f"cluster.metrics_port={port}",
    )
    with training(tmp_path / "run", ENDLESS, *overrides) as trainer:
        trainer.wait_step(3, 1)
        first = trainer.workers(1)
        template = parent_of(first[1])
        os.kill(first[1], signal.SIGKILL)

        trainer.wait_step(3, 2)
        second = trainer.workers(2)
        # Forked by the same process: nothing was imported again.
        assert [parent_of(pid) for pid in second.values()] == [template, template]
        log = (trainer.folder / "logs" / "0000000002" / "rank1.log").read_text()
        assert "torch_imported=True" in log
        assert gone(set(first.values()))
        secret = _refuses_old_generations_and_other_trainers(trainer, port)
        (mover,) = trainer.family() - {trainer.process.pid, template, *second.values()}
        os.kill(mover, signal.SIGKILL)
        os.kill(template, signal.SIGKILL)
        wait_until(lambda: gone({mover, template}), what="the end of both")
        step = max(e.step for e in trainer.events(StepDone, 2))
        trainer.wait_step(step + 5, 2)
        os.kill(second[0], signal.SIGKILL)

        trainer.wait_step(3, 3)
        third = trainer.workers(3)
        assert gone(set(second.values()))
        assert parent_of(third[0]) not in (template, 1)
        everyone = trainer.family()
        assert len(everyone) == 5  # agent, mover, fork server, two workers
        for pid in everyone:
            for name in ("cmdline", "environ"):
                assert secret not in Path(f"/proc/{pid}/{name}").read_bytes()
        # Ctrl-C reaches everybody in the terminal's foreground, and is the agent's alone.
        os.killpg(trainer.process.pid, signal.SIGINT)
        assert trainer.end() == 0, trainer.said
        wait_until(lambda: gone(everyone), what="no process is left")
    for path in trainer.folder.rglob("*"):
        if path.is_file() and path.name != "secret":
            assert secret not in path.read_bytes(), path

    reasons = [e.reason for e in trainer.events(GenerationStarted)]
    assert reasons == ["start", "worker_lost", "worker_lost"]
    lost = [(e.rank, e.pid, e.cause, e.noticed_by) for e in trainer.events(WorkerLost)]
    assert lost == [(1, first[1], "SIGKILL", "exit"), (0, second[0], "SIGKILL", "exit")]
    logs = {name: (trainer.folder / "logs" / f"{name}.log").read_text() for name in LOGGED}
    exit_line = f"INFO agent generation=1: worker {first[1]} of rank 1 exited with -9\n"
    assert exit_line in logs["agent"]
    assert "INFO mover generation=0: ready\n" in logs["mover"]
    roles = re.findall(r": role (\w+) in term", logs["agent"])
    assert roles, "the agent's roles are logged"
    assert all(before != after for before, after in pairwise(roles)), "only a change is logged"
    assert [e.reason for e in trainer.events(StopRequested)] == ["SIGINT"]
    (stopped,) = trainer.events(RunStopped)
    assert stopped.step == max(e.step for e in trainer.events(StepDone, 3))
    assert f"stopped after step {stopped.step}" in trainer.said
    assert "resume with: holdfast train" in trainer.said


def _refuses_old_generations_and_other_trainers(trainer: Trainer, port: int) -> bytes:
    """In generation 2. Return the digits of the secret."""
    address, secret = _agent(trainer)
    for where in ("/report", "/store"):
        with pytest.raises(FencedError, match="generation 1 is over"):
            Client(address, secret, 1).post(where, {})
    # What is for everybody to read.
    base = f"http://127.0.0.1:{port}"
    health = json.load(urllib.request.urlopen(f"{base}/healthz", timeout=120))
    assert (health["generation"], health["workers"], health["state"]) == (2, 2, "training")
    assert urllib.request.urlopen(f"{base}/metrics", timeout=120).read() == b"holdfast_toy 1\n"
    # Another trainer is told who is there.
    with training(trainer.folder, ENDLESS, "layout.workers=2") as second:
        assert second.end() == 2
    assert f"process {trainer.process.pid} on" in second.said
    assert "Traceback" not in second.said
    return secret.hex().encode()


def test_workers_end_within_a_second_of_their_agent_and_the_run_resumes(tmp_path: Path) -> None:
    """One worker never comes to the collective, one waits in it, one holds the interpreter lock;
    then the agent is killed. (On a quiet machine; five times that here.)"""
    plan = ENDLESS | {
        "hang": {"generation": 1, "rank": 1, "step": 3},
        "hold_gil": {"generation": 1, "rank": 2, "step": 3},
    }
    overrides = ("layout.workers=3", "cluster.compare=false")
    with training(tmp_path / "run", plan, *overrides) as trainer:
        trainer.wait_step(2, 1)
        family = trainer.family() - {trainer.process.pid}
        assert len(family) == 5
        os.kill(trainer.process.pid, signal.SIGKILL)
        wait_until(lambda: gone(family), 10.0, f"the end of {family}")
        trainer.end()
    with training(tmp_path / "run", {"steps": 4}, "layout.workers=2") as again:
        assert again.end() == 0, again.said
    assert [e.reason for e in again.events(GenerationStarted)] == ["start", "resume"]
    assert [e.resumed for e in again.events(RunStarted)] == [False, True]
    assert newest_term(FolderStore(again.folder)) == (2, None)


@pytest.mark.slow
def test_a_crash_that_comes_back_is_given_up(tmp_path: Path) -> None:
    plan = {"steps": 4, "crash": {"generation": 0, "rank": 1, "step": 2}}
    overrides = ("layout.workers=2", "cluster.max_restarts_without_progress=2")
    with training(tmp_path / "run", plan, *overrides) as trainer:
        assert trainer.end() == 1
    assert len(trainer.events(GenerationStarted)) == 3
    assert len(trainer.events(WorkerLost)) == 3
    (failed,) = trainer.events(RunFailed)
    assert "restarted 2 times" in failed.reason
    assert "ValueError: the toy broke" in failed.reason
    assert 'raise ValueError("the toy broke")' in trainer.said  # the log's last lines


@pytest.mark.slow
def test_what_is_not_finite_stops_the_run_and_is_named(tmp_path: Path) -> None:
    plan = {"steps": 4, "non_finite": {"generation": 0, "rank": 1, "step": 2}}
    with training(tmp_path / "run", plan, "layout.workers=2") as trainer:
        assert trainer.end() == 1
    assert "step 2: layers.0.ffn.up.weight is not finite on rank 1" in trainer.said
    assert len(trainer.events(NonFinite)) == 1
    assert len(trainer.events(GenerationStarted)) == 1


@pytest.mark.slow
def test_a_stopped_trainer_is_succeeded_and_leaves_when_it_wakes(tmp_path: Path) -> None:
    with training(tmp_path / "run", ENDLESS, "layout.workers=1") as old:
        old.wait_step(2, 1)
        old.stop()
        with training(tmp_path / "run", {"steps": 3}, "layout.workers=1") as new:
            assert new.end() == 0, new.said
        assert [e.reason for e in new.events(GenerationStarted)] == ["start", "resume"]
        family = old.family()
        old.resume()
        assert old.end() == 1
        wait_until(lambda: gone(family), what="no process is left")
    assert "another trainer has taken over" in old.said
    assert new.events(RunFailed) == []


def test_a_snapshot_handed_over_is_not_lost_with_its_worker(tmp_path: Path) -> None:
    """The worker dies while the mover writes, and the mover is stopped. Its agent continues it. The
    next generation waits until memory or disk has all of the snapshot, and begins from it. Its last
    state is not durable, so the run is not finished."""
    died, unsaved = {"generation": 1, "rank": 0, "step": 3}, "the disk is full"
    plan = {"steps": 6, "save_and_die": died, "unsaved": unsaved}
    overrides = ("layout.workers=1", "model.vocab_size=64")
    with training(tmp_path / "run", plan, *overrides) as trainer:
        assert trainer.end() == 1, trainer.said
    assert re.search(
        r"the mover \(process \d+\) was stopped .*; the agent continues it", trainer.said
    )
    # From memory or from disk: generation 2 may fence a commit that is slower than its start.
    assert [e.step for e in trainer.events(RestorePointFound, 2)] == [3]
    assert [e.step for e in trainer.events(GenerationStarted)] == [0, 3]
    assert [e.step for e in trainer.events(StepDone, 2)] == [4, 5, 6]
    assert trainer.events(RunFinished) == []
    (stopped,) = trainer.events(RunStopped)
    cause = f"the state after step 6 could not be saved: {unsaved}"
    assert re.fullmatch(f"{cause}; steps [14] to 6 are lost", stopped.reason)
    assert "resume with: holdfast train" in trainer.said


@pytest.mark.slow
def test_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    """Neither descriptors in agent, fork server and mover, nor arenas of older generations."""
    plan = ENDLESS | {"map": {"generation": 0, "rank": 1, "step": 1}}
    overrides = (
        "layout.workers=2",
        "cluster.max_restarts_without_progress=99",
        "model.vocab_size=64",
    )
    held: list[list[int]] = []
    with training(tmp_path / "run", plan, *overrides) as trainer:
        for generation in range(1, RESTARTS + 1):
            trainer.wait_step(2, generation)
            workers = trainer.workers(generation)
            template = parent_of(workers[0])
            (mover,) = trainer.family() - {trainer.process.pid, template, *workers.values()}
            assert _arenas(mover) == 1
            held.append([_descriptors(pid) for pid in (trainer.process.pid, template, mover)])
            os.kill(workers[1], signal.SIGKILL)
    for early, late in zip(held[1], held[-1], strict=True):
        assert late < early + RESTARTS // 2, held


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _arenas(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:holdfast-")


def test_a_stopped_trainer_does_not_write_into_the_run_that_replaced_its_own(
    tmp_path: Path,
) -> None:
    """The folder is moved aside (as `train --fresh` does) and another run begun at its path: its
    term and its generation have the same numbers."""
    with training(tmp_path / "run", ENDLESS, "layout.workers=1", module=IMPATIENT) as old:
        old.wait_step(20, 1)
        old.stop()
        old.folder.rename(tmp_path / "run.old-1")
        with training(tmp_path / "run", {"steps": 3}, "layout.workers=1") as new:
            assert new.end() == 0, new.said
        old.resume()
        assert old.end(30) == 1
        assert FOLDER_GONE_MESSAGE in old.said
    assert [e.step for e in new.events(StepDone)] == [1, 2, 3]
    assert len(new.events(RunFinished)) == 1


def test_a_boot_travels_as_json() -> None:
    topology = place_layout(Layout(), 1, ("x",))
    boot = WorkerSpec({"a": 1}, topology, 1, 0, 2, "h:1", "", "/r", "/d", None, 0, "cpu", "l")
    value = json.loads(json.dumps(boot.to_json())) | {"of a newer version": True}
    assert WorkerSpec.from_json(value) == boot


def result_of(event: Event | None, code: int) -> int:
    """The exit code of a node with `cluster.left_exit_code: 143`, for the run's result."""
    parts: Any = SimpleNamespace(
        context=SimpleNamespace(
            config=SimpleNamespace(cluster=SimpleNamespace(left_exit_code=143))
        ),
        run_controller=SimpleNamespace(
            result_reporter=SimpleNamespace(print_result=lambda result: None)
        ),
        node_runner=SimpleNamespace(closing_reason=""),
        shutdown_controller=SimpleNamespace(reason="", ended_code=None),
    )
    return NodeResult(parts).report_result(RunResult(event, "", code))


@pytest.mark.parametrize(
    ("event", "code", "expected"),
    [
        (RunStopped("notice", step=3), 0, 143),  # saved and left: another node may take its place
        (RunFinished("", step=9), 0, 0),
        (None, 0, 0),  # the run was over before this node had a part in it
        (RunStopped("the bucket", step=3), 1, 1),
    ],
)
def test_only_a_node_that_leaves_early_has_the_owners_code(
    event: Event | None, code: int, expected: int
) -> None:
    assert result_of(event, code) == expected


LEAVING = [n for n in AGENT_SIGNALS if n not in (signal.SIGINT, signal.SIGUSR1)]


class Shutdown:
    """A controller whose neighbours only note what they are asked."""

    def __init__(self, grace_s: float = 0.0, committed_step: int = 0) -> None:
        self.said: list[str] = []
        self.notices: Any = Mock()
        self.stopping: Any = Mock()
        self.exits: list[str] = []
        self.timers: list[float] = []
        worker_group = SimpleNamespace(
            topology=SimpleNamespace(nodes=("a",)), start_step=7, reached_step=7
        )
        self.node_runner: Any = Mock(generation=1, worker_group=worker_group)
        self.role_loop: Any = Mock(coordinator=None, agent_addresses={})
        self.controller = ShutdownController(
            Mock(cluster=SimpleNamespace(grace_seconds=grace_s)),
            "a",
            True,
            event_log=Mock(),
            say=self.said.append,
            node_runner=self.node_runner,
            role_loop=self.role_loop,
            run_controller=self.stopping,
            notice_handler=self.notices,
            final_upload=Mock(missing_upload=""),
            exit_at_once=self.exits.append,
            committed_step=lambda: committed_step,
        )
        self.controller._call_later = lambda after_s, _: self.timers.append(after_s)


def _shutdown(grace_s: float = 0.0, committed_step: int = 0) -> Shutdown:
    async def make() -> Shutdown:
        return Shutdown(grace_s, committed_step)

    return asyncio.run(make())


def test_the_signals_of_terminals_and_schedulers_are_all_answered() -> None:
    asked = ["HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "XCPU"]
    assert {signal.Signals[f"SIG{name}"] for name in asked} <= set(AGENT_SIGNALS)


@pytest.mark.parametrize("number", LEAVING)
def test_a_signal_to_end_saves_and_leaves(number: signal.Signals) -> None:
    it = _shutdown()
    it.controller.on_signal(number)
    assert it.controller.stop_reason == number.name
    assert it.said == [
        f"{number.name}: saving and leaving at the next step (Ctrl-C again: at once)"
    ]
    it.controller.on_signal(number)  # a shell that ends sends it twice
    assert it.exits == []


@pytest.mark.parametrize("number", LEAVING)
def test_the_kill_that_follows_is_a_deadline(number: signal.Signals) -> None:
    it = _shutdown(grace_s=12.0)
    it.controller.on_signal(number)
    notice = it.notices.handle_notice.call_args.args[0]
    assert (notice.seconds, notice.must_leave) == (12.0, True)


def test_a_warning_saves_and_training_continues() -> None:
    it = _shutdown()
    it.controller.on_signal(signal.SIGUSR1)
    notice = it.notices.handle_notice.call_args.args[0]
    assert (notice.source, notice.must_leave) == ("SIGUSR1", False)
    assert it.controller.stop_reason == ""
    assert it.said[0].startswith("SIGUSR1: saving")


@pytest.mark.parametrize("kept", [(), (signal.SIGTERM,)])
def test_children_leave_the_signals_to_their_agent(kept: tuple[signal.Signals, ...]) -> None:
    """Both a mover and a worker: a scheduler sends signals to every process of a job."""
    code = (
        "import os, signal; from holdfast.wire import lifeline\n"
        f"lifeline.ignore_agent_signals(*map(signal.Signals, {list(map(int, kept))}))\n"
        "for number in lifeline.AGENT_SIGNALS:\n"
        "    if signal.getsignal(number) is signal.SIG_IGN: os.kill(os.getpid(), number)\n"
        "print([int(n) for n in lifeline.AGENT_SIGNALS if signal.getsignal(n) == signal.SIG_DFL])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, str([int(n) for n in kept]))


class Ending:
    """A run that was asked to stop, and the order to its coordinator when time is up."""

    def __init__(self, stage: NodeStage, reached_step: int, committed_step: int) -> None:
        self.it = _shutdown(committed_step=committed_step)
        self.coordinator = Mock(state=SimpleNamespace(nodes=("a",)))
        self.it.role_loop.coordinator = self.coordinator
        self.it.node_runner.stage = stage
        self.it.node_runner.worker_group.reached_step = reached_step
        self.it.controller.reason = "SIGTERM"

    def ends(self) -> EndReason | None:
        self.it.controller.end_without_step()
        if not self.coordinator.finish.called:
            return None
        sentence, reason = self.coordinator.finish.call_args.args
        assert sentence.startswith("SIGTERM; ")
        return EndReason(reason)


@pytest.mark.parametrize("stage", [NodeStage.BUILDING, NodeStage.WORKING, NodeStage.HELD])
def test_a_generation_without_a_step_ends_within_the_grace(stage: NodeStage) -> None:
    assert Ending(stage, reached_step=7, committed_step=7).ends() is EndReason.LEFT


def test_a_recovery_that_takes_too_long_ends_and_names_the_loss() -> None:
    assert Ending(NodeStage.BROKEN, reached_step=9, committed_step=7).ends() is EndReason.STOPPED


def test_workers_that_compute_steps_leave_by_themselves() -> None:
    assert Ending(NodeStage.WORKING, reached_step=9, committed_step=7).ends() is None
    assert Ending(NodeStage.DONE, reached_step=7, committed_step=7).ends() is None


@pytest.mark.parametrize(
    ("number", "grace_s", "after_s"),
    [
        (signal.SIGTERM, 0.0, 24.0),
        (signal.SIGHUP, 0.0, 24.0),
        (signal.SIGTERM, 10.0, 8.0),
        (signal.SIGINT, 10.0, None),
    ],
)
def test_the_time_until_then(number: signal.Signals, grace_s: float, after_s: float | None) -> None:
    it = _shutdown(grace_s)
    it.controller.on_signal(number)
    assert it.timers == ([] if after_s is None else [after_s])


class WaitingStop:
    """A node that trains alone, whose save of an asked stop waits for a read-only run folder."""

    def __init__(self, number: signal.Signals, grace_s: float = 0.0) -> None:
        self.it, self.now = _shutdown(grace_s, committed_step=4), 0.0
        self.finish = Mock()
        state = SimpleNamespace(nodes=("a",))
        self.it.role_loop.coordinator = SimpleNamespace(state=state, finish=self.finish)
        controller: Any = self.it.controller
        group = self.it.node_runner.worker_group
        controller._clock = lambda: self.now
        controller.config.train = SimpleNamespace(steps=100)
        self.events: Any = controller.event_log
        self.events.problem = RunFolderError("read-only", where="run", remedy="mount it")
        self.worker = SimpleNamespace(phase="save")
        group.workers, group.reached_step = [self.worker], 9
        controller.on_signal(number)
        self.events.emit.reset_mock()

    def said_after(self, *seconds: float) -> list[SaveWaiting]:
        for self.now in seconds:
            self.it.controller.check_save()
        return [call.args[1] for call in self.events.emit.call_args_list]


def test_a_stop_whose_save_waits_is_reported_and_the_next_interrupt_names_the_loss() -> None:
    stop = WaitingStop(signal.SIGINT)
    expected = SaveWaiting("read-only", "run", "mount it", 0, step=9)
    assert stop.said_after(0.0, 59.0) == [expected]
    assert stop.said_after(60.0, 100.0, 1000.0) == [expected] * 3
    assert not stop.finish.called  # Ctrl-C has no deadline
    stop.it.controller.on_signal(signal.SIGINT)
    loss = "the state after step 9 could not be saved: run: read-only; mount it; steps 5 to 9 are"
    stop.finish.assert_called_once_with(f"SIGINT; {loss} lost", EndReason.STOPPED)
    assert stop.it.exits == []
    stop.it.controller.on_signal(signal.SIGINT)
    assert stop.it.exits == [""]


@pytest.mark.parametrize(("grace_s", "until_s"), [(0.0, 120.0), (10.0, 8.0)])
def test_a_stop_whose_save_waits_ends_when_its_time_is_over(grace_s: float, until_s: float) -> None:
    stop = WaitingStop(signal.SIGHUP, grace_s)
    stop.said_after(0.0, until_s - 0.1)
    assert not stop.finish.called
    stop.said_after(until_s, until_s + 1)
    assert stop.finish.call_count == 1


def test_a_stop_whose_journal_can_be_written_does_not_count_as_waiting() -> None:
    stop = WaitingStop(signal.SIGINT)
    stop.worker.phase = "compute"
    assert stop.said_after(0.0) == []
    stop.worker.phase, stop.events.problem = "save", None
    assert stop.said_after(1.0) == []
    stop.it.controller.on_signal(signal.SIGINT)
    assert (stop.it.exits, stop.finish.called) == ([""], False)
