"""Faults of memory: snapshots in arenas rot or are overwritten.

A mover holds steps only in memory, in addition to the durable ones of a history. After the fault
the next generation acts as a worker's restore does. It asks the mover for the newest state, and
maps the arenas. It reads what they have, and the rest from the run store. It names the corrupt
parts when it asks again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from holdfast.checkpoint.memory.arena import PAGE, Arena, SlotHeader
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import FallbackReader, MappedSource, StoreSource
from holdfast.errors import CorruptError, HoldfastError
from holdfast.layout import Topology
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.wire.store.run_store import FolderStore, MissingKeyError
from holdfast.wire.term import create_generation
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.interrupted import Setting
from tests.support.checkpoint_faults.movers import SECONDS, Mover, Ranks
from tests.support.checkpoint_faults.verdict import Restored, WrongError, check_sentence, compare
from tests.support.ranks import wait_until

DURABLE = 12
IN_MEMORY = (13, 14)
NEWEST = 14


class Scene:
    """A mover that has step 12 on disk, and 13 and 14 in memory alone."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        setting.pour(folder)
        self.folder, self.store = folder, FolderStore(folder)
        self.mover = Mover(folder)
        self.topology = states.topology(setting.second, 2)
        self.ranks = Ranks(self.mover.begin(self.topology), self.topology)
        if reason := self.ranks.save(DURABLE):
            raise WrongError(f"step {DURABLE} is not committed: {reason}")
        for step in IN_MEMORY:
            for rank in range(self.topology.world_size):
                self.capture(rank, step)
            self.wait_complete(step)

    def capture(self, rank: int, step: int, durable: bool = False) -> None:
        slot, made = self.ranks.capture(rank, step)
        meta = {"position": 16 * step}
        self.ranks.client.announce_capture(
            rank, step, slot, made.sequence, meta, SaveDestinations(durable)
        )

    def wait_complete(self, step: int) -> None:
        client = self.ranks.client
        wait_until(lambda: [2, step] in client.status()["memory"], SECONDS, f"step {step}")

    def slot_of(self, rank: int, step: int) -> int:
        arena = self.ranks.arenas[rank]
        for slot in range(arena.slots):
            header = arena.header(slot)
            if header is not None and header.step == step:
                return slot
        raise WrongError(f"step {step} of rank {rank} is in no slot")

    def open(self, generation: int) -> MoverClient:
        """Open a generation, and ask in its name."""
        create_generation(self.store, generation, {})
        return MoverClient(self.mover.socket, self.mover.secret, generation)

    def restore(
        self,
        rng: random.Random,
        generation: int = 3,
        source: Callable[..., MappedSource] = MappedSource,
    ) -> Restored:
        """As agent and workers do from `generation` on: choose, begin, read. The next generation
        names what is corrupt. Raises WrongError."""
        tried: dict[str, str] = {}
        rejected: dict[str, None] = {}
        try:
            while True:
                topo = states.topology(rng.randrange(8), generation)
                client = self.open(generation)
                newest = client.find_restore_point(corrupt_keys=tried)
                rejected |= {key: None for key, reason in newest.rejected if check_sentence(reason)}
                if newest.key is None:
                    return Restored(None, None, tuple(rejected))
                client.expect(topo, states.TABLE, start_step=newest.step)
                problem = self._read(client, newest.key, topo, source)
                if problem is None:
                    return Restored((newest.step, newest.generation), None, tuple(rejected))
                tried[newest.key] = check_sentence(problem)
                generation += 1
        except HoldfastError as error:
            return Restored(None, check_sentence(str(error)), tuple(rejected))

    def _read(
        self, client: MoverClient, key: str, topo: Topology, source: Callable[..., MappedSource]
    ) -> str | None:
        """Compare every rank's boxes; return why the checkpoint is corrupt."""
        holdings = client.holdings(key)
        mapped = source(holdings.slots)
        mixed = FallbackReader([mapped, StoreSource(self.store)])
        try:
            compare(Checkpoint(mixed, holdings.commit), topo)
        except (CorruptError, MissingKeyError) as error:
            return str(error)
        finally:
            with suppress(BufferError):  # a failed read's views go with its traceback
                mapped.close()
        return None


def _newest_slot(scene: Scene, rng: random.Random) -> tuple[int, Arena, int, SlotHeader]:
    """Return (rank, its arena, slot, header) of a part of the newest snapshot that has data."""
    rank = rng.choice([r for r, tensors in enumerate(scene.ranks.tensors) if tensors])
    arena, slot = scene.ranks.arenas[rank], scene.slot_of(rank, NEWEST)
    header = arena.header(slot)
    if header is None:
        raise WrongError("the newest snapshot is not in memory")
    return rank, arena, slot, header


