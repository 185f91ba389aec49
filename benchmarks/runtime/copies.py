"""Cost of a copy in another machine's memory: `python benchmarks/runtime/copies.py [--mb 700]
[--tls]`.

The sender is this process with one rank's snapshots, the receiver a real `holdfast stage`. Both are
on this machine over loopback, so no network is measured. Each row is the best of the rounds, in
wall seconds and in CPU seconds of both processes, with its floor from the same run. The floor is
the same bytes from one memory file into another's pages over a loopback socket (sendfile,
recv_into, a process each). A pass of xxh3 over them is added, which every receiver needs.
With --tls every byte is encrypted as well (`cluster.tls`); the floor is not.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.format.blob import ExtentHasher, blob_header, blob_size
from holdfast.checkpoint.format.save_context import choose_extent_bytes
from holdfast.checkpoint.memory.arena import Arena, identity_digest, slot_capacity
from holdfast.checkpoint.memory.snapshot_store import MemoryFile, Snapshot, SnapshotStore
from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.checkpoint.peers.peer_tier import PeerTier
from holdfast.checkpoint.peers.source import PeerSource
from holdfast.core.format.manifest import PartManifest, blob_key, place_boxes, writer_name
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.events import Event, SnapshotKept
from holdfast.layout import Layout, place_layout
from holdfast.policy.placement import Machine
from holdfast.wire.http.tls import with_tls
from holdfast.wire.secret import Secret

READ = 16 * 2**20
COLUMNS = 1024


class Sender:
    """One rank's arena of three slots, and a mover's tier 1 around it."""

    def __init__(self, nbytes: int, address: str, secret: Secret) -> None:
        rows = nbytes // (2 * 4 * COLUMNS)
        self.table = tuple(
            TensorSpec(f"model.{name}", "F32", (rows, COLUMNS), 0) for name in ("moving", "frozen")
        )
        self.topology = place_layout(Layout(), 1, ("here",))
        self.tensors = place_boxes(owned_boxes(self.topology, self.table, 0), self.table)
        self.head = blob_header(self.tensors)
        self.size = blob_size(self.head, self.tensors)
        self.memory = MemoryFile(Arena.create("benchmark", 3, slot_capacity(self.size)))
        self.shelf = SnapshotStore()
        self.kept = threading.Event()
        settings = PeerSettings(Machine("here"), (Peer(Machine("stage"), address),))
        self.peers = PeerTier(settings, self.shelf, secret, "benchmark", self._event)
        self.shelf.open_generation(1, self.topology, self.table)
        self.peers.begin_generation(self.topology, self.table)
        self.random = np.random.default_rng(1)

    def _event(self, event: Event) -> None:
        assert isinstance(event, SnapshotKept), event
        self.kept.set()

    def capture(self, step: int, change: str) -> Snapshot:
        """Put a step on the shelf: `change` is "all" of it, the "half" that moves, or "none"."""
        arena = self.memory.arena
        slot = arena.free_slot()
        assert slot is not None
        arena.begin_write(slot)
        view = arena.data(slot, self.size)
        view[: len(self.head)] = self.head
        for number, p in enumerate(self.tensors):
            fresh = change == "all" or (change == "half" and number == 0)
            seed = step if fresh else 0
            data = np.frombuffer(view, np.uint8)[len(self.head) + p.start :][: p.nbytes]
            data[:] = (
                np.random.default_rng(seed + 7 * number)
                .integers(0, 256, min(p.nbytes, 1 << 20), np.uint8)
                .repeat(-(-p.nbytes // (1 << 20)))[: p.nbytes]
            )
            del data
        hasher = ExtentHasher(choose_extent_bytes(READ, self.size))  # as a run has them
        for _ in hasher.pass_through([view]):
            pass
        view.release()
        made = arena.finish_write(
            slot, identity_digest("benchmark"), 1, step, self.size, identity_digest(self.head)
        )
        blob = hasher.finish(blob_key(1, step, writer_name(0)), len(self.head))
        part = PartManifest(1, step, 0, blob, self.tensors, {})
        snapshot = Snapshot(part, part.to_bytes(), self.memory, slot, made)
        self.shelf.put(snapshot)
        return snapshot

    def send(self, snapshot: Snapshot) -> None:
        self.kept.clear()
        self.peers.on_snapshot_stored(snapshot)
        assert self.kept.wait(300), "the staging machine did not take it"


class Stopwatch:
    """Wall seconds, and CPU seconds of this process and another."""

    def __init__(self, other: int) -> None:
        self._other = psutil.Process(other)

    def __call__(self, work: Callable[[], object]) -> tuple[float, float]:
        cpu, wall = self._cpu(), time.perf_counter()
        work()
        return time.perf_counter() - wall, self._cpu() - cpu

    def _cpu(self) -> float:
        times = self._other.cpu_times()
        return time.process_time() + float(times.user + times.system)


def floor(nbytes: int, source: int, offset: int) -> tuple[float, float]:
    """The bytes over loopback into memory that is there already, and hashed: wall, CPU of both."""
    ours, theirs = _loopback()
    child = os.fork()
    if child == 0:
        ours.close()
        target = memoryview(bytearray(b"\1") * nbytes)  # every page is touched
        theirs.sendall(b"r")
        at = 0
        while at < nbytes:
            at += theirs.recv_into(target[at:])
        xxh3_128_hexdigest(target)
        theirs.sendall(b"d")
        os._exit(0)
    theirs.close()
    ours.recv(1)
    before = psutil.Process(child).cpu_times()
    cpu, wall = time.process_time(), time.perf_counter()
    at = 0
    while at < nbytes:
        at += os.sendfile(ours.fileno(), source, offset + at, nbytes - at)
    ours.recv(1)
    wall = time.perf_counter() - wall
    cpu = time.process_time() - cpu
    used = os.wait4(child, 0)[2]
    ours.close()
    return wall, cpu + used.ru_utime + used.ru_stime - before.user - before.system


def _loopback() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    return one, other


def measure(
    nbytes: int, rounds: int, folder: Path, uses_tls: bool = False
) -> list[tuple[str, float, float, float]]:
    """(what, wall, CPU, bytes that travelled) of each row, the best of the rounds."""
    secret = Secret(secrets.token_bytes(32))
    (folder / "secret").touch(0o600)
    (folder / "secret").write_text(secret.hex())
    if uses_tls:
        secret = with_tls(secret)
    room = str(2.5 * nbytes / 1e9)
    stage = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "holdfast.cli.main",
            "stage",
            "--listen",
            "127.0.0.1:0",
            "--secret",
            str(folder / "secret"),
            "--memory",
            room,
            "--json",
            "--tls" if uses_tls else "--no-tls",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stage.stdout is not None
    try:
        address = json.loads(stage.stdout.readline())["address"]
        sender = Sender(nbytes, address, secret)
        watch = Stopwatch(stage.pid)
        rows = _rows(sender, watch, rounds, address, secret)
        sender.peers.close()
        return rows
    finally:
        stage.terminate()
        stage.wait(20)


def _rows(
    sender: Sender, watch: Stopwatch, rounds: int, address: str, secret: Secret
) -> list[tuple[str, float, float, float]]:
    rows: list[tuple[str, float, float, float]] = []
    snapshot = sender.capture(1, "all")
    at = sender.memory.arena.data_offset(snapshot.slot)
    best = [floor(sender.size, sender.memory.fd, at) for _ in range(rounds)]
    rows.append(("floor: sendfile, recv_into, xxh3", *_least(best), sender.size))
    sender.send(snapshot)  # the receiver's pages are there from now on
    sender.send(sender.capture(2, "all"))
    step = 2
    for change in ("all", "half", "none"):
        best = []
        sent = 0
        for _ in range(rounds):
            step += 1
            made = sender.capture(step, change)
            sent = sender.peers.server.sent_bytes
            best.append(watch(partial(sender.send, made)))
            sent = sender.peers.server.sent_bytes - sent
        what = {
            "all": "copy, everything changed",
            "half": "copy, half of it frozen",
            "none": "copy, nothing changed",
        }[change]
        rows.append((what, *_least(best), sent))
    source = PeerSource("stage", address, secret, 1, "benchmark")
    key = source.inventory()[0]
    name = blob_key(key.generation, key.step, writer_name(key.rank))
    out = memoryview(bytearray(sender.size))

    def read() -> None:
        for start in range(0, sender.size, READ):
            part = out[start : start + READ]
            source.read_into(name, start, part)
            xxh3_128_hexdigest(part)

    best = [watch(read) for _ in range(rounds)]
    rows.append(("read back for a restore, one thread", *_least(best), sender.size))
    return rows


def _least(found: list[tuple[float, float]]) -> tuple[float, float]:
    return min(wall for wall, _ in found), min(cpu for _, cpu in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=700.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", action="store_true", help="encrypt, as cluster.tls does")
    parser.add_argument("--quick", action="store_true", help="8 MB, one round")
    arguments = parser.parse_args()
    nbytes = int((8 if arguments.quick else arguments.mb) * 1e6)
    with tempfile.TemporaryDirectory(prefix="hf-") as folder:
        rows = measure(
            nbytes, 1 if arguments.quick else arguments.rounds, Path(folder), arguments.tls
        )
    base = rows[0]
    way = "over TLS" if arguments.tls else "not encrypted"
    print(f"{nbytes / 1e6:g} MB of state, {os.cpu_count()} cores, loopback, {way}")
    print(f"{'':38s}{'wall s':>9s}{'x floor':>9s}{'CPU s':>9s}{'x floor':>9s}{'MB sent':>9s}")
    for what, wall, cpu, sent in rows:
        print(
            f"{what:38s}{wall:9.3f}{wall / base[1]:9.2f}{cpu:9.3f}{cpu / base[2]:9.2f}"
            f"{sent / 1e6:9.0f}"
        )


if __name__ == "__main__":
    main()
