"""Runs the agent's event loop, also in a thread that runs a loop already, as a notebook's does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_to_end(main: Coroutine[Any, Any, int], on_interrupt: Callable[[], None]) -> int:
    """Run a coroutine in an event loop of its own; return its result.

    A thread runs one event loop at a time. If the caller's thread is inside one, the coroutine gets
    another thread. Only the caller's thread sees Ctrl-C then.

    on_interrupt: called for each Ctrl-C of that case.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    with ThreadPoolExecutor(1, "agent") as pool:
        result = pool.submit(asyncio.run, main)
        while True:
            try:
                return result.result()
            except KeyboardInterrupt:
                on_interrupt()
