"""The user's script and the runner are two threads that take turns: only one runs at a time.

The runner gives an order and waits for the answer. The script answers and waits for the next order.
So neither sees half of what the other one does, and each wait has one thread that ends it. The
script's last answer is `ScriptEnded`. A script that gets no further order waits until its process
ends.

    runner                             script
    start            ------------->    begins
                     <-------------    LoopReached      at `run.steps(n)`
    OpenStep         ------------->    yields the step
                     <-------------    DataNamed        at the first `step.batches(dataset)`
    ComputeShare     ------------->    yields the batches
                     <-------------    ShareDone        at `step.apply()`, or at an engine's error
    OpenStep ...     ------------->    `apply` returns
    EndLoop          ------------->    leaves the loop, and runs to its end
                     <-------------    ScriptEnded
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from holdfast.tasks.task.batches import TaskMicrobatch
from holdfast.training.engine.loss_scale import LossScale
from holdfast.training.engine.stage_work import GradientListener

_ALIVE_EVERY_S = 0.5
"""Seconds after which a runner that waits for the script's end reports that it is alive."""


@dataclass(frozen=True)
class OpenStep:
    """The runner is at this step, for the first time or again."""

    step: int


@dataclass(frozen=True)
class ComputeShare:
    """Compute these microbatches. losses: takes the loss of each, as it comes. loss_scale: what the
    backward passes begin with."""

    leaves: Sequence[int]
    batches: Sequence[TaskMicrobatch]
    listener: GradientListener
    losses: list[Tensor]
    loss_scale: LossScale


@dataclass(frozen=True)
class EndLoop:
    """The last step is applied."""


@dataclass(frozen=True)
class LoopReached:
    """The script is ready for its first step."""


@dataclass(frozen=True)
class DataNamed:
    """The script has named its dataset, and waits for microbatches."""


@dataclass(frozen=True)
class ShareDone:
    """The script has computed its share. error: why the engine could not take it, or None."""

    error: Exception | None = None


@dataclass(frozen=True)
class ScriptEnded:
    """The script has ended. error: what it raised, or None."""

    error: BaseException | None = None


Order = OpenStep | ComputeShare | EndLoop
Answer = LoopReached | DataNamed | ShareDone | ScriptEnded


class Turns:
    """`start` and `give` belong to the runner's thread, `answer` to the script's."""

    def __init__(self) -> None:
        self._orders: SimpleQueue[tuple[Order, int]] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()

    def start(self, script: Callable[[], None]) -> Answer:
        """Run the script in a thread of its own; return its first answer."""

        def run() -> None:
            try:
                script()
            except BaseException as error:
                self._answers.put(ScriptEnded(error))
            else:
                self._answers.put(ScriptEnded())

        threading.Thread(target=run, name="script", daemon=True).start()
        return self._answers.get()

    def give(self, order: Order, on_wait: Callable[[], None] = lambda: None) -> Answer:
        """Give the script its turn; return its answer. on_wait: called now and then meanwhile."""
        self._orders.put((order, torch.get_num_threads()))
        while True:
            try:
                return self._answers.get(timeout=_ALIVE_EVERY_S)
            except Empty:
                on_wait()

    def answer(self, answer: Answer) -> Order:
        """End the script's turn; return the order that begins the next one."""
        self._answers.put(answer)
        order, threads = self._orders.get()
        if threads != torch.get_num_threads():  # which torch counts for each thread
            torch.set_num_threads(threads)
        return order
