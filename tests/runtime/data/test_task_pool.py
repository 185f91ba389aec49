"""Preparing processes that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.data.stages import task_pool
from holdfast.errors import HoldfastError


def test_a_task_that_cannot_be_handed_over_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started_and_killed() -> object:
        process = start()
        process.kill()
        process.wait()
        return process

    start = task_pool._start
    monkeypatch.setattr(task_pool, "_start", started_and_killed)
    task = {"kind": "inspect", "path": str(tmp_path / "none")}
    with (
        pytest.raises(HoldfastError, match="a preparing process ended with -9"),
        task_pool.TaskPool(1) as processes,
    ):
        processes.run([task], lambda task: None)
