"""Output that cannot be shown or written: closed, full, in an encoding that lacks a character."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
