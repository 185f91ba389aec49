"""In place of a mover that ends while training goes on: another one, tried for until there is one.

What keeps it from starting may pass, as a run folder that is out of reach does; and one that has
just been started may end before it has been told of the generation. So the end of a mover begins
one task, and that ends when a mover is alive that serves the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from holdfast.errors import FencedError, HoldfastError

PAUSE_SECONDS, MOST_SECONDS = 1.0, 15.0
"""Before the next attempt: the first time, and at most."""


class Reviving:
    """At most one attempt at a time."""

    def __init__(
        self, revive: Callable[[], Awaitable[None]], alive: Callable[[], bool],
        say: Callable[[str], None], back: Callable[[], None] = lambda: None,
        pauses: tuple[float, float] = (PAUSE_SECONDS, MOST_SECONDS),
    ) -> None:  # fmt: skip
        """`revive` starts a mover and tells it of the running generation (`MoverLink.revive`);
        `alive` says whether there is one. `back` is called when there is again."""
        self._revive, self._alive, self._say, self._back = revive, alive, say, back
        self._pauses = pauses
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A mover has ended. What is under way sees for itself that there is none."""
        if self._task is None or self._task.done():
            self._say("the mover ended; a new one is started behind the training")
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Start none any more."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        pause, most = self._pauses
        said = ""
        while words := await self._attempt():
            if words != said:
                self._say(f"there is no new mover yet, and no checkpoint: {words}")
                said = words
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def _attempt(self) -> str:
        """Why there is still none; "" when there is."""
        try:
            await self._revive()
        except FencedError:  # it has been told of a newer generation meanwhile
            pass
        except (HoldfastError, OSError) as error:
            return str(error)
        except Exception as error:  # our own bug: training goes on all the same
            return f"{type(error).__name__}: {error}"
        if not self._alive():
            return "the mover ended again as soon as it had been started"
        self._back()
        return ""
