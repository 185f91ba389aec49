"""Cost of a restore, as multiples of its floors: `python -m benchmarks.runtime.restore`.

A real mover process holds the state of a run (by default 1 GB) in memory and has made it durable.
Then the state is read by boxes, onto the layout that wrote it and onto another one (shards of 8
ranks onto 3). It is read from memory, from the disk, and from a store where every request takes 20
ms. Every byte is checked. Floors are measured in the same run, in turn with the cases. The first
floor is one copy of the bytes between warm memory. The second is one copy out of the mover's memory
by a process that maps it first, as a new worker must (with page faults). The third is xxh3 over
them, the fourth a plain read of the files one after another. The fifth is the same bytes from the
slow store as one object. Its requests are as large and as many at a time as those to a bucket, from
as many processes. The sixth adds xxh3 over the received bytes, which takes a good part of the time
on two busy cores. From the slow store each rank reads in a process of its own, as in a run. These
processes are forked before, and begin together. CPU seconds are those of the processes that
restore; `read` is bytes read per byte needed. Before each read from the disk, the kernel drops the
files from its cache. The lines below the table are the bars, and whether they hold. No torch.

"killed worker" is the time from a worker's death to its successor's state, without the start of a
process. It finds the newest step, requests the memory, reads and checks. "killed process" is the
same from SIGKILL of a real process until the next one has the state. The seconds until that one
runs, and until it has its memory, are shown too.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_digest

from benchmarks.runtime.restore_report import CHECKED, Cost, Killed, Row, show, verdicts
from benchmarks.runtime.saving import ranks
from holdfast.checkpoint.format.blob import blob_header, blob_size
from holdfast.checkpoint.memory.arena import Arena, identity_digest, slot_capacity
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import (
    BlobSource,
    FallbackReader,
    MappedSource,
    StoreSource,
)
from holdfast.core.format.manifest import Commit, commit_key, place_boxes
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import StateTable, TensorSpec, local_boxes
from holdfast.layout import Layout, Topology, place_layout
from holdfast.wire.secret import Secret
from holdfast.wire.store.bucket import BucketStore
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation

STEP = 1
REQUEST_SECONDS = 0.02
READERS = (8, 3)
RANGE_BYTES = 8 * 2**20
NOTHING = memoryview(b"")

Plan = list[tuple[Box, memoryview]]


class SlowStore:
    """A store that answers every request after a fixed time, as a distant bucket does."""

    def __init__(self, store: FolderStore) -> None:
        self._store = store

    reads = BucketStore.reads

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self.scatter(key, start, [out])

    def scatter(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        time.sleep(REQUEST_SECONDS)
        self._store.scatter(key, start, outs)


class Mover(ranks.Mover):
    """A mover process, and the ranks that hand their state over to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "run")
        self.store = FolderStore(folder / "run")

    def client(self, generation: int) -> MoverClient:
        return MoverClient(self.socket, self.secret, generation)

    def begin(self, topology: Topology, table: StateTable) -> None:
        create_generation(self.store, topology.generation, {})
        self.client(topology.generation).expect(topology, table)

    def hand_over(self, topology: Topology, table: StateTable) -> None:
        """Every rank's part of the state, in memory and durable when this returns."""
        client = self.client(topology.generation)
        arenas = []
        for rank in range(topology.world_size):
            tensors = place_boxes(owned_boxes(topology, table, rank), table)
            head = blob_header(tensors)
            size = blob_size(head, tensors)
            arena = Arena(client.get_arena(rank, slot_capacity(size), 2))
            arena.begin_write(0)
            data = arena.data(0, size)
            data[: len(head)] = head
            noise = np.random.default_rng(rank).bytes(min(size - len(head), 2**24))
            body = np.frombuffer(data[len(head) :], np.uint8)
            body[:] = np.resize(np.frombuffer(noise, np.uint8), len(body))
            made = arena.finish_write(
                0, identity_digest("bench"), topology.generation, STEP, size, identity_digest(head)
            )
            client.announce_capture(rank, STEP, 0, made.sequence, {})
            arenas.append(arena)
        reason = client.wait_until_committed(STEP, 600.0)
        assert reason is None, reason


