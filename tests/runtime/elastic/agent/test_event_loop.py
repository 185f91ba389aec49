"""The agent's event loop in a script, and in a notebook, whose thread runs a loop already."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading

import pytest

from holdfast.elastic.agent.event_loop import run_to_end


async def thread_id() -> int:
    return threading.get_ident()


def never(number: signal.Signals) -> None:
    raise AssertionError(f"{number} came")


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


def test_signals_in_a_notebook_reach_the_agent_and_handlers_come_back() -> None:
    """As a kernel gets them, from its start on."""
    sent = [signal.SIGINT, signal.SIGINT, signal.SIGTERM]
    passed_on: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()

    async def agent() -> int:
        for number in sent:
            os.kill(os.getpid(), number)
            assert await asyncio.to_thread(passed_on.get, timeout=60) == number
        return 130

    async def cell() -> int:
        return run_to_end(agent(), passed_on.put)

    assert threading.current_thread() is threading.main_thread()
    before = [signal.getsignal(number) for number in sent]
    assert asyncio.run(cell()) == 130
    assert [signal.getsignal(number) for number in sent] == before
