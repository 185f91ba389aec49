"""Time of an update of AdamW, and of a pass, with state and activations in each place.

One process updates N parameters in fp32 on one thread. Each round times all places, in an order
that rotates. The table has medians. `moved` is what a step reads and writes back. The floor of
`file` is the time of a plain program that reads and writes the same bytes of a file in that folder.
The floor of `host` is the time of copies. The update itself is the first row, and both overlap if
there is a core for each.

The second table has forward and backward of one microbatch in fp32 (`--shape`, two samples of 512
tokens), with activations in each place.

`hidden` is 1 - waited seconds / seconds of copies (`training/memory/transfers.py`).

With `--link` GB/s, what passes between host and device goes over an emulated link. It has that
speed in each direction, both at once. The copies are real. Then their thread sleeps until the link
would be done, and takes no processor, as a DMA engine. `--ratio` scales the link to this CPU: the
copy of a gradient takes that part of the time of the host's AdamW. A card on PCIe 5.0 has some 50
GB/s, and 8 channels of DDR5 have some 200 GB/s. AdamW takes 28 bytes of an element, and a gradient
has 4 bytes. So the ratio is (4 / 50) / (28 / 200) = 0.57. That is arithmetic, no measurement. This
CPU plays device and host. The host's AdamW runs `--slower` times, all but one of them on scratch.
20 is 4 TB/s of the device to 200 GB/s. So real copies are a small part of the link's time. The
floor is the time of the bytes on the link, in the busier direction. `memcpy s` is the time of plain
copies. With `--masters` fp32 parameters lie with the moments, as in bf16 without shards. (What is
computed with is then copied after the update, in bf16: 2 bytes an element, which is not in the
table.)

    python -m benchmarks.runtime.offload [--millions 16] [--rounds 7] [--piece-mb 16] [--folder F]
                                [--shape 15m] [--link GB/S | --ratio 0.57] [--slower 20] [--masters]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from benchmarks.runtime import recompute
from benchmarks.runtime.recompute import VOCABULARY
from holdfast.config.sections.memory import MemoryConfig, Place
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.core.sharding.optimizer_state import ParameterSettings
from holdfast.core.sharding.update_pieces import UpdatePiece
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.memory.activation_rooms import HostRoom, Spot
from holdfast.training.memory.activations import move_activations
from holdfast.training.memory.piece_stream import PieceStream, Update
from holdfast.training.memory.places import StateMemory
from holdfast.training.optimizers.offloaded_adamw import OffloadedAdamW
from holdfast.training.optimizers.optimizer import AdamW, Optimizer

Where = Literal["device", "host"]
CPU = torch.device("cpu")
ROWS = 16  # parameters of one size
CASES: tuple[tuple[Place, Place, Where], ...] = (
    ("device", "device", "device"),
    ("host", "device", "device"),
    ("host", "device", "host"),
    ("host", "host", "device"),
    ("host", "host", "host"),
    ("file", "device", "device"),
    ("file", "file", "device"),
)
"""Places of the optimizer's state, of gradients, and of the update."""
OVER_LINK = CASES[:5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=16, help="parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--piece-mb", type=float, default=16)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the files")
    parser.add_argument("--shape", default="15m", help="a preset of model.preset; '': no passes")
    parser.add_argument("--link", type=float, default=0, help="GB/s each way; 0: no link")
    parser.add_argument("--ratio", type=float, default=0, help="of a gradient's copy to its AdamW")
    parser.add_argument("--slower", type=int, default=20, help="AdamW of an emulated host, times")
    parser.add_argument("--masters", action="store_true", help="parameters lie with the moments")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.ratio:
        optimizer, _ = make(CASES[0], int(given.millions * 1e6) // ROWS, 16, given.folder)
        found = statistics.median(timed(optimizer, step)[0] for step in range(1, 8))
        given.link = 4 * given.millions / 1e3 / (given.ratio * found * given.slower)
    if given.link:
        print(f"emulated link: {given.link:.3g} GB/s each way")
    time_updates(given)
    if given.shape:
        time_passes(given)


class LinkedMemory(StateMemory):
    """Memory of a device behind a link: copies to it and from it take the link's time.

    Without a region a tensor lies on the emulated device, which is this CPU's memory too.
    """

    def __init__(self, config: MemoryConfig, link: float) -> None:
        super().__init__(config, CPU)
        self._link = link * 1e9

    def is_staged(self, tensor: Tensor) -> bool:
        is_far = super().is_staged(tensor)
        return is_far or (self.updates_on_host and self._is_on_device(tensor))

    def load(self, part: Tensor, into: Tensor) -> None:
        self._over_link(part, lambda: super(LinkedMemory, self).load(part, into))

    def store(self, part: Tensor, source: Tensor) -> None:
        self._over_link(part, lambda: super(LinkedMemory, self).store(part, source))

    def _is_on_device(self, tensor: Tensor) -> bool:
        return self._region_of(tensor) is None

    def _over_link(self, part: Tensor, copy: Callable[[], None]) -> None:
        begun = time.perf_counter()
        copy()
        if self._is_on_device(part) == self.updates_on_host:
            until = begun + part.nbytes / self._link
            time.sleep(max(0.0, until - time.perf_counter()))


class SlowerHost(OffloadedAdamW):
    """AdamW of an emulated host: the kernel runs several times, once on the state itself."""

    times = 1

    def _new_stream(self) -> PieceStream:
        stream = super()._new_stream()
        run, scratch = stream.run, dict[int, Tensor]()

        def run_slower(update: Update) -> None:
            def slower(piece: UpdatePiece, staged: list[list[Tensor]]) -> None:
                for role, parts in enumerate(staged):
                    size = sum(part.numel() for part in parts)
                    if role not in scratch or scratch[role].numel() < size:
                        scratch[role] = torch.ones(size)
                beside = [
                    list(scratch[role][: sum(sizes)].split(sizes))
                    for role, parts in enumerate(staged)
                    for sizes in [[part.numel() for part in parts]]
                ]
                for _ in range(self.times - 1):
                    update(piece, beside)
                update(piece, staged)

            run(slower)

        stream.run = run_slower  # type: ignore[method-assign]
        return stream


class LinkedRoom(HostRoom):
    """Room for activations behind the same link."""

    def __init__(self, memory: StateMemory, link: float) -> None:
        super().__init__(memory)
        self._link = link * 1e9

    def write(self, spot: Spot, offset: int, source: Tensor) -> None:
        begun = time.perf_counter()
        super().write(spot, offset, source)
        time.sleep(max(0.0, begun + source.nbytes / self._link - time.perf_counter()))

    def read(self, spot: Spot, offset: int, into: Tensor) -> None:
        begun = time.perf_counter()
        super().read(spot, offset, into)
        time.sleep(max(0.0, begun + into.nbytes / self._link - time.perf_counter()))


def hidden_words(memory: StateMemory, kinds: Sequence[str]) -> str:
    """Return the share hidden of what was copied since the last call, of these kinds together."""
    found = memory.transfers.take()
    copied, waited = (sum(found[kind][i] for kind in kinds if kind in found) for i in (1, 2))
    return f"{max(0.0, 1 - waited / copied):8.0%}" if copied else "       -"


def time_updates(given: argparse.Namespace) -> None:
    """The table of updates."""
    elements = int(given.millions * 1e6) // ROWS
    cases = OVER_LINK if given.link else CASES
    piece, folder, link, masters = given.piece_mb, given.folder, given.link, given.masters
    made = [make(case, elements, piece, folder, link, masters=masters) for case in cases]
    for optimizer, _ in made:
        if isinstance(optimizer, SlowerHost):
            optimizer.times = given.slower
    times: list[list[tuple[float, float]]] = [[] for _ in cases]
    for number in range(given.rounds + 1):
        for index in rotated(range(len(cases)), number):
            found = timed(made[index][0], number + 1)
            if number:  # the first one warms up
                times[index].append(found)
            else:
                made[index][1].transfers.take()
    print(
        "optimizer  gradients update    wall s    CPU s  moved MB  floor s memcpy s   hidden"
        "   device MB"
    )
    for case, (optimizer, memory), taken in zip(cases, made, times, strict=True):
        state, gradients, update = case
        wall, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
        loads, stores = moved(case, elements * ROWS, is_linked=link > 0, masters=masters)
        plain = floor_of(given.folder if "file" in (state, gradients) else "", loads, stores)
        floor = max(loads, stores) / given.link / 1e9 if given.link else plain
        staged = 0
        if isinstance(optimizer, OffloadedAdamW) and update == "device":
            staged = optimizer.staged_bytes
        on_device = 4 * elements * ROWS * (1 + 2 * (state == "device") + (gradients == "device"))
        hidden = hidden_words(memory, ("optimizer", "gradients", "parameters"))
        print(
            f"{state:<11}{gradients:<10}{update:<7}{wall:9.3f}{cpu:9.3f}"
            f"{(loads + stores) / 1e6:10.0f}{floor:9.3f}{plain:9.3f} {hidden}"
            f"{(on_device + staged) / 1e6:12.0f}"
        )


def time_passes(given: argparse.Namespace) -> None:
    """The table of passes."""
    tokens = torch.randint(VOCABULARY, (2, 512))
    places: tuple[Place, ...] = ("device", "host") if given.link else ("device", "host", "file")
    made = [make_objective(given.shape, place, given.folder, given.link) for place in places]
    times: list[list[tuple[float, float]]] = [[] for _ in places]
    for number in range(given.rounds + 1):
        for index in rotated(range(len(places)), number):
            found = recompute.timed(made[index][0], tokens)
            if number:
                times[index].append(found)
            else:
                made[index][1].transfers.take()
    print("activations   wall s    CPU s  moved MB  floor s memcpy s   hidden")
    for place, (_, memory), taken in zip(places, made, times, strict=True):
        wall, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
        away = memory.ledger.peak(place) if place != "device" else 0
        plain = floor_of(given.folder if place == "file" else "", away, away)
        floor = 2 * away / given.link / 1e9 if given.link else plain  # out, and later back
        print(
            f"{place:<11}{wall:9.3f}{cpu:9.3f}{2 * away / 1e6:10.0f}{floor:9.3f}{plain:9.3f} "
            f"{hidden_words(memory, ('activations',))}"
        )


def make_objective(
    shape: str, place: Place, folder: str, link: float = 0
) -> tuple[NextTokenObjective, StateMemory]:
    """A decoder with its loss, whose blocks keep their activations in a place."""
    memory = StateMemory(MemoryConfig(activations=place, folder=folder), CPU)
    objective = recompute.build(shape, "none")
    if place != "device":
        room = LinkedRoom(memory, link) if link else None
        move_activations(list(objective.decoder.layers), memory, is_compiled=False, room=room)
    return objective, memory


def rotated(indices: Sequence[int], by: int) -> list[int]:
    at = by % len(indices)
    return [*indices[at:], *indices[:at]]


def make(
    case: tuple[Place, Place, Where],
    elements: int,
    piece_mb: float,
    folder: str,
    link: float = 0,
    *,
    masters: bool = False,
) -> tuple[Optimizer, StateMemory]:
    """An optimizer of `ROWS` parameters with gradients, and its memory."""
    state, gradients, update = case
    config = MemoryConfig(
        optimizer=state, gradients=gradients, folder=folder, piece_mb=piece_mb, update=update
    )
    memory = LinkedMemory(config, link) if link else StateMemory(config, CPU)
    settings = [ParameterSettings(0.1)] * ROWS
    if masters and state != "device":
        parameters: list[Tensor] = memory.zeros("optimizer", [(elements,)] * ROWS, torch.float32)
    else:
        parameters = [torch.randn(elements) for _ in range(ROWS)]
    sums: list[Tensor] = memory.zeros("gradients", [(elements,)] * ROWS, torch.float32)
    for tensor in sums:
        tensor.normal_()
    if not memory.stages_updates:
        return AdamW(parameters, sums, settings, OptimizerConfig()), memory
    kind = SlowerHost if link and update == "host" else OffloadedAdamW
    return kind(parameters, sums, settings, OptimizerConfig(), {}, memory), memory


def timed(optimizer: Optimizer, step: int) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of an update."""
    cpu, wall = time.process_time(), time.perf_counter()
    optimizer.apply(step, 1e-3, 1.0)
    return time.perf_counter() - wall, time.process_time() - cpu


def moved(
    case: tuple[Place, Place, Where], elements: int, *, is_linked: bool, masters: bool
) -> tuple[int, int]:
    """Bytes that an update (reads, writes). masters: parameters lie with the moments."""
    state, gradients, update = case
    if update == "host":  # what lies on the device comes to the host, if it is another memory
        sums = 4 * elements if gradients == "device" and is_linked else 0
        parameters = 4 * elements if is_linked and not masters else 0
        return sums + parameters, parameters
    written = (8 + 4 * masters) * elements if state != "device" else 0
    return written + (4 * elements if gradients != "device" else 0), written


def floor_of(folder: str, loads: int, stores: int, piece: int = 16 * 2**20) -> float:
    """Seconds to read and write so many bytes of a file; without a folder, of memory."""
    if not loads:
        return 0.0
    room = memoryview(bytearray(os.urandom(piece)))
    if not folder:
        there = memoryview(bytearray(loads))
        begun = time.perf_counter()
        for start in range(0, loads - piece, piece):
            room[:] = there[start : start + piece]
            if start < stores:
                there[start : start + piece] = room
        return time.perf_counter() - begun
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, loads)
        for start in range(0, loads - piece, piece):  # in the state's files, each page was written
            os.pwrite(file.fileno(), room, start)
        begun = time.perf_counter()
        for start in range(0, loads - piece, piece):
            os.preadv(file.fileno(), [room], start)
            if start < stores:
                os.pwrite(file.fileno(), room, start)
        return time.perf_counter() - begun


if __name__ == "__main__":
    main()
