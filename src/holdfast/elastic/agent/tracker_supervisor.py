"""Keeps the processes of a run's trackers running, next to the agent that leads.

The agent gives a tracker one line and the read end of its lifeline. It gets an exit code, and of a
tracker that cannot work a sentence. So no agent, and no worker, ever waits for a tracker. Another
tracker that ends is started again after a pause. It continues where it stopped
(`report/trackers/process.py`).
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.elastic.event_log import Say
from holdfast.elastic.run_context import TrackerProgram
from holdfast.errors import UserError
from holdfast.wire.child_command import module_command

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
LEAD_CHECK_INTERVAL_S = 0.02
"""Seconds between two looks while this agent does not lead: a short run is over in less than
CHECK_INTERVAL_S."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Seconds before a tracker that ended is started again: at first, and at most."""
STABLE_S = 60.0
"""A tracker that ran for so long has recovered: the next pause is the first one again."""
TELL_AFTER_FAILURES = 3
"""Failures in a row after which the user is informed."""
HAND_OVER_S = 5.0
"""Seconds without the lead after which this agent ends its trackers: another agent has its own."""

_SENTENCE_S, _MAX_SENTENCE_BYTES = 5.0, 4096  # of the reason that a tracker gives


@dataclass
class _Tracked:
    """One tracker and its process."""

    program: TrackerProgram
    process: Process | None = None
    started_at: float = 0.0
    failures: int = 0  # in a row
    retry_at: float = 0.0
    refusal: str = ""  # why it cannot work: a mistake of the user, or a refusal of its server

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None


