"""The exit code of a node that leaves while steps are left to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.elastic.agent.agent import NodeResult
from holdfast.elastic.run_result import RunResult
from holdfast.events import Event, RunFinished, RunStopped


def result_of(event: Event | None, code: int) -> int:
    """The exit code of a node with `cluster.left_exit_code: 143`, for the run's result."""
    parts: Any = SimpleNamespace(
        context=SimpleNamespace(
            config=SimpleNamespace(cluster=SimpleNamespace(left_exit_code=143))
        ),
        run_controller=SimpleNamespace(
            result_reporter=SimpleNamespace(print_result=lambda result: None)
        ),
        node_runner=SimpleNamespace(closing_reason=""),
        shutdown_controller=SimpleNamespace(reason=""),
    )
    return NodeResult(parts).report_result(RunResult(event, "", code))


@pytest.mark.parametrize(
    ("event", "code", "expected"),
    [
        (RunStopped("notice", step=3), 0, 143),  # saved and left: another node may take its place
        (RunFinished("", step=9), 0, 0),
        (None, 0, 0),  # the run was over before this node had a part in it
        (RunStopped("the bucket", step=3), 1, 1),
    ],
)
def test_only_a_node_that_leaves_early_has_the_owners_code(
    event: Event | None, code: int, expected: int
) -> None:
    assert result_of(event, code) == expected
