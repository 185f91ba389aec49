"""Holdfast's captures, with a mover that keeps, hashes, writes and commits them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from benchmarks.runtime.saving.task import Task
from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture
from holdfast.checkpoint.capture.chunked_copy import ChunkedCopy
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.layout import Layout, place_layout
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.wire.secret import Secret

SLOTS = 3
WAIT = 120.0


class Ours:
    """Every rank is a replica, so each captures its share of what all of them hold."""

    def __init__(self, name: str, task: Task, rank: int, state: Mapping[str, Tensor]) -> None:
        """name: "ours, waiting"; "ours, hidden": the copy runs during the next step; "ours,
        memory": the same, and nothing becomes durable."""
        topology = place_layout(Layout(dp_replicate=task.world), 1, ("here",) * task.world)
        table = tuple(TensorSpec(n, "F32", tuple(t.shape), 0) for n, t in state.items())
        client = MoverClient(task.socket, Secret.from_hex(task.secret), 1)
        client.expect(topology, table)
        self._capturer = Capturer(
            client, topology, table, rank, dict(state), run="bench", slots=SLOTS
        )
        self._hidden, self._durable = name != "ours, waiting", name != "ours, memory"
        self._newest = 0
        self._teller = ThreadPoolExecutor(1)  # a worker's reporter
        self._told: Future[None] = Future()

    def begin(self, step: int) -> None:
        if self._hidden:
            begun = self._capturer.begin(step, WAIT)
            assert isinstance(begun, ChunkedCopy), begun
        else:
            made = self._capturer.capture(step, WAIT)
            assert isinstance(made, CompletedCapture), made
        self._newest, told = step, Future[None]()
        self._told = told
        # As a worker does: when the copy is complete, which may be before the fence.
        self._capturer.call_when_copied(step, lambda cost: self._announce(step, told))

    def fence(self) -> None:
        self._capturer.fence()

    def finish(self) -> None:
        if self._newest:
            self._told.result(WAIT)
        if self._durable and self._newest:
            reason = self._capturer.wait_until_committed(self._newest, WAIT)
            assert reason is None, reason

    def close(self) -> None:
        self.finish()
        self._capturer.close()
        self._teller.shutdown()

    def _announce(self, step: int, told: Future[None]) -> None:
        def tell() -> None:
            try:
                skipped = self._capturer.announce(
                    step, {"position": 0}, SaveDestinations(self._durable)
                )
                assert skipped is None, skipped
                told.set_result(None)
            except BaseException as error:
                told.set_exception(error)

        self._teller.submit(tell)
