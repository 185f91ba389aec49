"""Faults of a mover, with a real one: its own process, its socket, its arenas.

The mover is forked from this torch-free process, so it is there in milliseconds and its system
calls can be counted like any other child's. Workers are played by `Ranks`, which fills arenas with
known bytes exactly as a Capturer does.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.checkpoint.format.blob import blob_header, blob_size
from holdfast.checkpoint.memory.arena import Arena, SlotHeader, identity_digest, slot_capacity
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.mover.main import MoverServer
from holdfast.checkpoint.mover.service import MoverService, MoverSettings
from holdfast.checkpoint.save import retention
from holdfast.core.format.manifest import commit_key
from holdfast.errors import HoldfastError
from holdfast.layout import Topology
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation, newest_generation
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.histories import EXTENT_BYTES
from tests.support.checkpoint_faults.interrupted import FAILURES, KILLED, Setting
from tests.support.checkpoint_faults.kill_points import Points
from tests.support.checkpoint_faults.verdict import (
    Restored,
    WrongError,
    check_not_lost,
    judge_folder,
)

RUN = "campaign"
SECONDS = 20.0
SETTINGS = MoverSettings(RUN, "config", "data", keep_last=2, extent_bytes=EXTENT_BYTES)


class Mover:
    """A mover in a forked child; `points` counts its system calls, if given."""

    def __init__(self, folder: Path, points: Points | None = None, tell: int | None = None) -> None:
        """tell: a pipe's end for the number of points, once it has ended in good order."""
        self.folder = folder
        self.secret = Secret(secrets.token_bytes(32))
        self.private = tempfile.mkdtemp(prefix="hf-")
        self.socket = f"{self.private}/mover"
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(read)
                self._serve(write, points, tell)
            finally:
                os._exit(70)
        os.close(write)
        with os.fdopen(read, "rb") as ready:
            if ready.read(1) != b"r":
                raise WrongError("the mover did not start")

    def _serve(self, ready: int, points: Points | None, tell: int | None) -> None:
        """The child's life."""
        leave, signalled = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(signalled)
        signal.signal(signal.SIGTERM, lambda *_: None)
        service = MoverService(FolderStore(self.folder), SETTINGS)
        server = MoverServer(service, self.secret, self.socket)
        os.write(ready, b"r")
        os.close(ready)
        if points is None:
            server.serve(leave)
        else:
            with points.watching():
                server.serve(leave)
                service.close()
            if tell is not None:
                os.write(tell, str(points.count).encode())
        service.close()
        os._exit(0)

    def begin(self, topo: Topology) -> MoverClient:
        store = FolderStore(self.folder)
        if newest_generation(store) < topo.generation:
            create_generation(store, topo.generation, {})
        client = MoverClient(self.socket, self.secret, topo.generation)
        client.expect(topo, states.TABLE)
        return client

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self, ends: int = signal.SIGTERM) -> int:
        """End it and take its exit code."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, ends)
        _, status = os.waitpid(self.pid, 0)
        shutil.rmtree(self.private, ignore_errors=True)
        return os.waitstatus_to_exitcode(status)


class Direct:
    """A service's requests without a socket."""

    def __init__(self, service: MoverService, generation: int) -> None:
        self.service, self.generation = service, generation

    def get_arena(self, rank: int, blob_bytes: int, slots: int) -> int:
        return self.service.get_arena(self.generation, rank, blob_bytes, slots)

    def wait_for_free_slot(self, rank: int, timeout: float) -> bool:
        return self.service.wait_for_free_slot(self.generation, rank, timeout)

    def announce_capture(
        self, rank: int, step: int, slot: int, sequence: int, meta: Mapping[str, Any]
    ) -> None:
        self.service.accept_capture(self.generation, rank, step, slot, sequence, meta)

    def wait_until_committed(self, step: int, wait: float) -> str | None:
        ended, reason = self.service.save_tracker.wait_until_ended((self.generation, step), wait)
        assert ended
        return reason


