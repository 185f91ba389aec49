"""Faults of bytes at rest: rot, loss, exchange and replay of files in the store."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from holdfast.core.format.manifest import Commit, commit_key
from tests.support.checkpoint_faults.histories import EXTENT_BYTES, NEWEST, STEPS, History
from tests.support.checkpoint_faults.oracle import part_of

Damage = Callable[["Victim", random.Random], str]
"""Breaks something, and says in words what."""


class Victim:
    """A folder with a history, and how to find things in it."""

    def __init__(self, folder: Path, history: History) -> None:
        self.folder, self.history = folder, history
        self.positions = sorted(((s, g) for g, steps in STEPS.items() for s in steps), reverse=True)

    def commit(self, position: tuple[int, int]) -> Commit:
        key = commit_key(position[1], position[0])
        return Commit.from_bytes(self.history.files[key], key)

    def position(self, rng: random.Random) -> tuple[int, int]:
        """The newest mostly: that is where it hurts."""
        return NEWEST if rng.random() < 0.7 else rng.choice(self.positions)

    def blobs(self, position: tuple[int, int]) -> list[tuple[str, int, int]]:
        """(key, data start, size) of every blob of a checkpoint."""
        return [(w.blob.key, w.blob.data_start, w.blob.size) for w in self.commit(position).writers]

    def full_blobs(self, position: tuple[int, int]) -> list[tuple[str, int, int]]:
        """Those that hold data: unlike replicas have writers that own nothing."""
        return [blob for blob in self.blobs(position) if blob[2] > blob[1]]

    def path(self, key: str) -> Path:
        return self.folder / key

    def read(self, key: str) -> bytearray:
        """Empty where an earlier fault has taken the file."""
        path = self.path(key)
        return bytearray(path.read_bytes()) if path.is_file() else bytearray()

    def put(self, key: str, data: bytes | bytearray) -> None:
        if not self.path(key).is_dir():  # an earlier fault has put a folder there
            self.path(key).write_bytes(data)

    def remove(self, key: str) -> None:
        if not self.path(key).is_dir():
            self.path(key).unlink(missing_ok=True)


def flip(victim: Victim, key: str, low: int, high: int, rng: random.Random) -> str:
    """One random bit in bytes [low, high) of a file."""
    data = victim.read(key)
    high = min(high, len(data))
    if low >= high:
        return f"{key} is gone already"
    at, bit = rng.randrange(low, high), rng.randrange(8)
    data[at] ^= 1 << bit
    victim.put(key, data)
    return f"bit {bit} of byte {at} of {key} flipped"


def flip_data(victim: Victim, rng: random.Random) -> str:
    key, start, size = rng.choice(victim.full_blobs(victim.position(rng)))
    return flip(victim, key, start, size, rng)


def flip_header(victim: Victim, rng: random.Random) -> str:
    key, start, _ = rng.choice(victim.blobs(victim.position(rng)))
    return flip(victim, key, 0, start, rng)


def flip_part(victim: Victim, rng: random.Random) -> str:
    key, _, _ = rng.choice(victim.blobs(victim.position(rng)))
    return flip(victim, part_of(key), 0, 2**30, rng)


def flip_commit(victim: Victim, rng: random.Random) -> str:
    step, generation = victim.position(rng)
    return flip(victim, commit_key(generation, step), 0, 2**30, rng)


def any_file(victim: Victim, rng: random.Random) -> str:
    """A blob, a part manifest or the commit object of a checkpoint."""
    position = victim.position(rng)
    blob, _, _ = rng.choice(victim.blobs(position))
    return rng.choice([blob, blob, part_of(blob), commit_key(position[1], position[0])])


def truncate(victim: Victim, rng: random.Random) -> str:
    key = any_file(victim, rng)
    data = victim.read(key)
    length = rng.choice([0, len(data) - 1, rng.randrange(max(1, len(data)))])
    victim.put(key, data[: max(0, length)])
    return f"{key} cut from {len(data)} to {max(0, length)} bytes"


def extend(victim: Victim, rng: random.Random) -> str:
    key = any_file(victim, rng)
    more = rng.randbytes(rng.randint(1, 64))
    victim.put(key, victim.read(key) + more)
    return f"{len(more)} bytes more at the end of {key}"


def delete(victim: Victim, rng: random.Random) -> str:
    key = any_file(victim, rng)
    victim.remove(key)
    return f"{key} deleted"


def zeros(victim: Victim, rng: random.Random) -> str:
    """The trace of a lost write: a hole in place of an extent's bytes."""
    key, start, size = rng.choice(victim.full_blobs(victim.position(rng)))
    at = rng.randrange(start, size)
    data = victim.read(key)
    end = min(len(data), at + EXTENT_BYTES)
    data[at:end] = bytes(max(0, end - at))
    victim.put(key, data)
    return f"zeros in bytes [{at}, {end}) of {key}"


def swap(victim: Victim, one: str, other: str) -> str:
    first, second = victim.read(one), victim.read(other)
    victim.put(one, second)
    victim.put(other, first)
    return f"{one} and {other} exchanged"


