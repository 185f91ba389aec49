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

from holdfast.elastic.protocol.fault_orders import RECOVERY, Armoury, Hit, Order
from holdfast.events import FaultInjected

logger = logging.getLogger(__name__)

_POLL = 0.01
_HEARD = 2.0  # seconds that a worker tries to have its last words written down
_WAIT = 20.0  # seconds that an order may take which is carried out elsewhere
_FIRST = 3  # gradients of a step that come before the one that counts as `backward`


class Faulted:
    """One process that obeys fault orders. `worker` is its `worker.Worker`."""

    def __init__(self, worker: Any, folder: Path) -> None:
        self._worker, self._armoury = worker, Armoury(folder)
        self._clock, self._offset = time.time, 0.0
        self._gradients = (0, 0)  # step, how many came in it
        self._wrong: list[tuple[Any, float]] = []  # targets of the open step, and by what their
        # loss is multiplied

    # --- a point is reached -----------------------------------------------------------------------
    def at(self, point: str, step: int | None = None, gradient: Any = None) -> None:
        worker = self._worker
        topology, rank = worker._topology, worker._rank
        here = worker.step if step is None else step
        order = self._armoury.due(
            point, 0 if point in RECOVERY else here, rank, topology.world_size, topology.generation
        )
        if order is None:
            return
        hit = Hit(
            order.number, topology.generation, here, rank, os.getpid(), topology.nodes[rank]
        )  # fmt: skip
        if not self._armoury.claim(hit):
            return
        logger.info("by order %d: %s at %s of step %d", order.number, order.deed, point, here)
        worker.reporter.emit(
            FaultInjected(order.number, order.fault, f"rank {rank}", point, step=here)
        )
        worker.reporter.flush(_HEARD)
        self._break(order, gradient)

    def _break(self, order: Order, gradient: Any) -> None:
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
                self._never_answered()
            case "hold the GIL":
                libc = ctypes.PyDLL(None)  # as opposed to CDLL, it keeps the lock
                while True:
                    libc.sleep(3600)
            case "not finite":
                gradient.view(-1)[0] = float("nan")
            case "corrupt state":
                first = self._worker._present.engine.state()[0].tensor.detach()
                first.view(torch.uint8).view(-1)[0] ^= 1
            case "clock":
                self._offset += 3600.0
            case "wait":
                self._until_done(order.number)
            case deed:
                raise ValueError(f"no worker knows the deed {deed!r}")

    def _never_answered(self) -> None:
        """Hang inside a collective that no other rank enters."""
        groups = self._worker._present.engine.groups
        others = list(groups.control.others)
        if not others:
            threading.Event().wait()
        groups.control.receive(torch.empty(1), others[0], 1 << 20).wait()

    def _until_done(self, number: int) -> None:
        deadline = time.monotonic() + _WAIT
        while not self._armoury.is_done(number) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def wait_for_gate(self, step: int) -> None:
        """Wait for the gate to open for `step`, and report progress: this is no hang."""
        worker = self._worker
        said = time.monotonic()
        while (gate := self._armoury.gate) is not None and step > gate:
            if worker._orders is not None and worker._orders.halted(worker.generation):
                return
            wishes = worker.reporter.wishes
            if wishes.stop or wishes.pause == worker.generation:
                return  # who is to leave, or to take others in, does so at the end of a step
            if time.monotonic() - said > 0.1:
                said = time.monotonic()
                worker.reporter.progress(step - 1, "data")  # it has not begun
            time.sleep(_POLL)

    def look(self, engine: Any, batches: Any) -> None:
        """Find the batches of the coming share whose loss is to be wrong."""
        wrong, node = self._armoury.wrong, self._worker._topology.nodes[self._worker._rank]
        share = engine.dealt[engine.groups.coordinate.replica]
        self._wrong = [
            (batch.targets, nan if one.times is None else one.times)
            for leaf, batch in zip(share, batches, strict=True)
            for one in wrong
            if batch.tokens and one.hits(engine.step, leaf, node)
        ]

    def drag(self, engine: Any) -> None:
        """Sleep as a slow device would: the larger its share of the step, the longer it takes."""
        if seconds := self._armoury.slow(self._worker._rank):
            time.sleep(seconds * len(engine.dealt[engine.groups.coordinate.replica]))

    def spoil(self, targets: Any, out: Any) -> Any:
        """Return a forward pass's output for these targets, multiplied if they are marked."""
        times = next((times for one, times in self._wrong if one is targets), None)
        return out if times is None else out * times

    def now(self) -> float:
        return self._clock() + self._offset

    def gradient(self, feeder: Any, gradient: Any) -> None:
        """Count a gradient of a backward pass."""
        engine = getattr(self._worker._session, "engine", None)
        if engine is None or gradient is None:
            return
        step, came = self._gradients
        came = came + 1 if step == engine.step else 1
        self._gradients = engine.step, came
        if came > _FIRST:
            self.at("backward", engine.step, gradient)


