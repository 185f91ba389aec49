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
from holdfast.wire.lifeline import AGENT_SIGNALS

LEAVING = [n for n in AGENT_SIGNALS if n not in (signal.SIGINT, signal.SIGUSR1)]


class Shutdown:
    """A controller whose neighbours only note what they are asked."""

    def __init__(self, grace_s: float = 0.0) -> None:
        self.said: list[str] = []
        self.notices: Any = Mock()
        self.stopping: Any = Mock()
        self.exits: list[str] = []
        worker_group = SimpleNamespace(topology=SimpleNamespace(nodes=("a",)), newest_step=7)
        self.controller = ShutdownController(
            Mock(cluster=SimpleNamespace(grace_seconds=grace_s)),
            "a",
            True,
            event_log=Mock(),
            say=self.said.append,
            node_runner=Mock(generation=1, worker_group=worker_group),
            role_loop=Mock(coordinator=None, agent_addresses={}),
            run_controller=self.stopping,
            notice_handler=self.notices,
            final_upload=Mock(missing_upload=""),
            exit_at_once=self.exits.append,
        )


def _shutdown(grace_s: float = 0.0) -> Shutdown:
    async def make() -> Shutdown:
        return Shutdown(grace_s)

    return asyncio.run(make())


def test_the_signals_of_terminals_and_schedulers_are_all_answered() -> None:
    asked = "HUP INT QUIT TERM USR1 USR2 XCPU".split()
    assert {signal.Signals[f"SIG{name}"] for name in asked} <= set(AGENT_SIGNALS)


@pytest.mark.parametrize("number", LEAVING)
def test_a_signal_to_end_saves_and_leaves(number: signal.Signals) -> None:
    it = _shutdown()
    it.controller.on_signal(number)
    assert it.controller.stop_reason == number.name
    assert it.said == [f"{number.name}: saving and leaving at the next step (Ctrl-C again: at once)"]
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, str([int(n) for n in kept]))
