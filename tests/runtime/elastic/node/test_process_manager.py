"""A node's processes: a fork server that fails to start for an unexpected reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.elastic.node import fork_server_supervisor
from holdfast.elastic.node.children import ChildFailedError
from holdfast.elastic.node.process_manager import ProcessManager
from holdfast.wire.secret import Secret


def test_a_template_that_fails_by_a_bug_is_said_and_is_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*_: Any) -> None:
        raise RuntimeError("nobody foresaw this")

    async def nothing(*_: Any) -> None:
        return

    async def scene() -> None:
        said: list[str] = []
        parts = {"node_suffix": "", "run_name": "r", "ensure_running": nothing, "stop": nothing}
        mover = cast(Any, SimpleNamespace(**parts))
        host = ProcessManager(
            mover,
            tmp_path,
            Secret(bytes(range(32))),
            "entry",
            (),
            0,
            on_mover_exit=lambda: None,
            on_fork_server_exit=lambda: None,
            say=said.append,
        )
        await host.ensure_processes(0)  # behind the training: no caller waits for it
        async with asyncio.timeout(30):
            while not said:
                await asyncio.sleep(0)
        assert len(said) == 1
        assert "nobody foresaw this" in said[0]
        with pytest.raises(ChildFailedError, match="nobody foresaw this"):
            await host.ensure_processes(1)
        await host.shut_down()

    monkeypatch.setattr(fork_server_supervisor, "ForkServer", SimpleNamespace(start=start))
    asyncio.run(scene())
