"""Long work shows what it does on stderr; short work prints nothing."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from holdfast.api import progress
from holdfast.api.progress import LongWork
from holdfast.cli.main import main
from holdfast_lab.commands import trace
from tests.support.ranks import wait_until

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
