"""Arenas are locked in chunks, and unlocked before their mapping goes.

No driver is here. A stand-in counts the calls, refuses what CUDA refuses, and knows which addresses
are mapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture
from holdfast.checkpoint.capture.copy_plan import CopyPlan
from holdfast.checkpoint.capture.pinned_memory import PinnedMemory
from holdfast.checkpoint.capture.reconnecting_capturer import ReconnectingCapturer
from holdfast.checkpoint.memory.arena import PAGE, Arena, slot_capacity
from holdfast.core.format.manifest import place_boxes
from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.state_table import TensorSpec
from tests.support.mover_process import TABLE, Start, Workers, topology

ALREADY_REGISTERED, OUT_OF_MEMORY, NOT_REGISTERED = 712, 2, 713


class Driver:
    """Locks pages as CUDA does. most_bytes: of one call. room: bytes of all calls."""

    def __init__(self, most_bytes: int = 2**60, room: int = 2**60) -> None:
        self.most_bytes, self.room = most_bytes, room
        self.locked: dict[int, int] = {}
        self.registered = self.unregistered = self.cleared = 0

    def register(self, address: int, nbytes: int) -> int:
        if any(a < address + nbytes and address < a + n for a, n in self.locked.items()):
            return ALREADY_REGISTERED
        if nbytes > self.most_bytes or nbytes + sum(self.locked.values()) > self.room:
            return OUT_OF_MEMORY
        assert is_mapped(address)
        self.registered += 1
        self.locked[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        if self.locked.pop(address, None) is None or not is_mapped(address):
            return NOT_REGISTERED
        self.unregistered += 1
        return 0

    def clear_error(self) -> None:
        self.cleared += 1


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The CPU's tensors are captured as those of a device that locks pages."""
    found = Driver()

    def find(devices: Iterable[torch.device]) -> Driver:
        assert [device.type for device in devices] == ["cpu"]
        return found

    monkeypatch.setattr(copy_plan, "find_pinning", find)
    return found


@pytest.fixture
def arena() -> Iterator[Arena]:
    fd = Arena.create("test", 3, 9 * PAGE)
    yield Arena(fd)
    os.close(fd)


def base(arena: Arena) -> int:
    return torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()


def test_each_chunk_is_locked_once_and_unlocked(arena: Arena) -> None:
    driver, size = Driver(most_bytes=4 * PAGE), len(arena.memory)
    assert size == 31 * PAGE
    pinned = PinnedMemory(driver, base(arena), size, 4 * PAGE)
    assert sum(driver.locked.values()) == size
    assert driver.registered == 8
    assert pinned.edges == tuple(range(4 * PAGE, size, 4 * PAGE))
    pinned.close()
    pinned.close()
    assert driver.locked == {}
    assert driver.unregistered == 8


def test_a_chunk_that_is_refused_costs_no_other_and_is_said_once(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    driver, size = Driver(room=27 * PAGE), len(arena.memory)
    pinned = PinnedMemory(driver, base(arena), size, 4 * PAGE)
    assert sum(driver.locked.values()) == 27 * PAGE  # six chunks, and the short last one
    assert driver.cleared == 1
    (record,) = caplog.records
    assert record.message == (
        f"the device does not lock {4 * PAGE} of the arena's {31 * PAGE} bytes (error 2 of its "
        "driver): copies into these are slow"
    )
    pinned.close()
    assert driver.locked == {}


def test_no_copy_crosses_an_edge(driver: Driver) -> None:
    """Tensors that lie across the edges of chunks arrive intact in every slot."""
    table = (
        TensorSpec("wide", "F64", (3, 40, 29), 0),
        TensorSpec("matrix", "F32", (70, 90), 0),
        TensorSpec("scalar", "F32", (), None),
        TensorSpec("half", "BF16", (5, 3, 1000), 0),
        TensorSpec("bytes", "U8", (7001,), 0),
    )
    made = {
        spec.name: torch.randint(0, 200, spec.shape).to(copy_plan.TORCH_DTYPE[spec.dtype])
        for spec in table
    }
    # Turned, so that they are copied as a device's are, and not byte for byte.
    tensors = {
        name: t if t.dim() < 2 else t.transpose(0, 1).contiguous().transpose(0, 1)
        for name, t in made.items()
    }
    boxes = [whole_box(spec.name, spec.shape) for spec in table]
    placed = place_boxes(boxes, table)
    header = PAGE
    size = header + sum(p.nbytes for p in placed)
    fd = Arena.create("test", 2, slot_capacity(size))
    arena = Arena(fd)
    held = {box.name: box for box in boxes}
    plan = CopyPlan(arena, placed, header, 0, held, tensors, chunk_bytes=2 * PAGE)
    begin, edges = base(arena), range(0, len(arena.memory), 2 * PAGE)
    assert len(driver.locked) == len(edges) > 15
    for group in plan._strided:
        for targets in group.targets:
            for target in targets:
                first = target.data_ptr() - begin
                last = first + target.nbytes - 1
                assert first // (2 * PAGE) == last // (2 * PAGE)
    for slot in range(2):
        for piece in plan.inline_pieces(slot):
            piece()
        data = bytes(arena.data(slot, size))
        for p in placed:
            due = made[p.box.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert data[header + p.start : header + p.start + p.nbytes] == due
    plan.close()
    assert driver.locked == {}
    os.close(fd)


def test_a_state_that_does_not_fit_locks_nothing(driver: Driver, arena: Arena) -> None:
    spec = TensorSpec("w", "F32", (4, 4), 0)
    box = whole_box("w", (4, 4))
    with pytest.raises(Exception, match="is due"):
        CopyPlan(arena, place_boxes([box], (spec,)), PAGE, 0, {"w": box}, {"w": torch.zeros(4, 3)})
    assert driver.registered == 0


def test_arenas_of_generations_and_of_new_movers_are_unlocked_before_they_go(
    start: Start, driver: Driver
) -> None:
    """The stand-in refuses overlapping pages, and to unlock pages that are not mapped any more."""
    mover = start()
    for generation in (1, 2, 3):
        topo = topology(generation=generation)
        workers = Workers(mover.begin(topo), topo, let_go=generation > 1)
        assert len(driver.locked) == 1
        workers.commit(generation)
        (capturer,) = workers.capturers
        capturer.close()
        assert driver.locked == {}
    tensors = {spec.name: torch.zeros(spec.shape) for spec in TABLE if spec.dtype == "F32"}
    table = tuple(spec for spec in TABLE if spec.dtype == "F32")
    client = mover.begin(topology(generation=4), table)

    def make() -> Capturer:
        return Capturer(client, topology(generation=4), table, 0, tensors, run="test")

    outer = ReconnectingCapturer(make, make, lambda skipped: None)
    assert isinstance(outer.capture(1), CompletedCapture)
    assert len(driver.locked) == 1
    outer.close()  # as a worker does that leaves a generation or ends
    assert driver.locked == {}
    assert driver.registered == driver.unregistered == 4