class TrackerSupervisor:
    """The trackers of one agent. Lives in one event loop."""

    def __init__(
        self,
        programs: Sequence[TrackerProgram],
        lifeline: int,
        is_leading: Callable[[], bool],
        say: Say,
        track_command: str,
    ) -> None:
        """Make a supervisor without processes.

        Args:
            lifeline: the read end of the agent's lifeline.
            is_leading: returns True if this agent leads the run.
            track_command: delivers by hand what a tracker lacks at the end.
        """
        self._tracked = [_Tracked(program) for program in programs]
        self._lifeline, self._is_leading, self._say = lifeline, is_leading, say
        self._track_command = track_command
        self._led_at: float | None = None  # when this agent led last

    async def watch(self) -> None:
        """Start trackers while this agent leads, and end them afterwards; never ends itself."""
        now = asyncio.get_running_loop().time
        while True:
            try:
                await self._check(now())
            except Exception:  # our own bug: the run does not end for it
                logger.exception("the trackers could not be looked after")
            await asyncio.sleep(LEAD_CHECK_INTERVAL_S if self._led_at is None else CHECK_INTERVAL_S)

    async def finish(self, timeout_s: float, *, is_leaving: bool = False) -> None:
        """Have every tracker deliver the rest, for `timeout_s` seconds at most. Call it when the
        journal is complete. is_leaving: the run was stopped, so no program waits longer."""
        if self._led_at is None:
            return
        # What a program with a wait of its own finds out goes to the other ones.
        slow = [tracked for tracked in self._tracked if tracked.program.finish_s is not None]
        for tracked in slow:
            wait_s = tracked.program.finish_s or 0.0
            await self._finish_slow(tracked, min(wait_s, timeout_s) if is_leaving else wait_s)
        quick = [tracked for tracked in self._tracked if tracked not in slow]
        results = await asyncio.gather(
            *(self._finish(tracked, timeout_s) for tracked in quick), return_exceptions=True
        )
        late = [
            tracked.program.name
            for tracked, is_complete in zip(quick, results, strict=True)
            if is_complete is not True and not tracked.refusal
        ]
        if late:
            self._say(
                f"not everything has reached {', '.join(late)}; deliver the rest with: "
                f"{self._track_command}"
            )
        for tracked in self._tracked:
            if tracked.refusal:
                name = tracked.program.name
                again = f"{self._track_command} --to {name} --option NAME=VALUE"
                again = tracked.program.by_hand or again
                self._say(f"{tracked.refusal}; then deliver the run with: {again}")

    async def _check(self, now: float) -> None:
        if self._is_leading():
            self._led_at = now
            for tracked in self._tracked:
                if tracked.process is not None and not tracked.is_alive:
                    await self._on_exit(tracked, now)
                if not (tracked.is_alive or tracked.refusal) and now >= tracked.retry_at:
                    await self._start(tracked, now)
        elif self._led_at is not None and now - self._led_at > HAND_OVER_S:
            self._led_at = None
            for tracked in self._tracked:
                _close_input(tracked)

    async def _start(self, tracked: _Tracked, now: float) -> None:
        tracked.started_at = now
        try:
            process = await asyncio.create_subprocess_exec(
                *module_command(tracked.program.module, "--lifeline", str(self._lifeline)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                pass_fds=(self._lifeline,),
                start_new_session=True,
            )
        except OSError as error:  # no memory, too many processes
            logger.warning("tracker %s did not start: %s", tracked.program.name, error)
            self._on_failure(tracked, now)
            return
        tracked.process = process
        assert process.stdin is not None
        process.stdin.write(tracked.program.spec_line)

    async def _on_exit(self, tracked: _Tracked, now: float) -> None:
        assert tracked.process is not None
        code, name = tracked.process.returncode, tracked.program.name
        if code == UserError.exit_code:
            await _take_refusal(tracked)
            self._say(f"{tracked.refusal}; it has ended, and training continues")
            return
        tracked.process = None
        logger.info("tracker %s ended with exit code %s", name, code)
        if now - tracked.started_at > STABLE_S:
            tracked.failures = 0
        self._on_failure(tracked, now)

    def _on_failure(self, tracked: _Tracked, now: float) -> None:
        pause = min(FIRST_PAUSE_S * 2**tracked.failures, MAX_PAUSE_S)
        tracked.failures += 1
        tracked.retry_at = now + pause
        if tracked.failures == TELL_AFTER_FAILURES:
            self._say(
                f"the tracker {tracked.program.name} cannot deliver (see {tracked.program.log}); "
                "training continues, and it will get everything once it can"
            )

    async def _finish_slow(self, tracked: _Tracked, timeout_s: float) -> None:
        """Have a program do the rest, and start it again if it is killed."""
        now = asyncio.get_running_loop().time
        end = now() + timeout_s
        while not await self._finish(tracked, max(0.0, end - now())) and not tracked.refusal:
            if now() + FIRST_PAUSE_S > end:
                name, by_hand = tracked.program.name, tracked.program.by_hand
                self._say(f"{name} is not complete; do the rest with: {by_hand}")
                return
            await asyncio.sleep(FIRST_PAUSE_S)

    async def _finish(self, tracked: _Tracked, timeout_s: float) -> bool:
        """Return True if the tracker has everything."""
        if not tracked.is_alive and not tracked.refusal and timeout_s > 0:
            await self._start(tracked, 0.0)  # the last attempt
        process = tracked.process
        if process is None:
            return False
        _close_input(tracked)
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
            if code == UserError.exit_code:
                await _take_refusal(tracked)
            return code == 0
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return False


def _close_input(tracked: _Tracked) -> None:
    """Tell a tracker that nothing more comes."""
    stdin: Any = None if tracked.process is None else tracked.process.stdin
    if stdin is not None:
        stdin.close()


async def _take_refusal(tracked: _Tracked) -> None:
    """Read why a tracker that has ended cannot work."""
    process, tracked.process = tracked.process, None
    said: Any = None if process is None else process.stdout
    name, log = tracked.program.name, tracked.program.log
    tracked.refusal = f"the tracker {name} cannot work: see {log}"
    with suppress(TimeoutError):
        async with asyncio.timeout(_SENTENCE_S):
            sentence = (await said.read(_MAX_SENTENCE_BYTES)).decode(errors="replace").strip()
            tracked.refusal = sentence or tracked.refusal
