"""Faults of another machine's memory: its copies, its process, its network, and the nodes that send
to it.

A node sends its snapshots of steps 12, 14 and 16 to a staging machine. Both are forked from this
torch-free process and speak real HTTP. A fault happens. In any case the node is lost, and its
memory with it. Then a restart opens the next generation, searches the run store and the peer's
memory, and reads. Every copy that was reported to the node as kept must come back, unless the fault
hit the copy itself.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint.peers.client import PeerClient, PeerError
from holdfast.checkpoint.peers.config import Peer
from holdfast.checkpoint.peers.server import PeerServer
from holdfast.checkpoint.peers.source import PeerMemories
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.restore_point import RestorePointFinder
from holdfast.checkpoint.restore.sources import FallbackReader, StoreSource
from holdfast.checkpoint.restore.start_records import record_start
from holdfast.core.format.manifest import Commit
from holdfast.errors import CorruptError
from holdfast.layout import Topology
from holdfast.policy.placement import Machine
from holdfast.wire.http.auth import Proof
from holdfast.wire.http.connection import FileSender, HttpResponse
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore, MissingKeyError
from holdfast.wire.term import create_generation
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.interrupted import Setting
from tests.support.checkpoint_faults.peer_processes import RUN, Child, Hook, Keeper, Owner
from tests.support.checkpoint_faults.verdict import (
    Rejections,
    Restored,
    WrongError,
    check_sentence,
    compare,
)
from tests.support.ranks import DEADLINE_S, wait_until

DURABLE = 8
"""The newest step of every history."""
STEPS = (12, 14, 16)
LATER = 18
GENERATION = 3
TRIES = 4
"""Restarts: the newest step, those that are named as corrupt, and the rest."""


class Scene:
    """A run store with a history, a node in generation 3, and the machine that it sends to."""

    def __init__(
        self,
        folder: Path,
        setting: Setting,
        owner: Hook = lambda: None,
        keeper: Hook = lambda: None,
    ) -> None:
        setting.pour(folder)
        self.folder, self.store, self.layout = folder, FolderStore(folder), setting.second
        create_generation(self.store, GENERATION, {})
        record_start(self.store, GENERATION, DURABLE)
        self.secret = Secret(secrets.token_bytes(32))
        self.keeper = Child(lambda: Keeper(self.secret), keeper)
        self.address: str = self.keeper.do("address")
        self.owner = Child(lambda: Owner(self.secret, self.address), owner)
        self.owner.do("begin", setting.second, GENERATION)
        self.kept = DURABLE
        self.world = states.topology(setting.second, GENERATION).world_size

    def send(self, steps: tuple[int, ...] = STEPS) -> None:
        """Send snapshots, one after the other, each until it is kept or has failed. Stop if one of
        the two processes has ended."""
        for step in steps:
            try:
                before = self._ends()
                self.owner.do("put", step)
                wait_until(lambda b=before: self._ends() > b, DEADLINE_S, f"the end of step {step}")
            except EOFError:
                return

    def _ends(self) -> int:
        status = self.owner.do("status")
        self.kept = max(self.kept, status["kept"][1])
        return sum(status["counts"].values())

    def close(self) -> None:
        self.owner.close()
        self.keeper.close()

    # --- after the loss of the node ---------------------------------------------------------
    def restore(self, rng: random.Random, generation: int = GENERATION + 1) -> Restored:
        """As agent and workers do. Raises WrongError."""
        self.owner.close()
        rejected = Rejections()
        tried: dict[str, str] = {}
        peers = [Peer(Machine("stage"), self.address)]
        for number in range(generation, generation + TRIES):
            topo = states.topology(rng.randrange(8), number)
            create_generation(self.store, number, {})
            memories = PeerMemories(peers, self.secret, lambda n=number: n, run_id=RUN)
            chooser = RestorePointFinder(self.store, [memories], number, "config", "data", rejected)
            choice = chooser.find_newest(tried)
            keys = tuple(dict.fromkeys([*tried, *(key for key, _ in rejected.seen)]))
            if choice is None:
                return Restored(None, None, keys)
            record_start(self.store, number, choice.commit.step)
            problem = self._read(memories, choice.commit, topo)
            if problem is None:
                at = choice.commit.step, choice.commit.generation
                return Restored(at, None, keys, STEPS[-1])
            tried[choice.key] = check_sentence(problem)
        raise WrongError(f"no end of restarts: {tried}")

    def _read(self, memories: PeerMemories, commit: Commit, topo: Topology) -> str | None:
        """As `elastic/worker/restore.py`: a peer that fails is asked once more."""
        for again in (False, True):
            try:
                compare(
                    Checkpoint(FallbackReader([memories, StoreSource(self.store)]), commit), topo
                )
                return None
            except (CorruptError, MissingKeyError) as error:
                return str(error)
            except PeerError as error:
                if again:
                    return f"it cannot be read: {error}"
        return None


def _end(scene: Scene, found: Restored, allowed: set[int], what: str) -> tuple[str, Restored]:
    if found.position is None or found.position[0] not in allowed:
        raise WrongError(
            f"{what}: {found} ({found.sentence}), one of {sorted(allowed)} is due; "
            f"{scene.kept} was said to be kept"
        )
    return what, found


# --- faults of processes ------------------------------------------------------------------------
def _die(at: int, where: str) -> Hook:
    """SIGKILL at the `at`-th piece that this process sends (owner) or asks for (keeper), before it,
    in its middle or after it."""
    left = at

    def end(now: str) -> None:
        if left == 0 and now == where:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook() -> None:
        send, read = FileSender.send, PeerClient.read_into

        def dying_send(self: FileSender, fd: int, offset: int, count: int) -> None:
            nonlocal left
            left -= 1
            end("before")
            if left == 0 and where == "middle":
                send(self, fd, offset, count // 2)
            end("middle")
            send(self, fd, offset, count)
            end("after")

        def dying_read(
            self: PeerClient, key: str, start: int, out: memoryview, use: str = ""
        ) -> None:
            nonlocal left
            left -= 1
            end("before")
            read(self, key, start, out, use)
            if left == 0 and where == "middle":
                out[len(out) // 2 :] = bytes(len(out) - len(out) // 2)
            end("middle")
            end("after")

        FileSender.send = dying_send  # type: ignore[method-assign]
        PeerClient.read_into = dying_read  # type: ignore[method-assign]

    return hook


def _moment(rng: random.Random) -> tuple[int, str]:
    return rng.randrange(1, 25), rng.choice(["before", "middle", "after"])


def keeper_killed(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """The staging machine ends in the middle of a copy, and its copies are lost. A new one in its
    place takes the next step."""
    at, where = _moment(rng)
    scene = Scene(folder, setting, keeper=_die(at, where))
    try:
        scene.send()
        what = f"the stage gets SIGKILL {where} its read {at}"
        again = rng.random() < 0.5
        if again:
            scene.keeper.close()
            port = int(scene.address.rpartition(":")[2])
            scene.keeper = Child(lambda: Keeper(scene.secret, port), lambda: None)
            scene.keeper.do("address")
            scene.send((LATER,))
            if scene.kept != LATER:
                raise WrongError(f"{what}: nothing is sent to the one that takes its place")
        lived = _alive(scene.keeper)
        found = scene.restore(rng)
        due = {scene.kept} if lived else {DURABLE}
        if lived and not _alive(scene.keeper):  # it has ended in the restore
            due.add(DURABLE)
        return _end(scene, found, due, what + (", another takes its place" if again else ""))
    finally:
        scene.close()


def owner_killed(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """The node ends in the middle of a copy: a step that is incomplete there does not count."""
    at, where = _moment(rng)
    scene = Scene(folder, setting, owner=_die(at, where))
    try:
        scene.send()
        found = scene.restore(rng)
        # What was taken in the moment of the end may not have been heard of.
        due = {step for step in (DURABLE, *STEPS) if step >= scene.kept}
        return _end(scene, found, due, f"the node gets SIGKILL {where} its piece {at}")
    finally:
        scene.close()


def _alive(child: Child) -> bool:
    try:
        child.do("address")
    except EOFError:
        return False
    return True


# --- faults of what is kept ---------------------------------------------------------------------
def flipped(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """One bit of the newest copy, sometimes of the one before it too."""
    scene = Scene(folder, setting)
    try:
        scene.send()
        steps = STEPS[-1:] if rng.random() < 0.7 else STEPS[-2:]
        ranks = [r for r in range(scene.world) if states.owned(_topology(scene), r)]
        rank, at = rng.choice(ranks), rng.randrange(1 << 30)
        # Only its data: the bytes before are never read.
        size = len(states.blob(STEPS[0], states.owned(_topology(scene), rank))[0])
        start = states.blob(STEPS[0], states.owned(_topology(scene), rank))[1]
        at = start + at % (size - start)
        for step in steps:
            scene.keeper.do("flip", GENERATION, step, rank, at, rng.randrange(8))
        found = scene.restore(rng)
        due = STEPS[-2] if len(steps) == 1 else DURABLE
        return _end(scene, found, {due}, f"a bit of byte {at} of rank {rank}, steps {steps}")
    finally:
        scene.close()


def replayed(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """An older step's bytes, or its part, under the newest one's name."""
    scene = Scene(folder, setting)
    try:
        scene.send()
        ranks = [r for r in range(scene.world) if states.owned(_topology(scene), r)]
        rank, verb = rng.choice(ranks), rng.choice(["replay", "relabel"])
        scene.keeper.do(verb, GENERATION, STEPS[-1], rank, STEPS[-2])
        found = scene.restore(rng)
        return _end(scene, found, {STEPS[-2]}, f"{verb} of rank {rank}")
    finally:
        scene.close()


def zombie(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """The node was only cut off: after the restart it continues to send steps of its generation."""
    scene = Scene(folder, setting)
    try:
        scene.send(STEPS[:2])
        memories = PeerMemories(
            [Peer(Machine("stage"), scene.address)],
            scene.secret,
            lambda: GENERATION + 1,
            run_id=RUN,
        )
        memories.inventory()  # of the next generation, which thereby fences this one
        scene.send(STEPS[2:])
        held = {step for _, step, _ in scene.keeper.do("steps")}
        if STEPS[2] in held or scene.kept == STEPS[2]:
            raise WrongError(f"a step of a generation that is over was taken: {held}")
        found = scene.restore(rng)
        return _end(scene, found, {STEPS[1]}, "a node of an older generation goes on to send")
    finally:
        scene.close()


def _topology(scene: Scene) -> Topology:
    return states.topology(scene.layout, GENERATION)


# --- faults of the network ----------------------------------------------------------------------
def _unsteady(seed: int, share: float, kinds: tuple[str, ...]) -> Hook:
    """Some of the pieces that this process sends are dropped, cut, wrong, or late."""

    def hook() -> None:
        send, rng = FileSender.send, random.Random(seed)

        def unsteady(self: FileSender, fd: int, offset: int, count: int) -> None:
            kind = rng.choice(kinds) if rng.random() < share else ""  # an error comes before
            match kind:
                case "dropped":
                    raise ConnectionError("dropped")
                case "cut":
                    send(self, fd, offset, count // 2)
                    raise ConnectionError("cut")
                case "wrong":
                    data = bytearray(os.pread(fd, count, offset))
                    data[rng.randrange(count)] ^= 1 << rng.randrange(8)
                    wrong = os.memfd_create("wrong")
                    os.write(wrong, data)
                    send(self, wrong, 0, count)
                    os.close(wrong)
                case "late":
                    time.sleep(0.02)
                    send(self, fd, offset, count)
                case _:
                    send(self, fd, offset, count)

        answer = PeerServer._range

        def failing(
            self: PeerServer, proof: Proof, target: str, query: dict[str, str]
        ) -> HttpResponse:
            if "error" in kinds and rng.random() < share:
                raise MissingKeyError("this end says that it has nothing")
            return answer(self, proof, target, query)

        FileSender.send = unsteady  # type: ignore[method-assign]
        PeerServer._range = failing  # type: ignore[method-assign]

    return hook


FAULTS = ("dropped", "cut", "wrong", "late", "error")
"""What may become of bytes on their way; an error is an answer of the other end."""


def copying(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """The network is bad while copies are made: fewer steps are kept, but all of them are
    intact."""
    share = rng.choice([0.02, 0.1, 0.5, 1.0])
    kinds = tuple(rng.sample(FAULTS, rng.randrange(1, 4)))
    scene = Scene(folder, setting, owner=_unsteady(rng.randrange(1 << 30), share, kinds))
    try:
        scene.send()
        found = scene.restore(rng)
        due = {step for step in (DURABLE, *STEPS) if step >= scene.kept}
        return _end(scene, found, due, f"{share:.0%} {'/'.join(kinds)} of what is sent")
    finally:
        scene.close()


def restoring(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    """It is bad while it is read back: now and then costs nothing, all the time costs the peer."""
    share = rng.choice([0.02, 0.1, 1.0])
    kinds = tuple(rng.sample(FAULTS, rng.randrange(1, 3)))
    scene = Scene(folder, setting, keeper=_unsteady(rng.randrange(1 << 30), share, kinds))
    try:
        scene.send()
        found = scene.restore(rng)
        due = {DURABLE, *STEPS[-2:]}
        if kinds == ("late",):
            due = {STEPS[-1]}
        if share == 1.0 and "late" not in kinds:
            due = {DURABLE}
        return _end(scene, found, due, f"{share:.0%} {'/'.join(kinds)} of what is read back")
    finally:
        scene.close()


KINDS: dict[str, Callable[[Path, Setting, random.Random], tuple[str, Restored]]] = {
    "peer-killed": keeper_killed,
    "peer-owner-killed": owner_killed,
    "peer-flip": flipped,
    "peer-replay": replayed,
    "peer-zombie": zombie,
    "peer-copying": copying,
    "peer-restoring": restoring,
}
