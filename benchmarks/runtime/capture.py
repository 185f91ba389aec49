"""The capture pause as a multiple of one memcpy of the same bytes: `python
benchmarks/runtime/capture.py`.

The floor of a pause is one copy of the rank's own bytes into memory that is already there. Floor
and capture run in turn, in the same process, on the same tensors, with a real mover that hashes and
writes the captures. The ratio is the median of paired rounds. The output has CPU seconds of the
training thread as well as wall seconds, because busy neighbours do not affect them.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.mover.main import MoverSpec
from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.core.sharding.state_table import StateTable, TensorSpec
from holdfast.layout import Layout, place_layout
from holdfast.wire.secret import Secret


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds of this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - wall, time.thread_time() - cpu


def table_of(megabytes: int, tensors: int) -> StateTable:
    rows = max(1, megabytes * 2**20 // tensors // 4096)
    return tuple(TensorSpec(f"t{i}", "F32", (rows, 1024), 0) for i in range(tensors))


@contextmanager
def moving(folder: Path, keep_last: int) -> Iterator[tuple[MoverClient, str]]:
    """A mover over a run folder, its client, and the run's name."""
    secret = Secret(secrets.token_bytes(32))
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-mover-") as place:
        boot = MoverSpec(
            str(folder),
            f"{place}/mover.sock",
            MoverSettings("bench", "", "", keep_last=keep_last),
            secret.hex(),
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.checkpoint.mover.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(boot.to_json_line())
        process.stdin.close()
        assert json.loads(process.stdout.readline())["ready"]
        try:
            yield MoverClient(boot.socket, secret, 1), "bench"
        finally:
            process.terminate()
            process.wait()


def measure(folder: Path, table: StateTable, rounds: int) -> None:
    with moving(folder, keep_last=1) as (client, run):
        topology = place_layout(Layout(), 1, ("here",))
        client.expect(topology, table)
        tensors = {spec.name: torch.randn(spec.shape) for spec in table}
        capturer = Capturer(client, topology, table, 0, tensors, run=run)
        report(rounds, capturer, tensors)


def report(rounds: int, capturer: Capturer, tensors: dict[str, torch.Tensor]) -> None:
    flat = torch.cat([t.reshape(-1) for t in tensors.values()])
    floor_to = torch.zeros_like(flat)
    floor_to.copy_(flat)  # its pages are there now
    walls, cpus, durable = [], [], []
    for step in range(1, rounds + 1):
        floor = timed(lambda: floor_to.copy_(flat))

        def capture(step: int = step) -> None:
            made = capturer.capture(step, wait=60)
            assert isinstance(made, CompletedCapture)

        pause = timed(capture)
        begun = time.perf_counter()
        assert capturer.announce(step, {}) is None
        reason = capturer.wait_until_committed(step, 120)
        assert reason is None, reason
        walls.append((pause[0], floor[0]))
        cpus.append((pause[1], floor[1]))
        durable.append(time.perf_counter() - begun)
    size = capturer.nbytes / 2**20
    print(f"{len(tensors)} tensors, {size:.0f} MiB, {rounds} rounds, one thread")
    print(f"{'':10}{'capture':>12}{'memcpy':>12}{'ratio':>8}")
    for name, pairs in (("wall s", walls), ("CPU s", cpus)):
        ratio = statistics.median(a / b for a, b in pairs)
        ours, floors = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:10}{ours:12.4f}{floors:12.4f}{ratio:8.2f}")
    print(f"{'durable s':10}{statistics.median(durable):12.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        measure(Path(folder), table_of(arguments.megabytes, arguments.tensors), arguments.rounds)


if __name__ == "__main__":
    main()
