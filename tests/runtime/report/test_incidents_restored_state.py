"""What a recovery says of the state that it began from."""

from __future__ import annotations

from holdfast.events import (
    CheckpointRestored,
    Event,
    GenerationStarted,
    Record,
    RestorePointFound,
    StepDone,
    WorkerLost,
)
from holdfast.report.ledger.incidents import IncidentBook


def test_an_incident_says_where_the_state_came_from_and_what_each_phase_took() -> None:
    phases = {"open": 0.002, "read": 0.01, "verify": 0.02, "copy": 0.03}
    story: list[tuple[int, Event]] = [
        (1, WorkerLost(1, 77, "SIGKILL", "exit", step=9)),
        (2, RestorePointFound("commits/x", False, 0.004, step=8)),
        (2, GenerationStarted({}, "worker_lost", "commits/x", step=8)),
        (2, CheckpointRestored(0, "commits/x", 100, 0.05, {}, {"memory": 100}, step=8)),
        (2, CheckpointRestored(1, "commits/x", 100, 0.07, phases, {"memory": 90, "peer a": 10})),
        (2, StepDone(1.0, 10, 1.0, 0.1, 0.5, step=9)),
    ]
    book = IncidentBook()
    for at, (generation, event) in enumerate(story):
        book.observe(Record(generation, "agent", at, float(at), event), float(at))
    (incident,) = book.incidents
    assert incident.seconds == 5.0
    assert incident.source == (
        "from memory and peer a: find 0.004 s, open 0.002 s, read 0.010 s, verify 0.020 s, "
        "copy 0.030 s"
    )
