"""A script that fails after its loop: the run is finished, and the command fails with the error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.event_log import EventLog
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.protocol.exit_codes import CRASHED, DONE, USER_ERROR
from holdfast.elastic.protocol.generation_outcome import FinishedOutcome, NodeOutcome
from holdfast.elastic.protocol.worker_messages import SCRIPT_END, WorkerOutcome, WorkerReport
from holdfast.elastic.run_result import run_result
from holdfast.events import RunFinished
from holdfast.layout import Layout, place_replicas

SENTENCE = "train.py:9: OSError: no folder"


class Log:
    path = Path("rank.log")

    def last_lines(self, count: int) -> str:
        return SENTENCE


class Unheard:
    def emit(self, source: str, event: object) -> None: ...


async def _outcome(codes: list[int], phase: str) -> tuple[Any, list[str]]:
    """The outcome of workers that have applied step 5, and exit with these codes."""
    said: list[str] = []
    group = WorkerGroup(
        place_replicas([Layout()] * len(codes), 1, ("a",) * len(codes)),
        0,
        ClusterConfig(),
        cast(EventLog, Unheard()),
        said.append,
        lambda: None,
        {},
    )
    group.expect_workers(dict(enumerate(range(100, 100 + len(codes)))))
    for rank, code in enumerate(codes):
        done = WorkerOutcome("finished", 5)
        group.process_report(WorkerReport(rank, 5, phase, 1, outcome=done))
        group.on_exited(rank, 100 + rank, code, Log(), "")
    return await asyncio.wait_for(group.outcome, 30), said


@pytest.mark.parametrize(
    ("codes", "phase", "error"),
    [
        ([DONE, DONE], SCRIPT_END, None),
        ([DONE, USER_ERROR], SCRIPT_END, SENTENCE),
        ([-9, DONE], SCRIPT_END, "worker 0 ended after the loop: SIGKILL"),
        ([DONE, CRASHED], "capture", None),
        ([-9, -9], "capture", None),
    ],
)
def test_the_script_of_a_worker_fails_after_the_loop(
    codes: list[int], phase: str, error: str | None
) -> None:
    outcome, said = asyncio.run(_outcome(codes, phase))
    assert outcome == FinishedOutcome(5, script_error=error)
    assert len(said) == sum(code != DONE for code in codes)
    received = NodeOutcome.from_json(NodeOutcome(ending=outcome).to_json())
    assert received.done == outcome
    result = run_result("", "", [FinishedOutcome(5), outcome], "", 5)
    assert result.event == RunFinished(error or "", step=5)
    assert result.exit_code == (2 if error else 0)
    assert (None if result.error is None else str(result.error)) == error
