"""What an agent does at each signal that a terminal or a scheduler sends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from holdfast.elastic.agent.shutdown import ShutdownController
from holdfast.elastic.run_result import EndReason
from holdfast.policy.membership.state import NodeStage
from holdfast.wire.lifeline import AGENT_SIGNALS

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
