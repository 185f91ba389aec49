"""What a restore costs, as multiples of its floors: `python -m benchmarks.restore`.

A real mover process holds the state of a run (by default 1 GB) in memory and has made it durable.
Then the state is read by boxes, onto the layout that wrote it and onto another one (shards of 8
ranks onto 3), from memory, from the disk, and from a store where every request takes 20 ms. Every
byte is checked. Floors are measured in the same run, in turn with the cases: one copy of the bytes
between warm memory; one out of the mover's memory by a process that maps it first, as a new worker
must (page faults, dearer in a virtual machine); xxh3 over them; a plain read of the files one after
another; one object of the same bytes from the slow store. CPU seconds are those of the process that
restores; `read` is bytes read per byte needed. The kernel is told to forget the files before
each read from the disk. No torch.

"killed worker" is what stands between a worker's death and its successor's state: find the newest
step, ask for the memory, map it, read and check; without the start of a process.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from holdfast.checkpoint.arena import Arena, digest, slot_capacity
from holdfast.checkpoint.blob import header, total_size
from holdfast.checkpoint.mover import MoverBoot
from holdfast.checkpoint.mover_client import MoverClient
from holdfast.checkpoint.restore import Checkpoint
from holdfast.checkpoint.service import Settings
from holdfast.checkpoint.sources import MappedSource, Mixed, Readable, Source, StoreSource
from holdfast.layout import Layout, Topology, place
from holdfast.spec.boxes import Box
from holdfast.spec.manifest import Commit, commit_key, placed
from holdfast.spec.ownership import owned_boxes
from holdfast.spec.state import StateTable, TensorSpec, local_boxes
from holdfast.wire.runstore import FolderStore
from holdfast.wire.secret import Secret
from holdfast.wire.term import open_generation

STEP = 1
REQUEST_SECONDS = 0.02
SLOW_THREADS = 48
RANGE_BYTES = 8 * 2**20
NOTHING = memoryview(b"")


class Cost(NamedTuple):
    wall: float
    cpu: float


class Row(NamedTuple):
    name: str
    cost: Cost
    floor: str
    read: float | None


class SlowStore:
    """A store that answers every request after a fixed time, as a distant bucket does."""

    def __init__(self, store: Readable) -> None:
        self._store = store

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        time.sleep(REQUEST_SECONDS)
        self._store.read_into(key, start, out)


class Mover:
    """A mover process, and the ranks that hand their state over to it."""

    def __init__(self, folder: Path) -> None:
        self.store, self.secret = FolderStore(folder / "run"), Secret(secrets.token_bytes(32))
        self.socket = f"{folder}/mover.sock"
        settings = Settings("bench", "", "", keep_last=1)
        boot = MoverBoot(str(folder / "run"), self.socket, settings, self.secret.hex())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.checkpoint.mover"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(boot.to_line())
        self._process.stdin.close()
        assert json.loads(self._process.stdout.readline())["ready"]

    def client(self, generation: int) -> MoverClient:
        return MoverClient(self.socket, self.secret, generation)

    def begin(self, topology: Topology, table: StateTable) -> None:
        open_generation(self.store, topology.generation, {})
        self.client(topology.generation).expect(topology, table)

    def hand_over(self, topology: Topology, table: StateTable) -> None:
        """Every rank's part of the state, in memory and durable when this returns."""
        client = self.client(topology.generation)
        arenas = []
        for rank in range(topology.world_size):
            tensors = placed(owned_boxes(topology, table, rank), table)
            head = header(tensors)
            size = total_size(head, tensors)
            arena = Arena(client.arena(rank, slot_capacity(size), 2))
            arena.begin(0)
            data = arena.data(0, size)
            data[: len(head)] = head
            noise = np.random.default_rng(rank).bytes(min(size - len(head), 2**24))
            body = np.frombuffer(data[len(head) :], np.uint8)
            body[:] = np.resize(np.frombuffer(noise, np.uint8), len(body))
            made = arena.finish(0, digest("bench"), topology.generation, STEP, size, digest(head))
            client.captured(rank, STEP, 0, made.sequence, {})
            arenas.append(arena)
        reason = client.settle(STEP, 600.0)
        assert reason is None, reason

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        if self._process.stdout is not None:
            self._process.stdout.close()


