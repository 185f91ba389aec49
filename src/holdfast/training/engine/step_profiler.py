"""torch's profiler over a few steps of a running job, as a Chrome trace for Perfetto or speedscope.

Steps come from the run file (`train.profile`) or from a request (`holdfast profile`). The profiler
only observes, so the curve keeps its bits. A thread of its own writes the file, because no step
waits for a disk. While steps are profiled, each phase is a range: of the profile, and on CUDA of
NVTX, for Nsight Systems.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from holdfast.config.sections.train import ProfileConfig
from holdfast.core.devices import device_kind
from holdfast.events import Event, StepsProfiled

logger = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 60.0
"""Seconds that the end of a run waits for a file."""


class StepProfiler:
    """Profiles steps of one rank. All calls but `emit` come from the training thread.

    folder: for the files. emit: takes an event, from any thread. request: the number of the newest
    request and how many steps it asks for; (0, 0): there is none.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        config: ProfileConfig,
        folder: Path,
        emit: Callable[[Event], None],
        request: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._rank, self._device, self._folder = rank, device, folder
        self._emit, self._request = emit, request
        self._planned = config.steps if rank in config.ranks else None
        self._number = 0  # of the newest request that was begun
        self._window: tuple[int, int] | None = None  # first and last step of what is under way
        self._is_asked = False  # by a request, not by the run file
        self._profile: profile | None = None
        self._recorded = 0  # newest step that it has completely; 0: none
        self._writer: threading.Thread | None = None
        self._step_range, self._phase_range = ExitStack(), ExitStack()

    def begin(self, step: int, phase: str) -> None:
        """Begin a step, with this phase, if it is to be profiled."""
        if self._profile is None:
            number, steps = self._request()
            self._is_asked = number > self._number
            if self._is_asked:
                self._number, self._window = number, (step, step + steps - 1)
            elif self._planned is not None and self._planned[0] <= step <= self._planned[1]:
                self._window, self._planned = (step, self._planned[1]), None
            else:
                return
            known = ProfilerActivity.__members__
            kinds = ("CPU", self._device.type.upper())
            self._recorded = 0
            self._profile = profile(activities={known[kind] for kind in kinds if kind in known})
            self._profile.start()
        self._open(self._step_range, f"step {step}")
        self._open(self._phase_range, phase)

    def phase(self, name: str) -> None:
        """Begin another phase of the step."""
        if self._profile is not None:
            self._phase_range.close()
            self._open(self._phase_range, name)

    def end(self, step: int) -> None:
        """End a step; after the last one that is asked for, have the profile written."""
        if self._profile is None or self._window is None:
            return
        self._phase_range.close()
        self._step_range.close()
        self._recorded = step
        if step < self._window[1]:
            return
        self._begin_to_write()

    def _begin_to_write(self) -> None:
        """Have what was recorded written by a thread of its own."""
        assert self._profile is not None
        assert self._window is not None
        done, (first, _), self._profile, self._window = self._profile, self._window, None, None
        done.stop()
        arguments = done, first, self._recorded, self._number if self._is_asked else 0
        self._writer = threading.Thread(target=self._write, args=arguments, name="profile")
        self._writer.start()

    def wait_until_written(self) -> None:
        """Wait for the newest file, at the end of the run. A profile that is still open has the
        steps up to this end."""
        if self._profile is not None and self._recorded:
            self._begin_to_write()
        if self._writer is not None:
            self._writer.join(_WRITE_TIMEOUT_S)

    def close(self) -> None:
        """Drop a profile whose steps did not end."""
        self._phase_range.close()
        self._step_range.close()
        if self._profile is not None:
            self._profile.stop()
            self._profile = self._window = None

    def _open(self, stack: ExitStack, name: str) -> None:
        stack.enter_context(record_function(name))
        if device_kind(self._device.type).has_nvtx:
            stack.enter_context(torch.cuda.nvtx.range(name))

    def _write(self, done: profile, first: int, last: int, request: int) -> None:
        path = self._folder / f"rank{self._rank}-steps{first}-{last}.json"
        problem = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            done.export_chrome_trace(str(part))
            part.replace(path)
        except (OSError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
            logger.warning("the profile of steps %d to %d is not written: %s", first, last, problem)
        self._emit(StepsProfiled(self._rank, first, str(path), request, problem, step=last))