def table_of(nbytes: int) -> StateTable:
    """Parameters and two moments, as a small decoder has them: matrices of some megabytes."""
    count = max(2, nbytes // 3 // (6 * 2**20))
    rows = max(8, nbytes // 3 // count // 4096)
    return tuple(
        TensorSpec(f"{prefix}.layers.{i}.weight", "F32", (rows, 1024), 0)
        for prefix in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        for i in range(count)
    )


def wanted(topology: Topology, table: StateTable, rank: int) -> Plan:
    """The state of a rank, and warm memory for it."""
    boxes = [box for box in local_boxes(topology, table, rank) if box.size]
    return [(box, np.ones(box.size * 4, np.uint8).data) for box in boxes]


def shared(nbytes: int) -> memoryview:
    """Warm memory that forked processes write to as it is, without copying pages first."""
    found = memoryview(mmap.mmap(-1, nbytes))
    np.frombuffer(found, np.uint8)[:] = 1
    return found


def apart(works: Sequence[Callable[[], float]]) -> tuple[Cost, float]:
    """Each in a process of its own, begun together: until the last has ended, CPU seconds of all,
    and the sum of what they return."""
    waiting, start = os.pipe()
    results: list[int] = []
    for work in works:
        mine, theirs = os.pipe()
        if not os.fork():
            os.close(start)
            os.read(waiting, 1)  # until the other end is closed
            cpu = time.process_time()
            found = work()
            os.write(theirs, struct.pack("dd", time.process_time() - cpu, found))
            os._exit(0)
        os.close(theirs)
        results.append(mine)
    begun = time.perf_counter()
    os.close(start)
    answers = [struct.unpack("dd", os.read(end, 16)) for end in results]
    wall = time.perf_counter() - begun
    for end in (*results, waiting):
        os.close(end)
    for _ in works:
        os.wait()
    return Cost(wall, sum(cpu for cpu, _ in answers)), sum(found for _, found in answers)


def timed(work: Callable[[], object]) -> Cost:
    """Of this process, unless the work has measured its own."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    if isinstance(found, Cost):
        return found
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


@contextmanager
def mapped(client: MoverClient, key: str) -> Iterator[tuple[Commit, FallbackReader]]:
    holdings = client.holdings(key)
    memory = MappedSource(holdings.slots)
    try:
        yield holdings.commit, FallbackReader([memory])
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
        self.object = shared(self.nbytes)
        self.read: dict[str, float] = {}

    def floors(self) -> dict[str, Callable[[], object]]:
        return {
            "memcpy": lambda: np.copyto(self.target, self.source),
            "copy from mapped memory": self._mapped_copy,
            "xxh3": lambda: xxh3_128_digest(self.source.data),
            "sequential read": self._sequential,
            **{one_object(n): partial(self._one_object, n, False) for n in READERS},
            **{one_object(n) + CHECKED: partial(self._one_object, n, True) for n in READERS},
        }

    def cases(self, readers: Sequence[Topology]) -> dict[str, tuple[Callable[[], object], str]]:
        found: dict[str, tuple[Callable[[], object], str]] = {}
        store = self.mover.store
        for topology in readers:
            ranks = topology.world_size
            plans = [wanted(topology, self.table, rank) for rank in range(ranks)]
            name = f"{len(self.commit.writers)} ranks onto {ranks}"
            found[f"memory, {name}"] = (self._memory(name, plans), "copy from mapped memory")
            disk = self._stored(f"disk, {name}", plans, StoreSource(store))
            found[f"disk, {name}"] = (disk, "sequential read")
            there = [[(box, shared(out.nbytes)) for box, out in plan] for plan in plans]
            slow = partial(self._slow, f"slow store, {name}", there)
            found[f"slow store, {name}"] = (slow, one_object(ranks))
        return found

    def _memory(self, name: str, plans: list[Plan]) -> Callable[[], None]:
        def run() -> None:
            with mapped(self.mover.client(self.generation), self.key) as (commit, mixed):
                self._fill(f"memory, {name}", commit, mixed, plans)

        return run

    def _stored(self, name: str, plans: list[Plan], source: BlobSource) -> Callable[[], None]:
        return lambda: self._fill(name, self.commit, FallbackReader([source]), plans)

    def _slow(self, name: str, plans: list[Plan]) -> Cost:
        def one(plan: Plan) -> float:
            mixed = FallbackReader([StoreSource(SlowStore(self.mover.store), "slow store")])
            Checkpoint(mixed, self.commit).read_all(plan)
            return sum(mixed.stats.bytes_by_source.values())

        cost, read = apart([partial(one, plan) for plan in plans])
        self.read[name] = read / sum(out.nbytes for plan in plans for _, out in plan)
        return cost

    def _fill(self, name: str, commit: Commit, mixed: FallbackReader, plans: list[Plan]) -> None:
        # Each rank is another process; here they go one after the other.
        for plan in plans:
            Checkpoint(mixed, commit).read_all(plan)
        needed = sum(out.nbytes for plan in plans for _, out in plan)
        self.read[name] = sum(mixed.stats.bytes_by_source.values()) / needed

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

    def in_turns(
        self, rounds: int, works: dict[str, Callable[[], object]]
    ) -> dict[str, list[Cost]]:
        costs: dict[str, list[Cost]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                if name.startswith(("disk", "sequential")):
                    self.drop_cache()
                costs[name].append(timed(work))
        return costs

    def drop_cache(self) -> None:
        """Ask the kernel to drop the files from its cache, so that they are read from the disk."""
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

    def _one_object(self, readers: int, checked: bool) -> Cost:
        """Ranges of the blobs as of one object, into memory that is there."""
        slow = SlowStore(self.mover.store)
        count, size = SlowStore.reads
        ranges: list[tuple[str, int, memoryview]] = []
        at = 0
        for blob in (writer.blob for writer in self.commit.writers):
            for start in range(blob.data_start, blob.size, size):
                length = min(size, blob.size - start)
                ranges.append((blob.key, start, self.object[at : at + length]))
                at += length

        def read(key: str, start: int, out: memoryview) -> None:
            slow.read_into(key, start, out)
            if checked:
                xxh3_128_digest(out)

        def one(reader: int) -> float:
            with ThreadPoolExecutor(count) as threads:
                list(threads.map(lambda each: read(*each), ranges[reader::readers]))
            return 0.0

        return apart([partial(one, reader) for reader in range(readers)])[0]


def one_object(readers: int) -> str:
    return f"one object, {readers} readers"


def restored(client: MoverClient, generation: int, table: StateTable, plan: Plan) -> None:
    """From the question what to begin from to the last checked byte."""
    newest = client.find_restore_point()
    assert newest.key is not None
    client.expect(place_layout(Layout(), generation, ("node",)), table, newest.step)
    with mapped(client, newest.key) as (commit, mixed):
        Checkpoint(mixed, commit).read_all(plan)


def killed_worker(mover: Mover, bench: Bench, generation: int) -> Cost:
    plan = wanted(place_layout(Layout(), generation, ("node",)), bench.table, 0)
    create_generation(mover.store, generation, {})
    return timed(lambda: restored(mover.client(generation), generation, bench.table, plan))


def killed_process(mover: Mover, megabytes: int, generation: int) -> Killed:
    """Kill a process that holds all of the state, and replace it by another one."""
    first, _ = _worker(mover, megabytes, generation)
    killed = time.monotonic()
    first.kill()
    first.wait(60)
    second, (started, ready, back) = _worker(mover, megabytes, generation + 1)
    second.kill()
    second.wait(60)
    return Killed(started - killed, ready - started, back - ready)


def _worker(
    mover: Mover, megabytes: int, generation: int
) -> tuple[subprocess.Popen[bytes], list[float]]:
    """A process that has the state, and the moments (of the machine's clock) of its way there."""
    create_generation(mover.store, generation, {})
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.runtime.restore", "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    boot = [mover.socket, mover.secret.hex(), generation, megabytes]
    process.stdin.write(json.dumps(boot).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    process.stdout.close()
    return process, json.loads(line)


def work() -> None:
    """The process of `_worker`; it holds what it has until it is killed, or alone."""
    started = time.monotonic()
    socket, secret, generation, megabytes = json.loads(sys.stdin.readline())
    table = table_of(megabytes * 2**20)
    plan = wanted(place_layout(Layout(), generation, ("node",)), table, 0)
    ready = time.monotonic()
    client = MoverClient(socket, Secret(bytes.fromhex(secret)), generation)
    restored(client, generation, table, plan)
    print(json.dumps([started, ready, time.monotonic()]), flush=True)
    sys.stdin.read()


def measure(folder: Path, megabytes: int, rounds: int) -> tuple[list[Row], Killed]:
    mover = Mover(folder)
    try:
        table = table_of(megabytes * 2**20)
        writers = place_layout(Layout(dp_shard=8), 1, ("node",) * 8)
        mover.begin(writers, table)
        mover.hand_over(writers, table)
        bench = Bench(mover, writers, table)
        floors = bench.floors()
        cases = bench.cases([place_layout(Layout(dp_shard=n), 2, ("node",) * n) for n in READERS])
        everything = {**floors, **{name: work for name, (work, _) in cases.items()}}
        forked = {name for name in everything if name.startswith(("slow store", "one object"))}
        costs = bench.in_turns(rounds, {n: w for n, w in everything.items() if n not in forked})
        killed = killed_worker(mover, bench, 2)
        # After a fork every page is looked at once more: so what forks comes last.
        costs |= bench.in_turns(rounds, {n: w for n, w in everything.items() if n in forked})
        rows = [Row(name, _median(costs[name]), "", None) for name in floors]
        rows += [
            Row(name, _median(costs[name]), floor, bench.read[name])
            for name, (_, floor) in cases.items()
        ]
        rows.append(Row("killed worker", killed, "copy from mapped memory", None))
        return rows, killed_process(mover, megabytes, 3)
    finally:
        mover.close()


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(statistics.median(c.wall for c in costs), statistics.median(c.cpu for c in costs))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="32 MB, one round: that it runs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work()
        return
    megabytes, rounds = (32, 1) if chosen.quick else (chosen.megabytes, chosen.rounds)
    with tempfile.TemporaryDirectory(prefix="holdfast-restore-") as folder:
        rows, killed = measure(Path(folder), megabytes, rounds)
    show(rows, megabytes)
    print(*verdicts(rows, killed), sep="\n")


if __name__ == "__main__":
    main()
