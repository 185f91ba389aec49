"""Actions on a node, its processes, its disk or its line, from outside.

Each action takes the scene and a node, and returns its target. It also returns the function that
undoes it, if it is to be undone, and after how many seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from holdfast.chaos.agents import Fleet
from holdfast.chaos.network import Network
from holdfast.checkpoint.restore.catalog import listing, step_of
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_term

_STRIDE = 10007  # bytes from one turned bit to the next: so that some lie in every snapshot
_SMALL = 4096  # bytes: no blob fits
_LONG = 120.0  # seconds
_REST_SECONDS = 1.0
_RESTS = 5  # looks in a row at which nothing runs


class NotNowError(Exception):
    """What the deed is done to is not there at this moment."""


@dataclass
class Scene:
    """folder: the run folder, which is a link to `real`. away: seconds that something stays bad."""

    fleet: Fleet
    folder: Path
    real: Path
    notices: Path
    network: Network | None
    beat: float
    away: float

    @property
    def leader(self) -> str:
        _, holder = newest_term(FolderStore(self.folder))
        return "" if holder is None else str(holder.get("node", ""))


@dataclass(frozen=True)
class Deed:
    """An action that was done. target: its object. heal: undoes it, after `seconds`. gone: nodes
    that are to come back."""

    target: str
    heal: Callable[[], None] | None = None
    seconds: float = 0.0
    gone: tuple[str, ...] = ()
    tick: Callable[[float], None] | None = None  # told the seconds since, until it is healed


def _agent(at: Scene, node: str) -> Deed:
    at.fleet.kill(node)
    return Deed(f"the agent of {node}", gone=(node,))


def _coordinator(at: Scene, node: str) -> Deed:
    leader = at.leader
    if leader not in at.fleet.alive:
        raise NotNowError("nobody leads")
    return _agent(at, leader)


def _everything(at: Scene, node: str) -> Deed:
    gone = tuple(at.fleet.alive)
    for each in gone:
        at.fleet.kill(each)
    return Deed("all agents", gone=gone)


def _all_workers(at: Scene) -> list[int]:
    return [pid for each in at.fleet.alive for pid in at.fleet.workers(each)]


def _workers(at: Scene, node: str) -> Deed:
    pids = _all_workers(at)
    if not pids:
        raise NotNowError("there is no worker")
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    return Deed("all workers")


def _child(at: Scene, node: str, what: str) -> int:
    pid = at.fleet.child(node, what)
    if pid is None:
        raise NotNowError(f"{node} has no {what}")
    return pid


def _kill_child(what: str) -> Callable[[Scene, str], Deed]:
    def kill(at: Scene, node: str) -> Deed:
        os.kill(_child(at, node, what), signal.SIGKILL)
        return Deed(f"the {what} of {node}")

    return kill


def _mover_stop(at: Scene, node: str) -> Deed:
    pid = _child(at, node, "mover")
    os.kill(pid, signal.SIGSTOP)
    return Deed(f"the mover of {node}", lambda: _signal(pid, signal.SIGCONT), at.away)


def _slow_disk(at: Scene, node: str) -> Deed:
    """The mover alone writes blobs: it is let run for a tenth of the time."""
    pid = _child(at, node, "mover")

    def tick(seconds: float) -> None:
        _signal(pid, signal.SIGCONT if int(seconds * 20) % 10 == 0 else signal.SIGSTOP)

    return Deed(f"the disk of {node}", lambda: _signal(pid, signal.SIGCONT), at.away, tick=tick)


def _full_disk(at: Scene, node: str) -> Deed:
    pid = _child(at, node, "mover")
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (_SMALL, before[1]))

    def heal() -> None:
        with suppress(psutil.Error, OSError):
            process.rlimit(psutil.RLIMIT_FSIZE, before)

    return Deed(f"the disk of {node}", heal, at.away)


def _run_store(at: Scene, node: str) -> Deed:
    """The run folder is a link, which leads to itself for a while. So every open below it fails,
    and files that are open already stay open."""
    _point(at.folder, at.folder.name)
    return Deed("the run folder", lambda: _point(at.folder, at.real.name), at.away)


def _run_store_long(at: Scene, node: str) -> Deed:
    return replace(_run_store(at, node), seconds=_LONG)


def _point(link: Path, to: str) -> None:
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(to)
    new.replace(link)


def _leave(at: Scene, node: str) -> Deed:
    at.fleet.told(node)
    os.kill(at.fleet.pid(node), signal.SIGTERM)
    return Deed(f"node {node}", gone=(node,))


def _notice(at: Scene, node: str) -> Deed:
    at.fleet.told(node)
    (at.notices / node).write_text("60")
    return Deed(f"node {node}", gone=(node,))


def _notice_kill(at: Scene, node: str) -> Deed:
    """The machine goes when it was said to, whether it has left by then or not."""
    _notice(at, node)
    (at.notices / node).write_text("2")
    pid = at.fleet.pid(node)
    return Deed(f"node {node}", lambda: _signal(pid, signal.SIGKILL), 2.0, (node,))


def _zombie(at: Scene, node: str) -> Deed:
    at.fleet.signal(node, signal.SIGSTOP)
    seconds = 10 * at.beat + at.away  # also where it leads: another leader is chosen first
    return Deed(f"all processes of {node}", lambda: at.fleet.signal(node, signal.SIGCONT), seconds)


def _rotten_memory(at: Scene, node: str) -> Deed:
    """Change bytes that have been hashed. A change between a worker's copy and the hash would look
    like the copied state. So the workers are stopped first, and the mover finishes its hashing."""
    mover = _child(at, node, "mover")
    workers, changed = _all_workers(at), 0
    if not workers:
        raise NotNowError("there is no worker")
    for pid in workers:
        _signal(pid, signal.SIGSTOP)
    with suppress(OSError):  # the mover has ended meanwhile
        _come_to_rest(mover)
        changed = rot_memory(mover)
    if not changed:
        for pid in workers:
            _signal(pid, signal.SIGCONT)
        raise NotNowError(f"{node} keeps nothing in memory")
    _workers(at, node)
    return Deed(f"{changed} bytes of {node}, and all workers")


def _come_to_rest(pid: int) -> None:
    """Until all threads of a process sleep, each time one looks."""
    end, looks = time.monotonic() + _REST_SECONDS, 0
    while looks < _RESTS and time.monotonic() < end:
        time.sleep(_REST_SECONDS / 100)
        states = {
            stat.read_bytes().rpartition(b") ")[2][:1]
            for stat in Path(f"/proc/{pid}/task").glob("*/stat")
        }
        looks = looks + 1 if states == {b"S"} else 0


def rot_memory(pid: int, stride: int = _STRIDE) -> int:
    """Turn a bit here and there in each memory file of a process; how many. A file that is mapped
    has a second descriptor: turned once more, its bits would be as they were."""
    seen, changed = set[tuple[int, int]](), 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if not os.readlink(link).startswith("/memfd:"):
                continue
            file = os.stat(link)
            if (file.st_dev, file.st_ino) in seen:
                continue
            seen.add((file.st_dev, file.st_ino))
            for at_byte in range(stride, file.st_size, stride):
                changed += _flip(link, at_byte)
    return changed


Damage = Callable[[Path, Path], object]
"""Damages a checkpoint's file, given the file and the same writer's file of an older step."""


def _flip_bit(file: Path, older: Path) -> None:
    _flip(file, file.stat().st_size - 100)


def _cut(file: Path, older: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _remove(file: Path, older: Path) -> None:
    file.unlink()


def _replay(file: Path, older: Path) -> None:
    file.write_bytes(older.read_bytes())


def damage_newest(folder: Path, damage: Damage) -> str:
    """Damage all files of a run folder's newest checkpoint and return the checkpoint's key."""
    found = listing(FolderStore(folder))
    steps = sorted({step_of(key) for key in found}, reverse=True)
    if len(steps) < 2:
        raise NotNowError("there is no older checkpoint")
    newest, older = (
        {file.name[10:]: file for file in (folder / "data").rglob(f"{step:010d}-*")}
        for step in steps[:2]
    )
    for name, file in newest.items():
        damage(file, older.get(name, file))
    return found[0]


def _damaged_checkpoint(damage: Damage) -> Callable[[Scene, str], Deed]:
    def act(at: Scene, node: str) -> Deed:
        key = damage_newest(at.folder, damage)
        return Deed(f"{key}, and all agents", gone=_everything(at, node).gone)

    return act


def _rotten_disk(at: Scene, node: str) -> Deed:
    key = damage_newest(at.folder, _flip_bit)
    _workers(at, node)
    return Deed(f"{key}, and all workers")


def _flip(path: Path, position: int) -> int:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        if not byte:
            return 0
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))
    return 1


def _line(at: Scene) -> Network:
    if at.network is None:
        raise NotNowError("the nodes have no network of their own")
    return at.network


def _partition(at: Scene, node: str) -> Deed:
    network = _line(at)
    network.cut(node)
    return Deed(f"the line of {node}", lambda: network.heal(node), 3 * at.beat + at.away)


def _delay(at: Scene, node: str) -> Deed:
    network = _line(at)
    network.delay(node, 20.0)
    return Deed(f"the line of {node}", lambda: network.heal(node), at.away)


def _loss(at: Scene, node: str) -> Deed:
    network = _line(at)
    network.loss(node, 2.0)
    return Deed(f"the line of {node}", lambda: network.heal(node), at.away)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


DEEDS: Mapping[str, Callable[[Scene, str], Deed]] = {
    "agent": _agent, "coordinator": _coordinator, "everything": _everything,
    "workers": _workers,
    "mover": _kill_child("mover"), "template": _kill_child("template"),
    "mover-stop": _mover_stop, "slow-disk": _slow_disk, "full-disk": _full_disk,
    "run-store": _run_store, "run-store-long": _run_store_long,
    "leave": _leave, "notice": _notice, "notice-kill": _notice_kill, "zombie": _zombie,
    "rotten-memory": _rotten_memory, "rotten-disk": _rotten_disk,
    "rotten-checkpoint": _damaged_checkpoint(_flip_bit),
    "cut-checkpoint": _damaged_checkpoint(_cut), "lost-checkpoint": _damaged_checkpoint(_remove),
    "replayed-checkpoint": _damaged_checkpoint(_replay),
    "partition": _partition, "delay": _delay, "loss": _loss,
}  # fmt: skip
