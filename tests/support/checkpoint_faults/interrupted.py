"""Faults in the middle of the protocol: kills, loss of power, disks that fail, other writers.

Each child is forked from this process, which has no threads and no torch. It runs the protocol of
`scenes.Protocol` with every system call counted, and ends at one of the points.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.verify import verify
from holdfast.checkpoint.save import retention
from holdfast.checkpoint.save.writer import try_commit
from holdfast.errors import FencedError, HoldfastError
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.histories import (
    Files,
    Protocol,
    after,
    contents,
    history,
    plan,
    save,
    write_rank,
)
from tests.support.checkpoint_faults.kill_points import Points
from tests.support.checkpoint_faults.verdict import (
    Restored,
    WrongError,
    check_not_lost,
    judge_folder,
    restore,
)

KILLED = 9


@dataclass(frozen=True)
class Setting:
    """Layouts of a history's two generations and of the one after them; who writes first."""

    first: int
    second: int
    third: int
    order: int

    @property
    def written(self) -> Files:
        return after(self.first, self.second, self.third)

    def protocol(self, folder: Path) -> Protocol:
        return Protocol(FolderStore(folder), (self.second, self.third), self.order)

    def pour(self, folder: Path) -> None:
        history(self.first, self.second).pour(folder)


@lru_cache(maxsize=64)
def points_of(setting: Setting) -> tuple[str, ...]:
    """The first pass: every point of the undisturbed protocol, and that nothing escapes them."""
    with TemporaryDirectory() as root:
        folder = Path(root, "run")
        setting.pour(folder)
        before = set(contents(folder))
        points = Points(folder, None, lambda _: None)
        protocol = setting.protocol(folder)
        with points.watching():
            protocol.run()
        if protocol.said != [12, 14, 16]:
            raise WrongError(f"undisturbed, {protocol.said} were committed")
        named = " ".join(points.names)
        for key in set(contents(folder)) - before:
            if f"link {key}" not in named and f"open {key}" not in named:
                raise WrongError(
                    f"{key} was made by a system call that the campaign does not watch"
                )
        return tuple(points.names)


def in_child(body: Callable[[Callable[[int], None]], None]) -> tuple[int, list[int]]:
    """(exit code, what it said) of a forked child that runs `body(say)`."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(read)
            body(lambda number: _said(write, number))
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = [int(line) for line in pipe]
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said


def _said(fd: int, number: int) -> None:
    os.write(fd, b"%d\n" % number)


def killed(folder: Path, setting: Setting, at: int, power: random.Random | None) -> list[int]:
    """Run the protocol in a child that ends at point `at`; the steps it had reported."""
    setting.pour(folder)

    def body(say: Callable[[int], None]) -> None:
        protocol = setting.protocol(folder)

        def end(_: str) -> None:
            if points.loss is not None:
                points.loss.strike()
            os._exit(KILLED)

        points = Points(folder, at, end, power=power)
        protocol.note = say  # type: ignore[method-assign]
        with points.watching():
            protocol.run()
        if points.loss is not None:
            points.loss.close()

    code, said = in_child(body)
    if code not in (0, KILLED):
        raise WrongError(f"the child ended with {code}")
    return said


def settle(folder: Path, setting: Setting, said: list[int], reader: int) -> Restored:
    """The verdict over what a child left, before and after the next generation has swept."""
    topo = states.topology(reader, 4)
    found, _ = judge_folder(folder, setting.written, topo)
    check_not_lost(found, said, "the child has ended")
    store = FolderStore(folder)
    retention.sweep_older_generations(store, 4)
    again, due = judge_folder(folder, setting.written, topo)
    if again.position != found.position:
        raise WrongError(f"{found} before the sweep, {again} after it")
    whole = set(list_commits(store)) - set(due.broken)
    if any(verify(store, key) for key in whole):
        raise WrongError("verify complains about a whole checkpoint")
    # A generation's object is not the checkpoint room's: a few bytes of its own may lie there.
    if left := [k for k in contents(folder) if ".tmp-" in k and not k.startswith("generations/")]:
        raise WrongError(f"left after the sweep: {left}")
    return found


FAILURES = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EDQUOT": errno.EDQUOT, "EROFS": errno.EROFS}


def failing(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """A system call fails, once or for good (then the disk heals); training never notices."""
    setting.pour(folder)
    names = points_of(setting)
    at, name = rng.randrange(len(names)), rng.choice(list(FAILURES))
    lasting = rng.random() < 0.4

    def fail(_: str) -> None:
        raise OSError(FAILURES[name], os.strerror(FAILURES[name]))

    protocol = setting.protocol(folder)
    points = Points(folder, at, fail, lasting=lasting)
    with points.watching():
        protocol.run()
    what = f"{name} {'from' if lasting else 'at'} point {at} ({names[at]})"
    return what, _healed(folder, setting, protocol, what, rng)


def full_disk(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """A disk that is really full, after so many bytes more; then it has room again. The folder
    must lie on a small file system of its own."""
    setting.pour(folder)
    usage = os.statvfs(folder)
    if usage.f_bavail * usage.f_frsize > 64 * 2**20:
        raise RuntimeError("this fault fills the disk: give a small one with --folder")
    room = rng.choice([0, rng.randrange(8192), rng.randrange(60_000), rng.randrange(60_000)])
    filler = leave_free(folder.parent, room)
    protocol = setting.protocol(folder)
    protocol.run()
    filler.unlink()
    what = f"the disk is full after {room} bytes, {protocol.failed} failed"
    return what, _healed(folder, setting, protocol, what, rng)


def leave_free(folder: Path, room: int) -> Path:
    """Fill the disk until about `room` bytes are left."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        usage = os.statvfs(folder)
        file.write(bytes(max(0, usage.f_bavail * usage.f_frsize - room)))
    return filler


