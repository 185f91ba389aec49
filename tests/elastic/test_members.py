from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from holdfast.elastic import exits
from holdfast.elastic.members import Members, still_running
from holdfast.events import RunStopped


def _body(rank: int, step: int, phase: str, marks: int, first: int = 0) -> dict[str, Any]:
    return {"rank": rank, "step": step, "phase": phase, "marks": marks, "first": first,
            "events": []}  # fmt: skip


def _members(*positions: tuple[int, str, int, float]) -> Members:
    members = Members(1, len(positions))
    for rank, (step, phase, marks, now) in enumerate(positions):
        members.expect(rank, 0.0)
        members.report(_body(rank, step, phase, marks), now)
    return members


def test_as_long_as_anybody_gets_further_nobody_hangs() -> None:
    members = _members((5, "reduce", 2, 1.0), (5, "compute", 1, 50.0))
    assert members.hung(60.0, 30.0) is None
    hung = members.hung(90.0, 30.0)
    assert hung is not None
    assert hung.rank == 1


def test_the_one_that_got_least_far_is_to_blame() -> None:
    members = _members(
        (5, "reduce", 2, 10.0), (4, "apply", 9, 10.2), (5, "compute", 1, 10.1)
    )  # fmt: skip
    hung = members.hung(50.0, 30.0)
    assert hung is not None
    assert hung.rank == 1
    members.exited(1, 0, -9)
    hung = members.hung(50.0, 30.0)
    assert hung is not None
    assert hung.rank == 2


def test_a_worker_that_never_reported_hangs_too() -> None:
    members = _members((0, "start", 0, 1.0), (0, "start", 0, 1.0))
    members.expect(2, 0.5)
    hung = members.hung(100.0, 30.0)
    assert hung is not None
    assert (hung.rank, hung.phase) == (2, "fork")


def test_an_agent_that_slept_forgives() -> None:
    members = _members((5, "reduce", 2, 10.0))
    members.forgive(1000.0)
    assert members.hung(1030.0, 30.0) is None


def test_the_same_progress_again_is_none() -> None:
    members = _members((5, "reduce", 2, 10.0))
    members.report(_body(0, 5, "reduce", 2), 100.0)
    assert members.hung(101.0, 30.0) is not None


def test_events_are_taken_once_and_a_stranger_is_refused() -> None:
    members = Members(1, 1)
    members.expect(0, 0.0)
    event = {"kind": "run_stopped", "event": {"step": 3, "reason": "x"}}
    body = _body(0, 1, "a", 1) | {"events": [event, event]}
    assert members.report(body, 0.0) == [RunStopped("x", step=3)] * 2
    assert members.report(body, 0.0) == []
    assert len(members.report(body | {"first": 1}, 0.0)) == 1
    with pytest.raises(KeyError):
        members.report(_body(1, 1, "a", 1), 0.0)
    unknown = body | {"first": 3, "events": [{"kind": "nonsense", "event": {}}]}
    with pytest.raises(KeyError):
        members.report(unknown, 0.0)


def test_kill_reaches_the_group_and_never_a_stranger() -> None:
    script = "import subprocess, sys; print(1, flush=True); subprocess.run(['sleep', '1000'])"
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    members = Members(1, 1)
    members.expect(0, 0.0)
    member = members.forked(0, child.pid)
    assert still_running(member.pidfd)
    members.kill()
    assert child.wait(10) == -signal.SIGKILL
    assert child.stdout.read() == b""  # the grandchild held the pipe too
    child.stdout.close()
    assert not still_running(member.pidfd)
    members.kill()  # the number may belong to somebody else now: nothing is sent
    members.exited(0, child.pid, -9)
    assert member.pidfd == -1


def test_exit_codes_in_words() -> None:
    assert exits.describe(-9) == "SIGKILL"
    assert exits.describe(-200) == "signal 200"
    assert exits.describe(3) == "exit 3"
    assert exits.describe(exits.PEER_LOST) == "exit 75 (lost its peers)"