class Ranks:
    """All ranks of a generation: their arenas, filled with the known state of a step."""

    def __init__(self, client: MoverClient | Direct, topo: Topology, slots: int = 2) -> None:
        self.client, self.topology = client, topo
        self.arenas: list[Arena] = []
        self.tensors = [states.owned(topo, rank) for rank in range(topo.world_size)]
        for rank, tensors in enumerate(self.tensors):
            capacity = slot_capacity(blob_size(blob_header(tensors), tensors))
            fd = client.get_arena(rank, capacity, slots)
            self.arenas.append(Arena(fd))
            os.close(fd)

    def capture(self, rank: int, step: int) -> tuple[int, SlotHeader]:
        """Copy a rank's bytes into a free slot, as a Capturer does."""
        arena = self.arenas[rank]
        slot = arena.free_slot()
        if slot is None:
            self.client.wait_for_free_slot(rank, SECONDS)
            slot = arena.free_slot()
        if slot is None:
            raise WrongError(f"no slot of rank {rank} became free")
        return slot, self.write(rank, slot, step)()

    def write(self, rank: int, slot: int, step: int) -> Callable[[], SlotHeader]:
        """Write a rank's bytes of a step over a slot; return how its header is written."""
        arena = self.arenas[rank]
        data, start = states.blob(step, self.tensors[rank])
        arena.begin_write(slot)
        arena.data(slot, len(data))[:] = data
        layout, generation = identity_digest(data[:start]), self.topology.generation
        return lambda: arena.finish_write(
            slot, identity_digest(RUN), generation, step, len(data), layout
        )

    def announce(self, rank: int, step: int, slot: int, made: SlotHeader) -> None:
        self.client.announce_capture(rank, step, slot, made.sequence, {"position": 16 * step})

    def save(self, step: int) -> str | None:
        """Capture, announce and wait; why it is not committed."""
        made = [self.capture(rank, step) for rank in range(self.topology.world_size)]
        for rank, (slot, head) in enumerate(made):
            self.announce(rank, step, slot, head)
        return self.client.wait_until_committed(step, SECONDS)


def protocol(mover: Mover, setting: Setting, said: list[int]) -> None:
    """As `scenes.Protocol`, through the mover; `said` gets the steps that it called committed."""
    for number, generation, steps in ((setting.second, 2, (12, 14)), (setting.third, 3, (16,))):
        topo = states.topology(number, generation)
        ranks = Ranks(mover.begin(topo), topo)
        for step in steps:
            if ranks.save(step) is None:
                said.append(step)


def verdict(folder: Path, setting: Setting, said: list[int], rng: random.Random) -> Restored:
    """What is restored after the mover's end, by a new mover of the next generation."""
    topo = states.topology(rng.randrange(8), 5)
    found, _ = judge_folder(folder, setting.written, topo)
    check_not_lost(found, said, "the mover has ended")
    return found


def counted(folder: Path, setting: Setting) -> int:
    """How many points a mover passes in the protocol (about: its threads take turns)."""
    setting.pour(folder)
    told, tell = os.pipe()
    mover = Mover(folder, Points(folder, None, lambda _: None), tell)
    os.close(tell)
    protocol(mover, setting, [])
    mover.close()
    with os.fdopen(told) as pipe:
        return int(pipe.read())


def die_at(folder: Path, setting: Setting, at: int, rng: random.Random) -> tuple[str, Restored]:
    """The mover ends at one of its own system calls."""
    setting.pour(folder)
    mover = Mover(folder, Points(folder, at, lambda _: os._exit(KILLED)))
    said: list[int] = []
    try:
        with suppress(HoldfastError):  # MoverGoneError: that is the point
            protocol(mover, setting, said)
    finally:
        code = mover.close()
    what = f"the mover ends at its point {at}"
    if code not in (0, KILLED):
        raise WrongError(f"{what}: it ended with {code}")
    return what, verdict(folder, setting, said, rng)


