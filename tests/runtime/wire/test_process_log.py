"""Each line of a process's log names time, level, process, generation and rank."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.wire import process_log

LOGGER = logging.getLogger("holdfast.some.module")


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    process_log.stop()


def test_a_worker_s_lines_follow_it_into_the_next_generation() -> None:
    out = io.StringIO()
    process_log.start("worker", out, generation=3, rank=1)
    LOGGER.info("step %d", 7)
    process_log.enter(4, 0)
    LOGGER.error("it failed")
    LOGGER.debug("no line at this level")
    process_log.stop()
    first, second = out.getvalue().splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(stamp + " INFO worker generation=3 rank=1: step 7", first)
    assert re.fullmatch(stamp + " ERROR worker generation=4 rank=0: it failed", second)
    assert [process_log.message_of(line) for line in (first, second)] == ["step 7", "it failed"]
    assert process_log.message_of("a line: of no log") == "a line: of no log"


def test_an_agent_s_lines_are_appended_to_its_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    for line in ("first", "second"):  # an agent and the next one
        process_log.start("agent", path)
        LOGGER.info(line)
        process_log.stop()
    assert [line.split(" ", 2)[2] for line in path.read_text().splitlines()] == [
        "agent generation=0: first",
        "agent generation=0: second",
    ]


def test_a_file_that_hangs_blocks_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a reader blocks the opener, as a dead disk does."""
    pipe = tmp_path / "agent.log"
    os.mkfifo(pipe)
    monkeypatch.setattr(process_log, "CLOSE_TIMEOUT_S", 0.1)
    process_log.start("agent", pipe)
    LOGGER.info("nobody can store this")
    process_log.stop()  # a caller that waited would never come here
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # lets the thread end
    os.close(reader)


def test_lines_that_could_not_be_written_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain, faults = tmp_path / "agent.log", Path.open, [OSError("full"), OSError("full")]

    def full_at_first(self: Path, *arguments: Any, **named: Any) -> Any:
        if faults:
            raise faults.pop()
        return plain(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", full_at_first)
    process_log.start("agent", path)
    for line in ("lost", "lost", "written"):
        LOGGER.info(line)
    process_log.stop()
    dropped, written = path.read_text().splitlines()
    assert dropped == "2 lines could not be written"
    assert written.endswith("agent generation=0: written")