def _healed(
    folder: Path, setting: Setting, protocol: Protocol, what: str, rng: random.Random
) -> Restored:
    """The verdict over what failing saves have left, and whether the disk, well again, serves."""
    topo = states.topology(rng.randrange(8), 5)
    found, _ = judge_folder(folder, setting.written, topo)
    check_not_lost(found, protocol.said, what)
    healed = plan(states.topology(setting.third, 7))
    store = FolderStore(folder)
    create_generation(store, 7, {})
    retention.sweep_older_generations(store, 7)
    if save(store, healed, 20) is None:
        raise WrongError(f"{what}: after it, nothing can be saved any more")
    last = restore(store, topo)
    if last.position != (20, 7):
        raise WrongError(f"{what}: step 20 was saved after it, {last} is restored")
    return found


def zombie(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """In the middle of a save, a newer generation begins, sweeps, and commits a step of its own.
    Then the old writer continues as if nothing had happened."""
    setting.pour(folder)
    names = points_of(setting)
    # Before the protocol itself begins generation 3.
    limit = next(i for i, name in enumerate(names) if "generations/" in name)
    at = rng.randrange(limit)
    newer = plan(states.topology(setting.third, 3))
    commits = rng.random() < 0.7

    def overtake(_: str) -> None:
        other = FolderStore(folder)
        create_generation(other, 3, {})
        retention.sweep_older_generations(other, 3)
        if commits:
            save(other, newer, 16)

    protocol = setting.protocol(folder)
    with Points(folder, at, overtake).watching():
        made = plan(states.topology(setting.second, 2))
        for step in (12, 14):
            protocol.step(made, step)
    what = f"overtaken at point {at} ({names[at]})"
    found, due = judge_folder(folder, setting.written, states.topology(rng.randrange(8), 5))
    if commits and due.must and found.position != (16, 3):
        raise WrongError(f"{what}: {found} instead of step 16 of generation 3")
    store = FolderStore(folder)
    try:
        write_rank(store, made, 18, 0)
    except FencedError:
        return what, found
    raise WrongError(f"{what}: the old generation could still write")


def race(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """Several processes do the same thing at the same moment."""
    setting.pour(folder)
    kind = rng.choice(["commit", "step", "generation"])
    count = rng.randint(2, 5)
    made = plan(states.topology(setting.second, 2))
    world = made.topology.world_size
    if kind == "commit":
        for rank in range(world):
            write_rank(FolderStore(folder), made, 12, rank)
    gate, start = os.pipe()
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            os.close(start)
            os.read(gate, 1)  # all begin when the other end is closed
            os._exit(_racer(kind, FolderStore(folder), setting, number))
        pids.append(pid)
    os.close(gate)
    os.close(start)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    what = f"{count} processes race for a {kind}"
    if set(codes) - {0, 1}:
        raise WrongError(f"{what}: they ended with {codes}")
    if (kind == "generation" and codes.count(0) != 1) or 0 not in codes:
        raise WrongError(f"{what}: {codes.count(0)} think they have won")
    found, _ = judge_folder(folder, setting.written, states.topology(rng.randrange(8), 5))
    if kind != "generation" and found.position != (12, 2):
        raise WrongError(f"{what}: {found} is restored")
    return what, found


def _racer(kind: str, store: FolderStore, setting: Setting, number: int) -> int:
    """Return 0 if this process has won (or agrees with the winner), 1 if it was refused as the
    second."""
    made = plan(states.topology(setting.second, 2))
    try:
        if kind == "generation":
            create_generation(store, 3, {"by": number})
        elif kind == "commit":
            return 0 if try_commit(store, made, 12) is not None else 2
        else:
            world = made.topology.world_size
            done = None
            for rank in range(world):
                try:
                    write_rank(store, made, 12, (rank + number) % world)
                except HoldfastError:
                    continue  # another one has written this part, or is about to
                done = try_commit(store, made, 12) or done
            return 0 if done is not None else 1
    except HoldfastError:
        return 1
    except BaseException:
        return 3
    return 0
