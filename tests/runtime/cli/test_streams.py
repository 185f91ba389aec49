"""Output that cannot be shown or written: closed, full, in an encoding that lacks a character."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.api import progress
from holdfast.api.progress import LongWork
from holdfast.cli.main import main
from holdfast.errors import UserError
from holdfast.show.output import check_target
from holdfast_lab.commands import trace
from tests.support.ranks import wait_until

WORK = """
import os, sys
from holdfast.cli import dispatch, main
module = type(sys)("holdfast.cli." + sys.argv[1])
module.app = dispatch.app("Works.")
@module.app.command()
def works() -> int:
    from holdfast.show.output import print_line, say
    for _ in range(3):
        say("caf\\xe9 \\u2713 \\udcff")
        print_line({"name": "caf\\xe9"})
    with open(os.environ["RESULT"], "w") as file:
        file.write("done")
    return 0
sys.modules[module.__name__] = module
sys.exit(main.main())
"""
PRINTS = "doctor"  # its output is all that it does
WORKS = "export"


def _work(
    tmp_path: Path, redirections: str = "", command: str = WORKS, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that prints and then writes a file, with redirections of a shell."""
    script = tmp_path / "work.py"
    script.write_text(WORK)
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} {script} {command} {redirections}"],
        env=os.environ | {"RESULT": str(tmp_path / "result")} | environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )


@pytest.mark.parametrize(
    "redirections",
    [
        ">&-",
        "2>&-",
        "<&- >&- 2>&-",
        ">/dev/full",
        "2>/dev/full",
        ">/dev/full 2>&1",
        "| true; exit ${PIPESTATUS[0]}",
        "2>&1 | true; exit ${PIPESTATUS[0]}",
    ],
)
def test_lost_output_does_not_fail_what_was_done(tmp_path: Path, redirections: str) -> None:
    done = _work(tmp_path, redirections)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr + done.stdout
    # And no message went into the file that took a closed descriptor's number.
    assert (tmp_path / "result").read_text() == "done"


def test_a_command_that_only_prints_fails_in_one_sentence(tmp_path: Path) -> None:
    done = _work(tmp_path, ">/dev/full", PRINTS)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("holdfast: the disk is full")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "utf-8"},
    ],
)
def test_a_character_that_cannot_be_shown_is_replaced(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    done = _work(tmp_path, **environment)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    lines = done.stdout.splitlines()
    if environment.get("PYTHONIOENCODING") == "utf-8":
        assert lines == ['{"name":"café"}'] * 3
    else:  # what a program reads is not damaged
        assert lines == ['{"name":"caf\\u00e9"}'] * 3


def test_help_without_a_place_to_go(tmp_path: Path) -> None:
    command = f"{sys.executable} -m holdfast.cli.main --help >/dev/full"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


# --- long work shows what it does on stderr; short work prints nothing ----------------------------
COUNTS = "0,4\n60000,3\n120000,4\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_read_says_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "MOMENT_S", 0.01)
    path = tmp_path / "counts.csv"
    path.write_text(COUNTS)
    read, told = trace.read_bytes, list[str]()

    def slowly(path: Path) -> bytes:
        """It takes as long as it takes until a line is shown."""

        def is_shown() -> bool:
            told.append(capsys.readouterr().err)
            return f"reading {path}, " in "".join(told)

        wait_until(is_shown)
        return read(path)

    monkeypatch.setattr(trace, "read_bytes", slowly)
    assert main(["trace", "show", str(path)]) == 0


def test_short_work_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "MOMENT_S", 600.0)
    path = tmp_path / "counts.csv"
    path.write_text(COUNTS)
    assert main(["trace", "show", str(path)]) == 0
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_the_stage_and_loses_it_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "MOMENT_S", 0.01)
    work = LongWork("first")
    work.count("replays", 2, 5)
    with work:
        wait_until(lambda: "\r\x1b[Kreplays: 2 of 5 done, " in screen.getvalue())
        work.say("a line of its own")
    shown = screen.getvalue()
    assert "a line of its own\n" in shown
    assert shown.endswith(("\r\x1b[K", "\n"))


# --- signals to a command whose agent does not run yet --------------------------------------------
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


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="named pipe"):
        check_target(tmp_path / "pipe", "--to")
