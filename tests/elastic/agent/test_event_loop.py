"""The agent's event loop in a script, and in a notebook, whose thread runs a loop already."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from holdfast.elastic.agent.event_loop import run_to_end


async def thread_id() -> int:
    return threading.get_ident()


def never() -> None:
    raise AssertionError("nothing was interrupted")


def test_without_a_loop_the_callers_thread_runs_it() -> None:
    assert run_to_end(thread_id(), never) == threading.get_ident()


def test_in_a_notebook_another_thread_runs_it() -> None:
    async def cell() -> int:
        return run_to_end(thread_id(), never)

    assert asyncio.run(cell()) != threading.get_ident()


def test_an_error_reaches_the_notebook() -> None:
    async def fail() -> int:
        raise ValueError("no room")

    async def cell() -> int:
        return run_to_end(fail(), never)

    with pytest.raises(ValueError, match="no room"):
        asyncio.run(cell())


def test_ctrl_c_in_a_notebook_reaches_the_agent() -> None:
    """Ctrl-C as a kernel gets it, whose handler raises KeyboardInterrupt."""
    interrupts = threading.Semaphore(0)

    async def agent() -> int:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            while not interrupts.acquire(blocking=False):
                await asyncio.sleep(0.01)
        return 130

    async def cell() -> int:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return run_to_end(agent(), interrupts.release)
        finally:
            signal.signal(signal.SIGINT, before)

    assert asyncio.run(cell()) == 130