def sigkill(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """SIGKILL from outside, at some moment of a save."""
    setting.pour(folder)
    mover = Mover(folder)
    wait = rng.uniform(0, 0.02)
    killer = threading.Timer(wait, mover.kill)
    said: list[int] = []
    try:
        killer.start()
        with suppress(HoldfastError):
            protocol(mover, setting, said)
    finally:
        killer.join()
        mover.close()
    return f"SIGKILL after {1000 * wait:.1f} ms", verdict(folder, setting, said, rng)


def failing(folder: Path, setting: Setting, at: int, rng: random.Random) -> tuple[str, Restored]:
    """One system call of the mover fails: that save fails, and the next one does not."""
    setting.pour(folder)
    name = rng.choice(list(FAILURES))

    def fail(_: str) -> None:
        raise OSError(FAILURES[name], os.strerror(FAILURES[name]))

    what = f"{name} at the mover's point {at}"
    mover = Mover(folder, Points(folder, at, fail))
    said: list[int] = []
    try:
        with suppress(HoldfastError):  # `expect` itself may fail: the sweep met the bad disk
            protocol(mover, setting, said)
        last = states.topology(setting.third, 8)
        ranks = Ranks(mover.begin(last), last)
        if reason := ranks.save(20):
            raise WrongError(f"{what}: after it, nothing can be saved any more: {reason}")
        newest = ranks.client.find_restore_point()
        if newest.step != 20:
            raise WrongError(f"{what}: step 20 is committed, the mover offers {newest.step}")
    finally:
        mover.close()
    # Step 20 is not among what the oracle knows: it is taken away again.
    store = FolderStore(folder)
    store.delete(commit_key(8, 20))
    retention.discard_uncommitted(store, 8, 20)
    return what, judge_folder(folder, setting.written, states.topology(rng.randrange(8), 5))[0]


def rewritten(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """P1, by force: while the mover reads a slot (it is stopped at its first write), another step
    is written there, with its header. The save must fail."""
    setting.pour(folder)

    def stop(_: str) -> None:
        # To this very thread: one sent to the process would let it run on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    topo = states.topology(setting.second, 2)
    mover = Mover(folder, _Armed(folder, rng.randrange(3), stop))
    try:
        client = mover.begin(topo)
        ranks = Ranks(client, topo)
        slot, made = ranks.capture(0, 12)
        # The mover may stop before it has answered.
        announcing = threading.Thread(target=ranks.announce, args=(0, 12, slot, made))
        announcing.start()
        _wait_stopped(mover.pid)
        ranks.arenas[0].release(slot)
        finish = ranks.write(0, slot, 14)
        if rng.random() < 0.7:
            finish()
        os.kill(mover.pid, signal.SIGCONT)
        announcing.join()
        reason = client.wait_until_committed(12, SECONDS)
        if reason is None or "changed while" not in reason:
            raise WrongError(f"a slot changed while it was read, and the save says: {reason}")
        return f"slot rewritten while it is read: {reason}", verdict(folder, setting, [], rng)
    finally:
        with suppress(ProcessLookupError):
            os.kill(mover.pid, signal.SIGCONT)
        mover.close()


class _Armed(Points):
    """Counts only from the first file of a blob on."""

    def reach(self, what: str) -> None:
        if "data/0000000002" in what and (" write " in f" {what}" or self.count):
            super().reach(what)


def _wait_stopped(pid: int) -> None:
    _, status = os.waitpid(pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise WrongError(f"the mover ended: {status}")


def two_movers(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """Two nodes, each with its mover, share one store: both may find that all parts are there;
    one of them may be killed."""
    setting.pour(folder)
    topo = states.topology(setting.second, 2)
    movers = [Mover(folder), Mover(folder)]
    try:
        both = [Ranks(mover.begin(topo), topo) for mover in movers]
        said: list[int] = []
        for step in (12, 14):
            made = []
            for rank in range(topo.world_size):
                ranks = both[rank % 2]
                made.append((ranks, rank, *ranks.capture(rank, step)))
            for ranks, rank, slot, head in made:
                ranks.announce(rank, step, slot, head)
            if step == 14 and rng.random() < 0.5:
                rng.choice(movers).kill()
            for ranks in both:
                with suppress(HoldfastError):  # that one was killed
                    if not ranks.client.drain(SECONDS):
                        raise WrongError("a save does not end")
            reasons = [_reason(ranks, step) for ranks in both]
            if None in reasons:
                said.append(step)
    finally:
        for mover in movers:
            mover.close()  # they finish what they are in
    return f"two movers, {said} committed", verdict(folder, setting, said, rng)


def _reason(ranks: Ranks, step: int) -> str | None:
    try:
        return ranks.client.wait_until_committed(step, 0.0)
    except HoldfastError as error:
        return str(error)
