"""Restarts a mover that exits while training continues, and retries until one is alive.

A cause that prevents the start may pass, such as an unreachable run folder. A new mover may also
exit before it learns of the generation. So the exit of a mover starts one task. The task ends when
a mover is alive that serves the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from holdfast.errors import FencedError, HoldfastError

FIRST_MOVER_RESTART_DELAY_S, MAX_MOVER_RESTART_DELAY_S = 1.0, 15.0
"""Pause before the next attempt, in seconds: the first pause, and the longest."""


class MoverRestarter:
    """Restarts of the mover, at most one attempt at a time."""

    def __init__(
        self,
        restart: Callable[[], Awaitable[None]],
        is_alive: Callable[[], bool],
        say: Callable[[str], None],
        on_restarted: Callable[[], None] = lambda: None,
        delays_s: tuple[float, float] = (FIRST_MOVER_RESTART_DELAY_S, MAX_MOVER_RESTART_DELAY_S),
    ) -> None:
        """restart: starts a mover and tells it of the running generation
        (`MoverSupervisor.restart`). is_alive: returns True if a mover is alive. on_restarted:
        called when one is alive again. delays_s: the first and the longest pause between attempts,
        in seconds."""
        self._restart, self._is_alive, self._say, self._on_restarted = (
            restart,
            is_alive,
            say,
            on_restarted,
        )
        self._delays_s = delays_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the restart task unless it runs: a running task notices a lost mover itself."""
        if self._task is None or self._task.done():
            self._say("the mover has exited; a new one is started while training continues")
            self._task = asyncio.create_task(self._restart_until_alive())

    async def stop(self) -> None:
        """Start no further mover."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _restart_until_alive(self) -> None:
        pause, most = self._delays_s
        said = ""
        while words := await self._try_restart():
            if words != said:
                self._say(f"there is no new mover yet, and no checkpoint: {words}")
                said = words
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def _try_restart(self) -> str:
        """Try once; return why there is still no mover, "" if there is one."""
        try:
            await self._restart()
        except FencedError:  # the mover learned of a newer generation meanwhile
            pass
        except (HoldfastError, OSError) as error:
            return str(error)
        except Exception as error:  # our own bug: training continues anyway
            return f"{type(error).__name__}: {error}"
        if not self._is_alive():
            return "the new mover exited right after its start"
        self._on_restarted()
        return ""