def _end(scene: Scene, found: Restored, allowed: set[int], what: str) -> tuple[str, Restored]:
    if found.position is None or found.position[0] not in allowed:
        raise WrongError(f"{what}: {found} ({found.sentence}), one of {sorted(allowed)} is due")
    return what, replace(found, newest=NEWEST)


def flipped(scene: Scene, rng: random.Random) -> tuple[str, Restored]:
    """One bit of the newest snapshot flips in memory, after it was hashed."""
    rank, arena, slot, header = _newest_slot(scene, rng)
    start = len(states.blob(NEWEST, scene.ranks.tensors[rank])[0]) - sum(
        p.nbytes for p in scene.ranks.tensors[rank]
    )
    at = rng.randrange(start, header.length)
    arena.memory[arena.data_offset(slot) + at] ^= 1 << rng.randrange(8)
    found = scene.restore(rng)
    return _end(scene, found, {DURABLE, 13}, f"a bit of byte {at} of rank {rank}'s slot flipped")


def header_flipped(scene: Scene, rng: random.Random) -> tuple[str, Restored]:
    rank = rng.randrange(scene.topology.world_size)
    arena, slot = scene.ranks.arenas[rank], scene.slot_of(rank, NEWEST)
    at = rng.choice([i for i in range(88) if not 12 <= i < 16])  # four bytes are unused
    arena.memory[arena.data_offset(slot) - PAGE + at] ^= 1 << rng.randrange(8)
    found = scene.restore(rng)
    return _end(scene, found, {DURABLE, 13}, f"a bit of byte {at} of a slot's header flipped")


def rot_before_disk(scene: Scene, rng: random.Random) -> tuple[str, Restored]:
    """The newest is chosen, then rots, then is made durable: rot must not become a checkpoint."""
    client = scene.open(3)
    newest = client.find_restore_point()
    if newest.step != NEWEST:
        raise WrongError(f"step {newest.step} is offered, {NEWEST} is in memory")
    _, arena, slot, header = _newest_slot(scene, rng)
    at = arena.data_offset(slot) + header.length - 1
    arena.memory[at] ^= 1 << rng.randrange(8)
    client.expect(states.topology(rng.randrange(8), 3), states.TABLE, start_step=NEWEST)
    client.drain(SECONDS)
    scene.mover.close()
    scene.mover = Mover(scene.folder)
    found = scene.restore(rng, 4)
    return _end(scene, found, {DURABLE}, "the snapshot rots before it is made durable")


def promoted(scene: Scene, rng: random.Random) -> tuple[str, Restored]:
    """Chosen, made durable behind the training, and then the mover is killed, or not yet."""
    client = scene.open(3)
    newest = client.find_restore_point()
    client.expect(states.topology(rng.randrange(8), 3), states.TABLE, start_step=newest.step)
    done = rng.random() < 0.5 and client.wait_until_committed(DURABLE, 0.0) is None
    if rng.random() < 0.5:
        client.drain(SECONDS)
    scene.mover.close(9)
    scene.mover = Mover(scene.folder)
    found = scene.restore(rng, 4)
    return _end(scene, found, {DURABLE, NEWEST}, f"killed while step 14 is made durable ({done})")


def overwritten(scene: Scene, rng: random.Random) -> tuple[str, Restored]:
    """A zombie of the old generation writes into the slots while they are read."""
    rank, arena, slot, _ = _newest_slot(scene, rng)
    left = rng.randrange(12)
    ends = rng.random() < 0.6

    def disturb() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            arena.release(slot)
            finish = scene.ranks.write(rank, slot, 15)
            if ends:
                finish()

    class Disturbed(MappedSource):
        def data(self, key: str, start_: int, length: int, buffer: memoryview) -> memoryview:
            view = super().data(key, start_, length, buffer)
            disturb()
            return view

        def scatter(self, key: str, start_: int, outs: Sequence[memoryview]) -> None:
            super().scatter(key, start_, outs)
            disturb()

    found = scene.restore(rng, source=Disturbed)
    return _end(
        scene, found, {DURABLE, 13, NEWEST}, f"rank {rank}'s slot is written while it is read"
    )


KINDS: dict[str, Callable[[Scene, random.Random], tuple[str, Restored]]] = {
    "memory-flip": flipped,
    "memory-header": header_flipped,
    "memory-rot": rot_before_disk,
    "memory-promoted": promoted,
    "memory-overwritten": overwritten,
}


def play(kind: str, folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    scene = Scene(folder, setting)
    try:
        return KINDS[kind](scene, rng)
    finally:
        scene.mover.close()
