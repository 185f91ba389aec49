"""The agent's view of its mover: started, asked, listened to, replaced when it dies.

On one node `begin` is all that a generation needs. On several, the coordinator's agent has its
mover `choose`, over the memory of the nodes that are left, and every agent tells its own mover what
came of it (`expect`), with the machines of the generation: each agent's `peer` is how the others'
movers reach its mover. A mover that dies is replaced while training goes on (`revive`): it is told
the running generation, and the workers' capturers find it; others' movers find it where the old one
listened, or, where that port was taken meanwhile, from the next generation on.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.mover.client import MoverClient, MoverGoneError, Newest
from holdfast.checkpoint.mover.main import MoverBoot
from holdfast.checkpoint.mover.service import Settings
from holdfast.checkpoint.peers.client import split_address
from holdfast.checkpoint.peers.config import Peer
from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import state_table
from holdfast.elastic.node.children import Child, start_mover
from holdfast.elastic.node.peer_config import peer_settings
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import (
    CheckpointCommitted,
    Event,
    SnapshotComplete,
    SnapshotDropped,
    SnapshotKept,
)
from holdfast.layout import Topology
from holdfast.wire.http.sockets import bind
from holdfast.wire.secret import Secret

POLL_SECONDS = 5.0
DURABLE_SECONDS = 600.0
HUNG_SECONDS = 60.0
"""A mover that lives and has answered nothing for so long is replaced."""
PAUSE_SECONDS = 1.0
"""Before a mover that lives and did not answer is asked again."""


class MoverLink:
    """One mover at a time. Its socket lies in a private folder, apart from the run folder: the
    path of a unix socket may have about a hundred bytes."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        secret: Secret,
        settings: Settings,
        take: Callable[[Event], None],
        node: str = "",
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """node: what this node is called in topologies, where the run may have several nodes.
        check: raises RunFolderError while the run folder is out of reach: a mover that starts then
        would take what lies at its path for it."""
        self.peer: Peer | None = None
        """How other machines' movers reach this one; None where it does not listen."""
        self._node = node
        self.suffix = f".{node}" if node else ""
        """Of the names of this node's logs, where several nodes share the run folder."""
        self._said: _Said | None = None
        self._safe = Safe()
        self._starting = asyncio.Lock()
        self._config = config
        self._folder = folder
        self._secret = secret
        self._settings = settings
        self._take = take
        self._check = check
        self._private = tempfile.TemporaryDirectory(prefix="holdfast-")  # mode 0700
        self.socket_path = str(Path(self._private.name) / "mover")
        self._child: Child | None = None
        self._mark, self._heard = 0, 0.0
        self._pump: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child is not None and self._child.alive else None

    async def ensure(self, lifeline: int, gone: Callable[[], None]) -> None:
        """Start a mover unless one is alive. Raises ChildFailedError, and as `check` does."""
        async with self._starting:
            if not self.alive:
                await self._start(lifeline, gone)

    async def _start(self, lifeline: int, gone: Callable[[], None]) -> None:
        if self._check is not None:
            await self._check()
        port = 0 if self.peer is None else split_address(self.peer.address)[1]
        peers = peer_settings(self._config.checkpoint, self._node, port)
        if port and peers is not None and not _free(peers.interface, peers.port):
            peers = peer_settings(self._config.checkpoint, self._node)
        boot = MoverBoot(
            store=str(self._folder),
            socket=self.socket_path,
            settings=self._settings,
            secret=self._secret.hex(),
            lifeline=lifeline,
            peers=None if peers is None else peers.to_json(),
        )
        log = self._folder / "logs" / f"mover{self.suffix}.log"
        child = await start_mover(boot.to_line(), lifeline, log, gone)
        if peers is not None:
            client = MoverClient(self.socket_path, self._secret, 0)
            try:
                status = await asyncio.to_thread(client.status)
                self.peer = Peer(peers.machine, str(status["peers"]["address"]))
            except BaseException:  # half a start is none
                await child.stop(0.0)
                raise
        self._mark, self._heard = 0, time.monotonic()
        self._child = child

    async def settle(self, generation: int) -> None:
        """Let end what workers of `generation`, now gone, had handed over, in memory at least."""
        try:
            client = MoverClient(self.socket_path, self._secret, generation)
            await asyncio.to_thread(client.drain, durable=False)
        except MoverGoneError:
            return  # and its saves with it

    async def choose(
        self, generation: int, tried: Mapping[str, str], machines: Sequence[Peer] | None = None
    ) -> Newest:
        """What a generation, which has been opened, begins from; of several nodes, over the memory
        of `machines`: those that are still there of the one before.

        tried: the keys of checkpoints that turned out to be rotten, and why. Raises CheckpointError
        when no checkpoint can be trusted, MoverGoneError, FencedError.
        """
        client = MoverClient(self.socket_path, self._secret, generation)
        return await asyncio.to_thread(client.newest, tried=tried, machines=machines)

    async def expect(
        self,
        topology: Topology,
        start: int,
        newest: Newest | None = None,
        machines: Sequence[Peer] | None = None,
        sources: Sequence[Peer] = (),
        stored: bool = True,
    ) -> None:
        """A generation begins from the state after step `start`. Of several nodes: `machines` are
        those that take part, `sources` others whose memory may hold what is begun from, `newest`
        what was chosen, on whichever node; None where the workers have the state. stored: as in
        `start_records.note_start`.

        Raises MoverGoneError, FencedError.
        """
        self._said = _Said(topology, start, newest, machines, tuple(sources), stored)
        if self._pump is None or self._pump.done():
            self._heard = time.monotonic()  # nobody has listened for a while
        try:
            await self._tell(self._said)
            await self.drain(topology.generation)  # rejected checkpoints, before the workers start
        finally:  # one that does not answer is listened to all the same: so it is replaced
            if self._pump is None or self._pump.done():
                client = MoverClient(self.socket_path, self._secret, topology.generation)
                self._pump = asyncio.create_task(self._listen(client))

    async def revive(self, lifeline: int, gone: Callable[[], None]) -> None:
        """In place of a mover that has died: a new one, which serves the running generation. What
        was lost with the old one is told, and what protects the run now. Raises ChildFailedError,
        MoverGoneError, FencedError."""
        if not self.alive:  # else only the answer of the one that was started last is missing
            for event in self._safe.without_memory():
                self._take(event)
        await self.ensure(lifeline, gone)
        said = self._said
        if said is not None:  # what was begun from has been read
            await self.expect(
                said.topology, said.start, None, said.machines, said.sources, said.stored
            )

    async def _tell(self, said: _Said) -> None:
        client = MoverClient(self.socket_path, self._secret, said.topology.generation)
        table = state_table(self._config.model, self._config.train.precision)
        placement = None if said.newest is None else said.newest.placement
        await asyncio.to_thread(
            client.expect, said.topology, table, said.start, said.machines, said.sources,
            placement, said.newest, said.stored,
        )  # fmt: skip

    async def made_durable(self, newest: Newest) -> str | None:
        """Wait until a restore point that memory alone held is durable; None then, else why not."""
        client = MoverClient(self.socket_path, self._secret, newest.generation)
        return await asyncio.to_thread(client.settle, newest.step, DURABLE_SECONDS)

    async def damage(self, generation: int, key: str) -> str | None:
        """What is wrong with a checkpoint that no worker will read; None when nothing is."""
        client = MoverClient(self.socket_path, self._secret, generation)
        return await asyncio.to_thread(client.damage, key)

    async def upload(self, generation: int, wait: float) -> dict[str, Any] | None:
        """As `MoverClient.upload`."""
        if not self._settings.bucket:
            return None
        client = MoverClient(self.socket_path, self._secret, generation)
        return await asyncio.to_thread(client.upload, wait)

    async def drain(self, generation: int) -> None:
        """Take every event that has happened so far."""
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None
        client = MoverClient(self.socket_path, self._secret, generation)
        try:
            await self._collect(client, 0.0)
        except HoldfastError:
            return  # they are told when it is asked the next time, unless it is gone

    async def stop(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
        if self._child is not None and self._child.alive:
            await self._child.stop(30.0)  # it finishes the writes it is in
        self._private.cleanup()

    async def _listen(self, client: MoverClient) -> None:
        """Until the mover is gone (which is told otherwise) or a newer generation has begun. One
        that lives and answers nothing for long is ended: a new one can take its place."""
        while self.alive:
            try:
                await self._collect(client, POLL_SECONDS)
            except FencedError:
                return
            except HoldfastError:  # it was stopped, or the machine slept and the proof is too old
                if time.monotonic() - self._heard > HUNG_SECONDS and self._child is not None:
                    with suppress(ProcessLookupError):
                        self._child.process.kill()
                    return
                await asyncio.sleep(PAUSE_SECONDS)

    async def _collect(self, client: MoverClient, wait: float) -> None:
        mark = self._mark
        events, following = await asyncio.to_thread(client.events, mark, wait)
        self._heard = time.monotonic()
        if mark != self._mark:
            return  # somebody else took them meanwhile, or the mover is a new one
        self._mark = following
        for event in events:
            if self._safe.observe(event):
                self._take(event)


@dataclass(frozen=True)
class _Said:
    """What the mover was told when the running generation began."""

    topology: Topology
    start: int
    newest: Newest | None
    machines: Sequence[Peer] | None
    sources: tuple[Peer, ...]
    stored: bool


class Safe:
    """Where the newest states lie, by what the mover has told."""

    def __init__(self) -> None:
        self._memory: int | None = None
        self._kept: tuple[int, str] | None = None  # step, peer
        self._durable: int | None = None
        self._told = ""  # the newest commit object

    def observe(self, event: Event) -> bool:
        """Whether it is news: a mover that took another one's place says once more what had been
        committed last, because nobody knows whether that one was heard."""
        if isinstance(event, CheckpointCommitted):
            if event.key == self._told:
                return False
            self._told = event.key
        match event:
            case SnapshotComplete(step=step):
                self._memory = step
            case SnapshotKept(peer=peer, step=step):
                self._kept = max((step, peer), self._kept or (step, peer))
            case CheckpointCommitted(step=step):
                self._durable = max(step, self._durable or step)
        return True

    def without_memory(self) -> list[Event]:
        """The mover is gone, and this node's memory with it: what that means, if it held any."""
        lost, self._memory = self._memory, None
        if lost is None:
            return []
        kept, durable = self._kept, self._durable
        if kept is not None and kept[0] >= (durable or 0):
            rest = f"{kept[1]} keeps a copy of the state after step {kept[0]}"
        elif durable is not None:
            rest = f"the newest checkpoint is of step {durable}"
        else:
            rest = "nothing else holds a state of this run until the next one is saved"
        return [SnapshotDropped(f"the mover ended, and its memory with it; {rest}", step=lost)]


def _free(interface: str, port: int) -> bool:
    """Whether the port can be listened on again."""
    try:
        bind(interface, port, "checkpoint.peer_port").close()
    except HoldfastError:
        return False
    return True