def arm(worker: Any, folder: Path) -> None:
    """Wrap this process's functions so that it breaks on order."""
    from holdfast.data.loader import Loader
    from holdfast.elastic.worker import worker as worker_module
    from holdfast.elastic.worker.checkpointer import ArenaSaver
    from holdfast.parallel.gradients.feeder import Feeder
    from holdfast.parallel.pipeline import Run
    from holdfast.train import engine, recover
    from holdfast.train.objective import NextToken
    from holdfast.train.optimizer import AdamW

    under = Faulted(worker, folder)
    time.time = under.now
    steps: Any = engine.StepEngine

    def step_of(made: Any, *_: Any) -> int:
        return int(made.step)

    _before(steps, "compute", under.look)
    _before(steps, "compute", lambda made, *_: under.drag(made))
    _before(steps, "compute", lambda made, *_: under.at("forward", step_of(made)))
    _after(steps, "compute", lambda made, *_: under.at("computed", step_of(made)))
    _after(steps, "begin", lambda _, step: under.at("begin", step))
    _before(steps, "update", lambda made, *_: under.at("voted", step_of(made)))
    _after(steps, "update", lambda made, *_: under.at("applied", step_of(made)))
    _before(AdamW, "apply", lambda _, step, *__: under.at("applying", step))
    _before(engine, "vote", lambda *_: under.at("reduced", worker._present.engine.step))
    _before(Feeder, "_take", lambda feeder, _, gradient: under.gradient(feeder, gradient))
    _before(Run, "_give", lambda run, step, *_: _handing(under, worker, step))
    _after(ArenaSaver, "capture", lambda saver, step, *_: under.at("capture", step))
    _before(recover, "agree", lambda *_: under.at("agreeing"))
    _before(recover, "complete", lambda *_: under.at("regrouping"))
    _before(recover, "move", lambda *_, **__: under.at("moving"))
    _before(worker_module, "restore", lambda *_: under.at("restoring"))
    loading: Any = Loader
    following = loading.__next__

    def gated(loader: Any) -> Any:
        batch = following(loader)
        under.wait_for_gate(batch.step)
        return batch

    loading.__next__ = gated
    plain = NextToken.forward

    def forward(module: Any, tokens: Any, targets: Any, *rest: Any) -> Any:
        return under.spoil(targets, plain(module, tokens, targets, *rest))

    objective: Any = NextToken
    objective.forward = forward


def _handing(under: Faulted, worker: Any, step: Any) -> None:
    if step.given is not None:
        under.at("sending", worker._present.engine.step)


def _before(holder: Any, name: str, call: Callable[..., object]) -> None:
    plain = getattr(holder, name)

    def wrapped(*given: Any, **named: Any) -> Any:
        call(*given, **named)
        return plain(*given, **named)

    setattr(holder, name, wrapped)


def _after(holder: Any, name: str, call: Callable[..., object]) -> None:
    plain = getattr(holder, name)

    def wrapped(*given: Any, **named: Any) -> Any:
        out = plain(*given, **named)
        call(*given, **named)
        return out

    setattr(holder, name, wrapped)
