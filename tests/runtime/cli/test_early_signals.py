"""Signals to a command whose agent does not run yet."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SETUP = """
import os, signal, sys
from holdfast.cli import dispatch, main
from holdfast.cli.table import Command, all_commands
from holdfast.api.early_end import early_signals_answered
module = type(sys)("holdfast.cli.sleepy")
module.app = dispatch.app("Sleeps.")
@module.app.command()
def sleepy() -> int:
    with early_signals_answered():
        os.kill(os.getpid(), {number})
        return 0
sys.modules["holdfast.cli.sleepy"] = module
all_commands()["sleepy"] = Command("sleepy", "holdfast.cli.sleepy", "Look", "sleeps")
{before}
sys.exit(main.main(["sleepy"]))
"""


def _signalled(number: signal.Signals, before: str = "") -> subprocess.CompletedProcess[str]:
    code = SETUP.format(number=int(number), before=before)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR2])
def test_a_command_says_which_signal_ended_it(number: signal.Signals) -> None:
    done = _signalled(number)
    assert done.returncode == 128 + number
    assert done.stderr == (
        f"holdfast sleepy: ended by {number.name}; nothing was under way; the same command starts "
        "it again\n"
    )


def test_a_mere_warning_ends_nothing() -> None:
    assert _signalled(signal.SIGUSR1).returncode == 0


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert _signalled(signal.SIGHUP, before).returncode == 0
