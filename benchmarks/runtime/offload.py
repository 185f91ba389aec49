"""Time of an update of AdamW, and of a pass, with state and activations in each place.

One process updates N parameters in fp32 on one thread. Each round times all places, in an order
that rotates. The table has medians. `moved` is what a step reads and writes back. The floor of
`file` is the time of a plain program that reads and writes the same bytes of a file in that folder.
The floor of `host` is the time of copies. The update itself is the first row, and both overlap if
there is a core for each.

The second table has forward and backward of one microbatch in fp32 (`--shape`, two samples of 512
tokens), with activations in each place.

    python -m benchmarks.runtime.offload [--millions 16] [--rounds 7] [--piece-mb 16] [--folder F]
                                [--shape 15m]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.runtime import recompute
from benchmarks.runtime.recompute import VOCABULARY
from holdfast.config.sections.memory import MemoryConfig, Place
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.core.sharding.optimizer_state import ParameterSettings
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.memory.activations import move_activations
from holdfast.training.memory.places import StateMemory
from holdfast.training.optimizers.offloaded_adamw import OffloadedAdamW
from holdfast.training.optimizers.optimizer import AdamW, Optimizer

CPU = torch.device("cpu")
ROWS = 16  # parameters of one size
CASES: tuple[tuple[Place, Place], ...] = (
    ("device", "device"),
    ("host", "device"),
    ("host", "host"),
    ("file", "device"),
    ("file", "file"),
)
"""Places of the optimizer's state and of gradients."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=16, help="parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--piece-mb", type=float, default=16)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the files")
    parser.add_argument("--shape", default="15m", help="a preset of model.preset")
    given = parser.parse_args()
    torch.set_num_threads(1)
    time_updates(given)
    time_passes(given)


def time_updates(given: argparse.Namespace) -> None:
    """The table of updates."""
    elements = int(given.millions * 1e6) // ROWS
    optimizers = [make(case, elements, given.piece_mb, given.folder) for case in CASES]
    times: list[list[tuple[float, float]]] = [[] for _ in CASES]
    for number in range(given.rounds + 1):
        for index in rotated(range(len(CASES)), number):
            found = timed(optimizers[index], number + 1)
            if number:  # the first one warms up
                times[index].append(found)
    print("optimizer  gradients   wall s    CPU s  moved MB  floor s   device MB")
    for (state, gradients), optimizer, taken in zip(CASES, optimizers, times, strict=True):
        wall, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
        loads, stores = moved(state, gradients, elements * ROWS)
        floor = floor_of(given.folder if "file" in (state, gradients) else "", loads, stores)
        staged = optimizer.staged_bytes if isinstance(optimizer, OffloadedAdamW) else 0
        on_device = 4 * elements * ROWS * (1 + 2 * (state == "device") + (gradients == "device"))
        print(
            f"{state:<11}{gradients:<9}{wall:9.3f}{cpu:9.3f}{(loads + stores) / 1e6:10.0f}"
            f"{floor:9.3f}{(on_device + staged) / 1e6:12.0f}"
        )


def time_passes(given: argparse.Namespace) -> None:
    """The table of passes."""
    tokens = torch.randint(VOCABULARY, (2, 512))
    places: tuple[Place, ...] = ("device", "host", "file")
    made = [make_objective(given.shape, place, given.folder) for place in places]
    times: list[list[tuple[float, float]]] = [[] for _ in places]
    for number in range(given.rounds + 1):
        for index in rotated(range(len(places)), number):
            found = recompute.timed(made[index][0], tokens)
            if number:
                times[index].append(found)
    print("activations   wall s    CPU s  moved MB  floor s")
    for place, (_, memory), taken in zip(places, made, times, strict=True):
        wall, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
        away = memory.ledger.peak(place) if place != "device" else 0
        floor = floor_of(given.folder if place == "file" else "", away, away)
        print(f"{place:<11}{wall:9.3f}{cpu:9.3f}{2 * away / 1e6:10.0f}{floor:9.3f}")


def make_objective(shape: str, place: Place, folder: str) -> tuple[NextTokenObjective, StateMemory]:
    """A decoder with its loss, whose blocks keep their activations in a place."""
    memory = StateMemory(MemoryConfig(activations=place, folder=folder), CPU)
    objective = recompute.build(shape, "none")
    if place != "device":
        move_activations(list(objective.decoder.layers), memory, is_compiled=False)
    return objective, memory


def rotated(indices: Sequence[int], by: int) -> list[int]:
    at = by % len(indices)
    return [*indices[at:], *indices[:at]]


def make(case: tuple[Place, Place], elements: int, piece_mb: float, folder: str) -> Optimizer:
    """An optimizer of `ROWS` parameters with gradients."""
    state, gradients = case
    config = MemoryConfig(optimizer=state, gradients=gradients, folder=folder, piece_mb=piece_mb)
    memory, settings = StateMemory(config, CPU), [ParameterSettings(0.1)] * ROWS
    parameters = [torch.randn(elements) for _ in range(ROWS)]
    sums: list[Tensor] = memory.zeros("gradients", [(elements,)] * ROWS, torch.float32)
    for tensor in sums:
        tensor.normal_()
    if not memory.stages_updates:
        return AdamW(parameters, sums, settings, OptimizerConfig())
    return OffloadedAdamW(parameters, sums, settings, OptimizerConfig(), {}, memory)


def timed(optimizer: Optimizer, step: int) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of an update."""
    cpu, wall = time.process_time(), time.perf_counter()
    optimizer.apply(step, 1e-3, 1.0)
    return time.perf_counter() - wall, time.process_time() - cpu


def moved(state: Place, gradients: Place, elements: int) -> tuple[int, int]:
    """Bytes that an update (reads, writes)."""
    moments = 8 * elements if state != "device" else 0
    return moments + (4 * elements if gradients != "device" else 0), moments


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
