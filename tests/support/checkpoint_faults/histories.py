"""Run stores with a history: several committed checkpoints by several writers.

A history is written once, by the code that writes checkpoints in a run, and kept as keys and bytes.
Every case then gets a copy of its own to break. Contents:

    generation 1   steps 2 and 4, on one layout
    generation 2   steps 6 and 8, on another; and a part of step 10, never committed
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.writer import try_commit, write_part
from holdfast.core.format.manifest import Commit, PartManifest
from holdfast.layout import Topology
from holdfast.wire.store.run_store import FolderStore, RunStore
from holdfast.wire.term import create_generation, newest_generation
from tests.support.checkpoint_faults import states
from tests.support.memory_store import MemoryStore

EXTENT_BYTES = 512
NEWEST = (8, 2)
"""(step, generation) of the newest checkpoint of every history."""
STEPS = {1: (2, 4), 2: (6, 8)}

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class History:
    """The written objects, as keys and bytes."""

    files: dict[str, bytes]
    layouts: tuple[int, int]

    def pour(self, folder: Path) -> FolderStore:
        """A copy that a case may break."""
        made: set[Path] = set()
        for key, data in self.files.items():
            path = folder / key
            if path.parent not in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                made.add(path.parent)
            path.write_bytes(data)
        return FolderStore(folder)


def plan(topo: Topology) -> SaveContext:
    return SaveContext(topo.generation, topo, states.TABLE, "config", "data", EXTENT_BYTES)


def write_rank(store: RunStore, made: SaveContext, step: int, rank: int) -> PartManifest:
    """One writer's blob and part, as the mover writes them."""
    tensors = states.owned(made.topology, rank)
    data, start = states.blob(step, tensors)
    halves = [memoryview(data)[: len(data) // 2], memoryview(data)[len(data) // 2 :]]
    return write_part(store, made, step, rank, halves, start, tensors, {"position": 16 * step})


def save(
    store: RunStore, made: SaveContext, step: int, order: list[int] | None = None
) -> Commit | None:
    """Save a complete step, writer by writer; each checks whether it was the last, as movers do."""
    done = None
    for rank in order or range(made.topology.world_size):
        write_rank(store, made, step, rank)
        done = try_commit(store, made, step)
    return done


@lru_cache(maxsize=64)
def history(first: int, second: int) -> History:
    """The history on these two layouts."""
    store = MemoryStore()
    for generation, number in ((1, first), (2, second)):
        create_generation(store, generation, {})
        made = plan(states.topology(number, generation))
        for step in STEPS[generation]:
            commit = save(store, made, step)
            assert commit is not None, "a whole step commits"
    if made.topology.world_size > 1:
        write_rank(store, made, 10, 0)
    return History({key: store.get(key) for key in store.list("")}, (first, second))


@dataclass
class Protocol:
    """The changes of a run to its store after a history. It saves two steps, removes what need not
    be kept, and ends. The next generation sweeps, and saves one more on another layout.

    `said` gets every step that was reported as committed. A save that fails is cleaned up as the
    mover cleans up, and training continues.
    """

    store: RunStore
    layouts: tuple[int, int]
    order: int = 0  # which rank comes first
    keep: int = 2
    said: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def run(self) -> None:
        made = plan(states.topology(self.layouts[0], 2))
        for step in (12, 14):
            self.step(made, step)
        self.begin(made := plan(states.topology(self.layouts[1], 3)))
        self.step(made, 16)

    def begin(self, made: SaveContext) -> None:
        """Open a generation, as agent and mover do; asked again where the disk failed."""
        for _ in range(3):
            with suppress(Exception):
                if newest_generation(self.store) < made.generation:
                    create_generation(self.store, made.generation, {})
                retention.sweep_older_generations(self.store, made.generation)
                return

    def step(self, made: SaveContext, step: int) -> None:
        world = made.topology.world_size
        order = [(self.order + rank) % world for rank in range(world)]
        try:
            commit = save(self.store, made, step, order)
        except Exception:  # as the mover: a failed save is cleaned up and stops nothing
            self.failed.append(step)
            with suppress(Exception):
                retention.discard_uncommitted(self.store, made.generation, step)
            return
        if commit is not None:
            self.note(step)
            with suppress(Exception):
                retention.apply_retention(self.store, retention.RetentionRules(self.keep), (), ())

    def note(self, step: int) -> None:
        self.said.append(step)


@lru_cache(maxsize=64)
def after(first: int, second: int, third: int) -> Files:
    """Every object that a history and the undisturbed protocol after it ever write."""
    store = _Kept()
    for key, data in history(first, second).files.items():
        store.create(key, data)
    Protocol(store, (second, third), keep=100).run()
    return {key: store.get(key) for key in store.list("")}


class _Kept(MemoryStore):
    """Nothing is removed: what a run removes is still what was written."""

    def delete(self, key: str) -> None:
        return


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, temporary ones included."""
    found = {}
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base, name)
            with suppress(OSError):
                found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found
