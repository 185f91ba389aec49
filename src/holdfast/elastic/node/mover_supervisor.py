"""The agent's side of its mover: starts it, sends requests, collects events, replaces it if it
dies.

If the run has several nodes, the coordinator's mover chooses the restore point, over the memory of
the remaining nodes. Every agent then passes the choice and the generation's machines to its own
mover. `peer` is the address at which other machines' movers reach this one.

A mover that dies is replaced while training continues. The new mover learns of the running
generation, and the workers' capturers find it. Other movers find it at the old port. If that port
was taken meanwhile, they find it from the next generation on.
"""

from __future__ import annotations

import asyncio
import logging
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

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
DURABLE_SECONDS = 600.0
HUNG_SECONDS = 60.0
"""Seconds without a reply after which a mover that is alive is replaced."""
PAUSE_SECONDS = 1.0
"""Seconds before the next request to a mover that is alive and did not answer."""


class MoverLink:
    """Runs one mover at a time. Its socket lies in a private folder, not in the run folder: the
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
        """Prepare the supervisor; `ensure_running` starts the mover.

        Args:
            node: this node's name in topologies, if the run may have several nodes.
            check_run_folder: raises RunFolderError while the run folder is out of reach. A mover
                that started then would mistake anything at that path for the run folder.
        """
        self.peer: Peer | None = None
        """Address at which other machines' movers reach this one; None if it does not listen."""
        self._node = node
        self.suffix = f".{node}" if node else ""
        """Suffix of this node's log names, if several nodes share the run folder."""
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
        """Start a mover unless one is alive. Raises ChildFailedError, and what `check_run_folder`
        raises."""
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
        logger.info("mover started")

    async def settle(self, generation: int) -> None:
        """Wait until the saves that workers of the ended `generation` handed over are complete, at
        least in memory."""
        try:
            client = MoverClient(self.socket_path, self._secret, generation)
            await asyncio.to_thread(client.drain, durable=False)
        except MoverGoneError:
            return  # and its saves with it

    async def choose(
        self, generation: int, tried: Mapping[str, str], machines: Sequence[Peer] | None = None
    ) -> Newest:
        """Choose the restore point of a generation that has been opened.

        Args:
            rejected_checkpoints: keys of checkpoints that turned out to be corrupt, and why.
            machines: of a run on several nodes, the nodes of the previous generation that still
                run. Their memory is searched.

        Raises CheckpointError if no checkpoint can be trusted, MoverGoneError, FencedError.
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
        """Announce a generation that begins from the state after step `start_step`.

        Args:
            restore_point: the choice, whichever node made it; None if the workers have the state.
            machines: of a run on several nodes, those that take part.
            sources: further machines whose memory may hold the restore point.
            is_stored: the state is a checkpoint in the run store.

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
        """Start a new mover in place of a dead one, for the running generation.

        Emit an event for what was lost with the old one, and what protects the run now. Raises
        ChildFailedError, MoverGoneError, FencedError.
        """
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
        """Wait until a restore point that memory alone held is durable; return None, or why it is
        not."""
        client = MoverClient(self.socket_path, self._secret, newest.generation)
        return await asyncio.to_thread(client.settle, newest.step, DURABLE_SECONDS)

    async def damage(self, generation: int, key: str) -> str | None:
        """Return what is wrong with a checkpoint that no worker will read; None if it is intact."""
        client = MoverClient(self.socket_path, self._secret, generation)
        return await asyncio.to_thread(client.damage, key)

    async def upload(self, generation: int, wait: float) -> dict[str, Any] | None:
        """Wait for an upload as `MoverClient.upload_progress` does; None without a bucket."""
        if not self._settings.bucket:
            return None
        client = MoverClient(self.socket_path, self._secret, generation)
        return await asyncio.to_thread(client.upload, wait)

    async def drain(self, generation: int) -> None:
        """Process every event so far."""
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
        """Collect events until the mover exits or a newer generation begins.

        The exit callback reports an exit. A mover that is alive and silent for long is killed, so
        that a new one can take its place.
        """
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
    """The announcement of the running generation, as sent to the mover."""

    topology: Topology
    start: int
    newest: Newest | None
    machines: Sequence[Peer] | None
    sources: tuple[Peer, ...]
    stored: bool


class Safe:
    """The places of the newest states, by the mover's events."""

    def __init__(self) -> None:
        self._memory: int | None = None
        self._kept: tuple[int, str] | None = None  # step, peer
        self._durable: int | None = None
        self._told = ""  # the newest commit object

    def observe(self, event: Event) -> bool:
        """Record an event; return False if it repeats the last commit.

        A new mover reports the last commit again, because the old mover's report may have been
        lost.
        """
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
        """Forget this node's memory after the mover exited; return an event if it held a state."""
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
    """Return True if the port can be listened on again."""
    try:
        bind(interface, port, "checkpoint.peer_port").close()
    except HoldfastError:
        return False
    return True
