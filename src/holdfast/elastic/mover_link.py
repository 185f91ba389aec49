"""The agent's view of its mover: started, asked, listened to, replaced when it dies."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.mover import MoverBoot
from holdfast.checkpoint.mover_client import MoverClient, MoverGoneError, Newest
from holdfast.checkpoint.service import Settings
from holdfast.config.run import RunConfig
from holdfast.elastic.children import Child, start_mover
from holdfast.elastic.peering import peer_settings
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import Event
from holdfast.layout import Topology
from holdfast.spec.state import state_table
from holdfast.wire.secret import Secret

POLL_SECONDS = 5.0
DURABLE_SECONDS = 600.0
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
    ) -> None:
        self._config = config
        self._folder = folder
        self._secret = secret
        self._settings = settings
        self._take = take
        self._private = tempfile.TemporaryDirectory(prefix="holdfast-")  # mode 0700
        self.socket_path = str(Path(self._private.name) / "mover")
        self._child: Child | None = None
        self._mark = 0
        self._pump: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child is not None and self._child.alive else None

    async def ensure(self, lifeline: int, gone: Callable[[], None]) -> None:
        """Start a mover unless one is alive. Raises ChildFailedError."""
        if self.alive:
            return
        peers = peer_settings(self._config.checkpoint)
        boot = MoverBoot(
            store=str(self._folder),
            socket=self.socket_path,
            settings=self._settings,
            secret=self._secret.hex(),
            lifeline=lifeline,
            peers=None if peers is None else peers.to_json(),
        )
        self._mark = 0
        log = self._folder / "logs" / "mover.log"
        self._child = await start_mover(boot.to_line(), lifeline, log, gone)

    async def settle(self, generation: int) -> None:
        """Let end what workers of `generation`, now gone, had handed over, in memory at least."""
        try:
            client = MoverClient(self.socket_path, self._secret, generation)
            await asyncio.to_thread(client.drain, durable=False)
        except MoverGoneError:
            return  # and its saves with it

    async def begin(self, topology: Topology, tried: Mapping[str, str]) -> Newest:
        """Ask for the restore point, then tell it who will write from now on. tried: the keys of
        checkpoints that turned out to be rotten, and why.

        Raises CheckpointError when no checkpoint can be trusted, MoverGoneError, FencedError.
        """
        client = MoverClient(self.socket_path, self._secret, topology.generation)
        newest = await asyncio.to_thread(client.newest, tried=tried)
        table = state_table(self._config.model, self._config.train.precision)
        if self._pump is not None:
            self._pump.cancel()  # its last question is answered by `expect`, and asked no more
        await asyncio.to_thread(client.expect, topology, table, newest.step)
        await self.drain(topology.generation)  # rejected checkpoints, before the workers start
        self._pump = asyncio.create_task(self._listen(client))
        return newest

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
        """Until the mover is gone (which is told otherwise) or a newer generation has begun."""
        while self.alive:
            try:
                await self._collect(client, POLL_SECONDS)
            except FencedError:
                return
            except HoldfastError:  # it was stopped, or the machine slept and the proof is too old
                await asyncio.sleep(PAUSE_SECONDS)

    async def _collect(self, client: MoverClient, wait: float) -> None:
        mark = self._mark
        events, following = await asyncio.to_thread(client.events, mark, wait)
        if mark != self._mark:
            return  # somebody else took them meanwhile, or the mover is a new one
        self._mark = following
        for event in events:
            self._take(event)