def table_of(nbytes: int) -> StateTable:
    """Parameters and two moments, as a small decoder has them: matrices of some megabytes."""
    count = max(2, nbytes // 3 // (6 * 2**20))
    rows = max(8, nbytes // 3 // count // 4096)
    return tuple(
        TensorSpec(f"{prefix}.layers.{i}.weight", "F32", (rows, 1024), 0)
        for prefix in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        for i in range(count)
    )


def wanted(topology: Topology, table: StateTable, rank: int) -> list[tuple[Box, memoryview]]:
    """What a rank holds, and warm memory for it."""
    boxes = [box for box in local_boxes(topology, table, rank) if box.size]
    return [(box, memoryview(np.ones(box.size * 4, np.uint8))) for box in boxes]


def timed(work: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


@contextmanager
def mapped(mover: Mover, generation: int, key: str) -> Iterator[tuple[Commit, Mixed]]:
    holdings = mover.client(generation).holdings(key)
    memory = MappedSource(holdings.slots)
    try:
        yield holdings.commit, Mixed([memory])
    finally:
        memory.close()


class Bench:
    """The cases over one state, each run once a round, so that floors and cases take turns."""

    def __init__(self, mover: Mover, writers: Topology, table: StateTable) -> None:
        self.mover, self.table = mover, table
        self.key = commit_key(writers.generation, STEP)
        self.commit = Checkpoint.open(mover.store, self.key).commit
        self.generation = writers.generation
        self.nbytes = sum(spec.nbytes for spec in table)
        self.target = np.ones(self.nbytes, np.uint8)
        self.source = np.ones(self.nbytes, np.uint8)
        self.read: dict[str, float] = {}

    def floors(self) -> dict[str, Callable[[], object]]:
        return {
            "memcpy": lambda: np.copyto(self.target, self.source),
            "copy from mapped memory": self._mapped_copy,
            "xxh3": lambda: xxh3_128_digest(self.source),
            "sequential read": self._sequential,
            "one object, 20 ms a request": self._one_object,
        }

    def cases(self, readers: Sequence[Topology]) -> dict[str, tuple[Callable[[], object], str]]:
        found: dict[str, tuple[Callable[[], object], str]] = {}
        store = self.mover.store
        for topology in readers:
            ranks = topology.world_size
            plans = [wanted(topology, self.table, rank) for rank in range(ranks)]
            name = f"{len(self.commit.writers)} ranks onto {ranks}"
            found[f"memory, {name}"] = (self._memory(name, plans), "copy from mapped memory")
            disk = self._stored(f"disk, {name}", plans, StoreSource(store), None)
            found[f"disk, {name}"] = (disk, "sequential read")
            slow = StoreSource(SlowStore(store), "slow store")
            case = self._stored(f"slow store, {name}", plans, slow, SLOW_THREADS)
            found[f"slow store, {name}"] = (case, "one object, 20 ms a request")
        return found

    def _memory(self, name: str, plans: list[list[tuple[Box, memoryview]]]) -> Callable[[], None]:
        def run() -> None:
            with mapped(self.mover, self.generation, self.key) as (commit, mixed):
                self._fill(f"memory, {name}", commit, mixed, plans, None)

        return run

    def _stored(
        self,
        name: str,
        plans: list[list[tuple[Box, memoryview]]],
        source: Source,
        threads: int | None,
    ) -> Callable[[], None]:
        return lambda: self._fill(name, self.commit, Mixed([source]), plans, threads)

    def _fill(
        self, name: str, commit: Commit, mixed: Mixed, plans: list[list[tuple[Box, memoryview]]],
        threads: int | None,
    ) -> None:  # fmt: skip
        # Each rank is another process; here they go one after the other, except where they would
        # only wait side by side.
        with ThreadPoolExecutor(len(plans) if threads == SLOW_THREADS else 1) as ranks:
            share = SLOW_THREADS // len(plans) if threads == SLOW_THREADS else None
            list(ranks.map(lambda p: Checkpoint(mixed, commit).read_all(p, threads=share), plans))
        needed = sum(out.nbytes for plan in plans for _, out in plan)
        self.read[name] = sum(mixed.tally.bytes.values()) / needed

    def _mapped_copy(self) -> None:
        """One copy by a process that has not had this memory before, as a new worker has not."""
        holdings = self.mover.client(self.generation).holdings(self.key)
        memory, at = MappedSource(holdings.slots), 0
        for writer in holdings.commit.writers:
            blob = writer.blob
            data = memory.data(blob.key, blob.data_start, blob.size - blob.data_start, NOTHING)
            np.copyto(self.target[at : at + len(data)], np.frombuffer(data, np.uint8))
            at += len(data)
        del data
        memory.close()

    def drop_cache(self) -> None:
        """Let the kernel forget the files, as far as it does: they are read from the disk then."""
        for writer in self.commit.writers:
            fd = os.open(self.mover.store.folder / writer.blob.key, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _sequential(self) -> None:
        buffer = memoryview(bytearray(RANGE_BYTES))
        for writer in self.commit.writers:
            path = self.mover.store.folder / writer.blob.key
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def _one_object(self) -> None:
        """The same bytes and the same number of requests at a time, as one object would take."""
        slow = SlowStore(self.mover.store)
        ranges = [
            (writer.blob.key, start, min(RANGE_BYTES, writer.blob.size - start))
            for writer in self.commit.writers
            for start in range(0, writer.blob.size, RANGE_BYTES)
        ]

        def one(at: tuple[str, int, int]) -> None:
            slow.read_into(at[0], at[1], memoryview(bytearray(at[2])))

        with ThreadPoolExecutor(SLOW_THREADS) as threads:
            list(threads.map(one, ranges))


def killed_worker(mover: Mover, bench: Bench, generation: int) -> Cost:
    """From the question what to begin from to the last checked byte."""
    topology = place(Layout(), generation, ("node",))
    plan = wanted(topology, bench.table, 0)
    open_generation(mover.store, generation, {})

    def run() -> None:
        client = mover.client(generation)
        newest = client.newest()
        assert newest.key is not None
        client.expect(topology, bench.table, newest.step)
        with mapped(mover, generation, newest.key) as (commit, mixed):
            Checkpoint(mixed, commit).read_all(plan)

    return timed(run)


def measure(folder: Path, megabytes: int, rounds: int) -> list[Row]:
    mover = Mover(folder)
    try:
        table = table_of(megabytes * 2**20)
        writers = place(Layout(dp_shard=8), 1, ("node",) * 8)
        mover.begin(writers, table)
        mover.hand_over(writers, table)
        bench = Bench(mover, writers, table)
        floors = bench.floors()
        cases = bench.cases([
            place(Layout(dp_shard=8), 2, ("node",) * 8),
            place(Layout(dp_shard=3), 2, ("node",) * 3),
        ])  # fmt: skip
        costs: dict[str, list[Cost]] = {name: [] for name in (*floors, *cases)}
        for _ in range(rounds):
            everything = {**floors, **{name: work for name, (work, _) in cases.items()}}
            for name, work in everything.items():
                if name.startswith(("disk", "sequential")):
                    bench.drop_cache()
                costs[name].append(timed(work))
        rows = [Row(name, _median(costs[name]), "", None) for name in floors]
        rows += [
            Row(name, _median(costs[name]), floor, bench.read[name])
            for name, (_, floor) in cases.items()
        ]
        rows.append(
            Row("killed worker", killed_worker(mover, bench, 2), "copy from mapped memory", None)
        )
        return rows
    finally:
        mover.close()


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(statistics.median(c.wall for c in costs), statistics.median(c.cpu for c in costs))


def show(rows: Sequence[Row], megabytes: int) -> None:
    floors = {row.name: row.cost for row in rows if not row.floor}
    print(f"{megabytes} MiB of state; seconds, and multiples of the floor")
    print(f"{'':34}{'wall':>9}{'CPU':>9}{'x wall':>9}{'x CPU':>9}{'read':>8}  floor")
    for row in rows:
        line = f"{row.name:34}{row.cost.wall:9.3f}{row.cost.cpu:9.3f}"
        if row.floor:
            floor = floors[row.floor]
            line += f"{row.cost.wall / floor.wall:9.2f}"
            line += f"{row.cost.cpu / max(floor.cpu, 1e-9):9.2f}"
            line += f"{row.read:8.3f}" if row.read is not None else f"{'':8}"
            line += f"  {row.floor}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="32 MB, one round: that it runs")
    chosen = parser.parse_args()
    megabytes, rounds = (32, 1) if chosen.quick else (chosen.megabytes, chosen.rounds)
    with tempfile.TemporaryDirectory(prefix="holdfast-restore-") as folder:
        show(measure(Path(folder), megabytes, rounds), megabytes)


if __name__ == "__main__":
    main()
