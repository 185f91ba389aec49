"""Faults that a worker causes in itself, by orders in a folder
(`elastic/protocol/fault_orders.py`).

Loaded only if the run file sets `cluster.faults`. It wraps the places that orders may name, in this
process alone. Before a worker breaks, it records the fault durably in the folder, and in the
journal. So the journal shows the moment itself, not a later interpretation.

If the folder has a gate, workers also wait for it before each step. So a fault meets its intended
step on a machine of any speed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import torch

from holdfast.elastic.protocol.fault_orders import (
    RECOVERY_POINTS,
    FaultHit,
    FaultOrder,
    FaultOrders,
)
from holdfast.events import FaultInjected

logger = logging.getLogger(__name__)

_POLL_S = 0.01
_LAST_REPORT_TIMEOUT_S = 2.0  # seconds that a worker tries to have its last words written down
_OUTSIDE_ACTION_TIMEOUT_S = 20.0  # seconds that an order may take which is carried out elsewhere
# gradients of a step that come before the one that counts as `backward`
_GRADIENTS_BEFORE_BACKWARD = 3


class FaultInjector:
    """One process that obeys fault orders. `worker` is its `worker.Worker`."""

    def __init__(self, worker: Any, folder: Path) -> None:
        self._worker, self._fault_orders = worker, FaultOrders(folder)
        self._clock, self._clock_offset_s = time.time, 0.0
        self._gradients_seen = (0, 0)  # step, how many came in it
        # targets of the open step, and by what their
        self._corrupt_inputs: list[tuple[Any, float]] = []
        # loss is multiplied

    # --- a point is reached -----------------------------------------------------------------------
    def reached(self, point: str, step: int | None = None, gradient: Any = None) -> None:
        worker = self._worker
        topology, rank = worker.connection.topology, worker.connection.rank
        here = worker.step if step is None else step
        order = self._fault_orders.find_due(
            point,
            0 if point in RECOVERY_POINTS else here,
            rank,
            topology.world_size,
            topology.generation,
        )
        if order is None:
            return
        hit = FaultHit(
            order.number, topology.generation, here, rank, os.getpid(), topology.nodes[rank]
        )
        if not self._fault_orders.claim(hit):
            return
        logger.info("by order %d: %s at %s of step %d", order.number, order.deed, point, here)
        worker.reporter.emit(
            FaultInjected(order.number, order.fault, f"rank {rank}", point, step=here)
        )
        worker.reporter.flush(_LAST_REPORT_TIMEOUT_S)
        self._carry_out(order, gradient)

    def _carry_out(self, order: FaultOrder, gradient: Any) -> None:
        match order.deed:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(7)
            case "raise":
                raise ValueError(f"broken by order {order.number}")
            case "memory":
                torch.empty(1 << 60, dtype=torch.uint8)  # the allocator refuses
            case "hang":
                threading.Event().wait()
            case "hang inside":
                # Hang inside a collective that no other rank enters.
                groups = self._worker.held_session.current.engine.groups
                others = list(groups.control.others)
                if not others:
                    threading.Event().wait()
                groups.control.receive(torch.empty(1), others[0], 1 << 20).wait()
            case "hold the GIL":
                libc = ctypes.PyDLL(None)  # as opposed to CDLL, it keeps the lock
                while True:
                    libc.sleep(3600)
            case "not finite":
                gradient.view(-1)[0] = float("nan")
            case "wrong change":
                gradient.mul_(-10)
            case "corrupt state":
                first = self._worker.held_session.current.engine.state()[0].tensor.detach()
                first.view(torch.uint8).view(-1)[0] ^= 1
            case "clock":
                self._clock_offset_s += 3600.0
            case "wait":
                deadline = time.monotonic() + _OUTSIDE_ACTION_TIMEOUT_S
                while not self._fault_orders.is_done(order.number) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
            case deed:
                raise ValueError(f"no worker knows the deed {deed!r}")

    def wait_for_gate(self, step: int) -> None:
        """Wait for the gate to open for `step`, and report progress: this is no hang."""
        worker = self._worker
        said = time.monotonic()
        while (gate := self._fault_orders.gate) is not None and step > gate:
            if worker._commands is not None and worker._commands.is_halted(worker.generation):
                return
            wishes = worker.reporter.requests
            if wishes.should_stop or wishes.pause_generation == worker.generation:
                return  # who is to leave, or to take others in, does so at the end of a step
            if time.monotonic() - said > 0.1:
                said = time.monotonic()
                worker.reporter.progress(step - 1, "data")  # it has not begun
            time.sleep(_POLL_S)

    def find_corrupt_batches(self, engine: Any, batches: Any) -> None:
        """Find the batches of the coming share whose loss is to be wrong."""
        connection = self._worker.connection
        wrong = self._fault_orders.corrupt_loss_rules
        node = connection.topology.nodes[connection.rank]
        share = engine.dealt_shares[engine.groups.coordinate.replica]
        self._corrupt_inputs = [
            (engine.executor.arguments(batch)[0], nan if one.times is None else one.times)
            for leaf, batch in zip(share, batches, strict=True)
            for one in wrong
            if batch.tokens and one.applies_to(engine.step, leaf, node)
        ]

    def slow_down(self, engine: Any) -> None:
        """Sleep as a slow device would: the larger its share of the step, the longer it takes."""
        if seconds := self._fault_orders.slowdown_s(self._worker.connection.rank):
            time.sleep(seconds * len(engine.dealt_shares[engine.groups.coordinate.replica]))

    def corrupt_loss(self, inputs: Any, out: Any) -> Any:
        """Return a forward pass's output for these inputs, multiplied if they are marked."""
        times = next((times for one, times in self._corrupt_inputs if one is inputs), None)
        return out if times is None else out * times

    def now(self) -> float:
        return self._clock() + self._clock_offset_s

    def on_gradient(self, feeder: Any, gradient: Any) -> None:
        """Count a gradient of a backward pass."""
        engine = self._worker.held_session.engine
        if engine is None or gradient is None:
            return
        step, came = self._gradients_seen
        came = came + 1 if step == engine.step else 1
        self._gradients_seen = engine.step, came
        if came > _GRADIENTS_BEFORE_BACKWARD:
            self.reached("backward", engine.step, gradient)


