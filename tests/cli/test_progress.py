"""Long work shows what it does on stderr; short work prints nothing."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from holdfast.cli import progress
from holdfast.cli.main import main
from holdfast.cli.progress import LongWork

COUNTS = "0,4\n60000,3\n120000,4\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def slow_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that takes a moment to read."""
    from holdfast.cli import trace

    monkeypatch.setattr(progress, "MOMENT_S", 0.05)
    path = tmp_path / "counts.csv"
    path.write_text(COUNTS)
    read = trace.read_bytes

    def slowly(path: Path) -> bytes:
        time.sleep(0.3)
        return read(path)

    monkeypatch.setattr(trace, "read_bytes", slowly)
    return path


def test_a_long_read_says_what_it_reads(
    slow_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "show", str(slow_trace)]) == 0
    assert f"reading {slow_trace}, 0 s\n" in capsys.readouterr().err


def test_short_work_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    with LongWork("first") as work:
        work.count("replays", 2, 5)
        time.sleep(0.2)
        work.say("a line of its own")
    shown = screen.getvalue()
    assert "\r\x1b[Kreplays: 2 of 5 done, 0 s" in shown
    assert "a line of its own\n" in shown
    assert shown.endswith(("\r\x1b[K", "\n"))
