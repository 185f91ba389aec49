from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.elastic.node.worker_status import WorkerTable
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.worker_messages import WorkerReport
from holdfast.events import RunStopped
from holdfast.policy.recovery.survivors import HeldState


def _members(*positions: tuple[int, str, int, float]) -> WorkerTable:
    members = WorkerTable(1, len(positions))
    for rank, (step, phase, marks, now) in enumerate(positions):
        members.expect_worker(rank, 0.0)
        members.process_report(WorkerReport(rank, step, phase, marks), now)
    return members


def test_as_long_as_anybody_gets_further_nobody_hangs() -> None:
    members = _members((5, "reduce", 2, 1.0), (5, "compute", 1, 50.0))
    assert members.find_hung(60.0, 30.0) is None
    hung = members.find_hung(90.0, 30.0)
    assert hung is not None
    assert hung.rank == 1


def test_the_one_that_got_least_far_is_to_blame() -> None:
    members = _members((5, "reduce", 2, 10.0), (4, "apply", 9, 10.2), (5, "compute", 1, 10.1))
    hung = members.find_hung(50.0, 30.0)
    assert hung is not None
    assert hung.rank == 1
    members.on_exited(1, 0, -9)
    hung = members.find_hung(50.0, 30.0)
    assert hung is not None
    assert hung.rank == 2


def test_a_worker_that_never_reported_hangs_too() -> None:
    members = _members((0, "start", 0, 1.0), (0, "start", 0, 1.0))
    members.expect_worker(2, 0.5)
    hung = members.find_hung(100.0, 30.0)
    assert hung is not None
    assert (hung.rank, hung.phase) == (2, "fork")


def test_an_agent_that_slept_forgives() -> None:
    members = _members((5, "reduce", 2, 10.0))
    members.forgive_pause(1000.0)
    assert members.find_hung(1030.0, 30.0) is None


def test_the_same_progress_again_is_none() -> None:
    members = _members((5, "reduce", 2, 10.0))
    members.process_report(WorkerReport(0, 5, "reduce", 2), 100.0)
    assert members.find_hung(101.0, 30.0) is not None


def test_a_transfer_that_moves_is_no_hang() -> None:
    members = _members((5, "reduce", 2, 10.0), (5, "reduce", 2, 10.0))
    for now in (30.0, 60.0, 90.0):
        for rank in (0, 1):
            members.process_report(WorkerReport(rank, 5, "reduce", 2, arrivals=int(now)), now)
    assert members.find_hung(100.0, 30.0) is None
    assert members.find_hung(130.0, 30.0) is not None


def test_events_are_taken_once_and_a_stranger_is_refused() -> None:
    members = WorkerTable(1, 1)
    members.expect_worker(0, 0.0)
    event = RunStopped("x", step=3)
    report = WorkerReport(0, 1, "a", 1, events=(event, event))
    assert members.process_report(report, 0.0) == (event, event)
    assert members.process_report(report, 0.0) == ()
    assert len(members.process_report(replace(report, first_number=1), 0.0)) == 1
    with pytest.raises(KeyError):
        members.process_report(WorkerReport(1, 1, "a", 1), 0.0)
    unknown = report.to_json() | {"events": [{"kind": "nonsense", "event": {}}]}
    with pytest.raises(KeyError):
        WorkerReport.from_json(unknown)


def test_what_one_generation_could_not_tell_is_taken_once_in_the_next() -> None:
    voices: dict[str, int] = {}
    event = RunStopped("x", step=3)
    first, second = (WorkerTable(number, 1, voices) for number in (1, 2))
    for members in (first, second):
        members.expect_worker(0, 0.0)
    report = WorkerReport(0, 1, "a", 1, 0, (event, event), "me")
    assert len(first.process_report(report, 0.0)) == 2
    more = replace(report, first_number=1, events=(event,) * 3)
    assert len(second.process_report(more, 0.0)) == 2
    assert len(second.process_report(replace(report, stream_id="another"), 0.0)) == 2


def test_who_has_stopped_does_not_hang() -> None:
    members = _members((5, "reduce", 2, 10.0), (5, "compute", 1, 10.0))
    members[1].held_state = HeldState(1, 1, 4)
    hung = members.find_hung(50.0, 30.0)
    assert hung is not None
    assert hung.rank == 0
    members[0].held_state = HeldState(1, 0, 4)
    assert members.find_hung(50.0, 30.0) is None


def test_exit_codes_in_words() -> None:
    assert exit_codes.describe_exit_code(-9) == "SIGKILL"
    assert exit_codes.describe_exit_code(-200) == "signal 200"
    assert exit_codes.describe_exit_code(1) == "exit 1"
    assert "exit 3 (ended by os._exit" in exit_codes.describe_exit_code(3)
    assert exit_codes.describe_exit_code(exit_codes.PEER_LOST) == "exit 75 (lost its peers)"