def install_faults(worker: Any, folder: Path) -> None:
    """Wrap this process's functions so that it breaks on order."""
    from holdfast.data.stream.loader import StepLoader
    from holdfast.elastic.worker import worker as worker_module
    from holdfast.elastic.worker.checkpointer import SnapshotSaver
    from holdfast.parallel.gradients.feeder import GradientFeeder
    from holdfast.parallel.pipeline.pipeline import PipelineRun
    from holdfast.tasks.task.module import TaskObjective
    from holdfast.training.engine import engine
    from holdfast.training.engine.learners import LearnerExecutor
    from holdfast.training.engine.objective import NextTokenObjective
    from holdfast.training.optimizers.optimizer import AdamW
    from holdfast.training.optimizers.torch_optimizer import OptimizerParts
    from holdfast.training.recover import recover

    under = FaultInjector(worker, folder)
    time.time = under.now
    steps: Any = engine.StepEngine

    def step_of(made: Any, *_: Any) -> int:
        return int(made.step)

    _call_before(steps, "compute", under.find_corrupt_batches)
    _call_before(steps, "compute", lambda made, *_: under.slow_down(made))
    _call_before(steps, "compute", lambda made, *_: under.reached("forward", step_of(made)))
    _call_after(steps, "compute", lambda made, *_: under.reached("computed", step_of(made)))
    _call_after(steps, "begin", lambda _, step: under.reached("begin", step))
    _call_before(steps, "update", lambda made, *_: under.reached("voted", step_of(made)))
    _call_after(steps, "update", lambda made, *_: under.reached("applied", step_of(made)))
    for optimizer in (AdamW, OptimizerParts):  # the first may be a part of the second
        _call_before(optimizer, "apply", lambda _, step, *__: under.reached("applying", step))
    _call_before(
        engine, "vote", lambda *_: under.reached("reduced", worker.held_session.current.engine.step)
    )
    _call_before(
        GradientFeeder, "_take", lambda feeder, _, gradient: under.on_gradient(feeder, gradient)
    )
    _call_before(
        PipelineRun, "_give", lambda run, step, *_: _on_stage_hand_over(under, worker, step)
    )
    _call_after(SnapshotSaver, "capture", lambda saver, step, *_: under.reached("capture", step))
    _call_before(recover, "agree", lambda *_: under.reached("agreeing"))
    _call_before(recover, "complete", lambda *_: under.reached("regrouping"))
    _call_before(recover, "move", lambda *_, **__: under.reached("moving"))
    _call_before(worker_module, "restore", lambda *_: under.reached("restoring"))
    loading: Any = StepLoader
    following = loading.__next__

    def gated(loader: Any) -> Any:
        batch = following(loader)
        under.wait_for_gate(batch.step)
        return batch

    loading.__next__ = gated
    learners: Any = LearnerExecutor
    plain_changes = learners._changes

    def changes(made: Any, *rest: Any) -> Any:
        found = plain_changes(made, *rest)
        under.reached("changed", made.step(), found[0])
        return found

    learners._changes = changes
    for objective in (NextTokenObjective, TaskObjective):
        _corrupt_losses(objective, under)


def _corrupt_losses(objective: Any, under: FaultInjector) -> None:
    plain = objective.forward

    def forward(module: Any, inputs: Any, *rest: Any, **of_stage: Any) -> Any:
        return under.corrupt_loss(inputs, plain(module, inputs, *rest, **of_stage))

    objective.forward = forward


def _on_stage_hand_over(injector: FaultInjector, worker: Any, step: Any) -> None:
    if step.outgoing is not None:
        injector.reached("sending", worker.held_session.current.engine.step)


def _call_before(holder: Any, name: str, call: Callable[..., object]) -> None:
    plain = getattr(holder, name)

    def wrapped(*given: Any, **named: Any) -> Any:
        call(*given, **named)
        return plain(*given, **named)

    setattr(holder, name, wrapped)


def _call_after(holder: Any, name: str, call: Callable[..., object]) -> None:
    plain = getattr(holder, name)

    def wrapped(*given: Any, **named: Any) -> Any:
        out = plain(*given, **named)
        call(*given, **named)
        return out

    setattr(holder, name, wrapped)