def swap_blobs(victim: Victim, rng: random.Random) -> str:
    """Of two writers of one step, or of one writer's two steps."""
    keys = [key for key, _, _ in victim.blobs(NEWEST)]
    others = [key for key, _, _ in victim.blobs(rng.choice(victim.positions))]
    return swap(victim, rng.choice(keys), rng.choice(others))


def swap_parts(victim: Victim, rng: random.Random) -> str:
    keys = [part_of(key) for key, _, _ in victim.blobs(NEWEST)]
    others = [part_of(key) for key, _, _ in victim.blobs(rng.choice(victim.positions))]
    return swap(victim, rng.choice(keys), rng.choice(others))


def swap_commits(victim: Victim, rng: random.Random) -> str:
    (one, a), (other, b) = rng.sample(victim.positions, 2)
    return swap(victim, commit_key(a, one), commit_key(b, other))


def swap_extents(victim: Victim, rng: random.Random) -> str:
    """Two extents of one blob, or of two, change places."""
    position = victim.position(rng)
    places = [
        (key, at)
        for key, start, size in victim.blobs(position)
        for at in range(start, size - EXTENT_BYTES + 1, EXTENT_BYTES)
    ]
    (one, a), (other, b) = rng.choices(places, k=2)
    first, second = victim.read(one), victim.read(other)
    if one == other:
        second = first
    was = bytes(first[a : a + EXTENT_BYTES])
    first[a : a + EXTENT_BYTES] = second[b : b + EXTENT_BYTES]
    second[b : b + EXTENT_BYTES] = was
    victim.put(one, first)
    victim.put(other, second)
    return f"extents at {a} of {one} and at {b} of {other} exchanged"


def replay(victim: Victim, rng: random.Random) -> str:
    """An older object under a newer name: of the same writer, or over all writers."""
    older = rng.choice([p for p in victim.positions if p < NEWEST])
    kind = rng.choice(["blob", "part", "all blobs", "all"])
    done = []
    for (new, _, _), (old, _, _) in zip(victim.blobs(NEWEST), victim.blobs(older), strict=False):
        if kind != "part":
            victim.put(new, victim.read(old))
        if kind in ("part", "all"):
            victim.put(part_of(new), victim.read(part_of(old)))
        done.append(new)
        if not kind.startswith("all"):
            break
    return f"{kind} of step {older[0]} under the name of step {NEWEST[0]} ({len(done)})"


def replay_commit(victim: Victim, rng: random.Random) -> str:
    """An older commit object under a newer name: an existing one's, or one of its own."""
    step, generation = rng.choice([p for p in victim.positions if p < NEWEST])
    key = commit_key(*rng.choice([(NEWEST[1], NEWEST[0]), (2, 9), (3, step), (9, 99)]))
    victim.put(key, victim.read(commit_key(generation, step)))
    return f"the commit object of step {step} as {key}"


def strange(victim: Victim, rng: random.Random) -> str:
    """What people and tools leave in folders."""
    step, generation = NEWEST
    key = commit_key(generation, step)
    name = rng.choice(
        [
            f"{key}~",
            f"{key}.bak",
            "commits/readme",
            f"commits/x{key[9:]}",
            "commits/fffffffffffffff0-2.json",
            "generations/notes.txt",
            "generations/0000000001.json.bak",
        ]
    )
    victim.put(name, victim.read(key))
    return f"a copy of the newest commit object as {name}"


def folder_instead(victim: Victim, rng: random.Random) -> str:
    key = any_file(victim, rng)
    victim.path(key).unlink(missing_ok=True)
    victim.path(key).mkdir(exist_ok=True)
    return f"a folder in place of {key}"


def none_left(victim: Victim, rng: random.Random) -> str:
    """On purpose: every checkpoint is broken, each in a way of its own."""
    done = []
    for position in victim.positions:
        key, start, size = rng.choice(victim.full_blobs(position))
        commit = commit_key(position[1], position[0])
        how = rng.choice(["data", "commit", "cut", "gone"])
        if how == "data":
            done.append(flip(victim, key, start, size, rng))
        elif how == "commit":
            done.append(flip(victim, commit, 0, 2**30, rng))
        elif how == "cut":
            data = victim.read(key)
            victim.put(key, data[: rng.randrange(start, size)])
            done.append(f"{key} cut")
        else:
            victim.remove(key)
            done.append(f"{key} deleted")
    return "; ".join(done)


DAMAGE: dict[str, tuple[Damage, int]] = {
    "flip-data": (flip_data, 30),
    "flip-header": (flip_header, 10),
    "flip-part": (flip_part, 12),
    "flip-commit": (flip_commit, 20),
    "truncate": (truncate, 16),
    "extend": (extend, 10),
    "delete": (delete, 16),
    "zeros": (zeros, 10),
    "swap-blobs": (swap_blobs, 10),
    "swap-parts": (swap_parts, 8),
    "swap-commits": (swap_commits, 6),
    "swap-extents": (swap_extents, 14),
    "replay": (replay, 16),
    "replay-commit": (replay_commit, 14),
    "strange-files": (strange, 6),
    "folder-instead": (folder_instead, 6),
    "none-left": (none_left, 36),
}
"""Each with its share: of 500 cases, about so many are this."""
