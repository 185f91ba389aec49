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
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.checkpoint.bucket.pending_upload import PendingUpload
from holdfast.checkpoint.mover.client import MoverClient, MoverGoneError
from holdfast.checkpoint.mover.main import MoverSpec
from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.checkpoint.mover.socket_place import SOCKET_NAME, make_socket_folder
from holdfast.checkpoint.peers.client import split_address
from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.config.run import RunConfig
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.config.sections.peers import MachineConfig
from holdfast.core.sharding.run_table import run_state_table
from holdfast.elastic.node.children import Child, start_mover
from holdfast.elastic.node.output_relay import OutputRelay
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import (
    CheckpointCommitted,
    Event,
    SnapshotComplete,
    SnapshotDropped,
    SnapshotKept,
)
from holdfast.layout import Topology
from holdfast.machine.limits import available_memory
from holdfast.policy.placement import FAILURE_DOMAINS, Machine
from holdfast.wire.http.sockets import bind_listener
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_location import location_of_run

logger = logging.getLogger(__name__)

MOVER_EVENT_POLL_WAIT_S = 5.0
DURABLE_SAVE_TIMEOUT_S = 600.0
MOVER_REPLY_TIMEOUT_S = 60.0
"""Seconds without a reply after which a mover that is alive is replaced."""
MOVER_POLL_RETRY_S = 1.0
"""Seconds before the next request to a mover that is alive and did not answer."""


@dataclass(frozen=True)
class Announcement:
    """A generation that begins from the state after step `start_step`, as its mover needs it."""

    topology: Topology
    start_step: int
    restore_point: RestorePoint | None = None  # whichever node chose it; None: workers have it
    machines: Sequence[Peer] | None = None  # of a run on several nodes, those that take part
    sources: Sequence[Peer] = ()  # further machines whose memory may hold the restore point
    is_stored: bool = True  # the state is a checkpoint in the run store


class MoverSupervisor:
    """Runs one mover at a time. Its socket lies in a private folder (`mover/socket_place.py`)."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        secret: Secret,
        settings: MoverSettings,
        on_event: Callable[[Event], None],
        node: str = "",
        check_run_folder: Callable[[], Awaitable[None]] | None = None,
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
        self.run_name = config.name
        self.node_suffix = f".{node}" if node else ""
        """Suffix of this node's log names, if several nodes share the run folder."""
        self._announcement: Announcement | None = None  # of the running generation
        self._state_locations = StateLocations()
        self._start_lock = asyncio.Lock()
        self._config, self._folder, self._secret = config, folder, secret
        self._settings = settings
        self._on_event = on_event
        self._check_run_folder = check_run_folder
        self._socket_folder = make_socket_folder()
        self.socket_path = str(Path(self._socket_folder.name) / SOCKET_NAME)
        self._child: Child | None = None
        self._output = OutputRelay()
        self._event_cursor, self._last_reply_at = 0, 0.0
        self._listen_task: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child is not None and self._child.is_alive else None

    async def ensure_running(self, lifeline: int, on_exit: Callable[[], None]) -> None:
        """Start a mover unless one is alive. Raises ChildFailedError, and what `check_run_folder`
        raises."""
        async with self._start_lock:
            if not self.is_alive:
                await self._start(lifeline, on_exit)

    async def _start(self, lifeline: int, on_exit: Callable[[], None]) -> None:
        if self._check_run_folder is not None:
            await self._check_run_folder()
        port = 0 if self.peer is None else split_address(self.peer.address)[1]
        peers = make_peer_settings(self._config.checkpoint, self._node, port)
        if port and peers is not None and not _is_port_free(peers.interface, peers.port):
            peers = make_peer_settings(self._config.checkpoint, self._node)
        boot = MoverSpec(
            store=location_of_run(self._folder),
            socket=self.socket_path,
            settings=self._settings,
            secret=self._secret.hex(),
            lifeline=lifeline,
            peers=None if peers is None else peers.to_json(),
        )
        log = self._folder / "logs" / f"mover{self.node_suffix}.log"
        child = await start_mover(boot.to_json_line(), lifeline, self._output, log, on_exit)
        if peers is not None:
            client = MoverClient(self.socket_path, self._secret, 0)
            try:
                status = await asyncio.to_thread(client.status)
                self.peer = Peer(peers.machine, str(status["peers"]["address"]))
            except BaseException:  # half a start is none
                await child.stop(0.0)
                raise
        self._event_cursor, self._last_reply_at = 0, time.monotonic()
        self._child = child
        logger.info("mover started")

    async def drain_saves(self, generation: int) -> None:
        """Wait until the saves that workers of the ended `generation` handed over are complete, at
        least in memory."""
        try:
            client = MoverClient(self.socket_path, self._secret, generation)
            await asyncio.to_thread(client.drain, until_durable=False)
        except MoverGoneError:
            return  # and its saves with it

    async def choose_restore_point(
        self,
        generation: int,
        rejected_checkpoints: Mapping[str, str],
        machines: Sequence[Peer] | None = None,
    ) -> RestorePoint:
        """Choose the restore point of a generation that has been opened.

        Args:
            rejected_checkpoints: keys of checkpoints that turned out to be corrupt, and why.
            machines: of a run on several nodes, the nodes of the previous generation that still
                run. Their memory is searched.

        Raises CheckpointError if no checkpoint can be trusted, MoverGoneError, FencedError.
        """
        client = MoverClient(self.socket_path, self._secret, generation)
        return await asyncio.to_thread(
            client.find_restore_point, corrupt_keys=rejected_checkpoints, machines=machines
        )

    async def expect_generation(self, announcement: Announcement) -> None:
        """Announce a generation. Raises MoverGoneError, FencedError."""
        self._announcement = announcement
        if self._listen_task is None or self._listen_task.done():
            self._last_reply_at = time.monotonic()  # the agent has not listened for a while
        try:
            await self._send_announcement(announcement)
            # rejected checkpoints, before the workers start
            await self.drain_events(announcement.topology.generation)
        finally:  # one that does not answer is listened to all the same: so it is replaced
            if self._listen_task is None or self._listen_task.done():
                generation = announcement.topology.generation
                client = MoverClient(self.socket_path, self._secret, generation)
                self._listen_task = asyncio.create_task(self._listen(client))

    async def restart(self, lifeline: int, on_exit: Callable[[], None]) -> None:
        """Start a new mover in place of a dead one, for the running generation.

        Emit an event for what was lost with the old one, and what protects the run now. Raises
        ChildFailedError, MoverGoneError, FencedError.
        """
        if not self.is_alive:  # else only the answer of the one that was started last is missing
            for event in self._state_locations.drop_memory():
                self._on_event(event)
        await self.ensure_running(lifeline, on_exit)
        if self._announcement is not None:  # what was begun from has been read
            await self.expect_generation(replace(self._announcement, restore_point=None))

    async def _send_announcement(self, expect: Announcement) -> None:
        client = MoverClient(self.socket_path, self._secret, expect.topology.generation)
        table = run_state_table(self._config)
        placement = None if expect.restore_point is None else expect.restore_point.placement
        await asyncio.to_thread(
            client.expect,
            expect.topology,
            table,
            expect.start_step,
            expect.machines,
            expect.sources,
            placement,
            expect.restore_point,
            expect.is_stored,
        )

    async def wait_until_durable(self, restore_point: RestorePoint) -> str | None:
        """Wait until a restore point that memory alone held is durable; return None, or why it is
        not."""
        client = MoverClient(self.socket_path, self._secret, restore_point.generation)
        return await asyncio.to_thread(
            client.wait_until_committed, restore_point.step, DURABLE_SAVE_TIMEOUT_S
        )

    async def find_damage(self, generation: int, key: str) -> str | None:
        """Return what is wrong with a checkpoint that no worker will read; None if it is intact."""
        client = MoverClient(self.socket_path, self._secret, generation)
        return await asyncio.to_thread(client.find_damage, key)

    async def wait_for_upload(self, generation: int, max_wait_s: float) -> PendingUpload | None:
        """Wait for an upload as `MoverClient.upload_progress` does; None without a bucket."""
        if not self._settings.bucket:
            return None
        client = MoverClient(self.socket_path, self._secret, generation)
        return await asyncio.to_thread(client.upload_progress, max_wait_s)

    async def drain_events(self, generation: int) -> None:
        """Process every event so far."""
        if self._listen_task is not None:
            self._listen_task.cancel()
            self._listen_task = None
        client = MoverClient(self.socket_path, self._secret, generation)
        try:
            await self._collect_events(client, 0.0)
        except HoldfastError:
            return  # they are told when it is asked the next time, unless it is gone

    async def stop(self) -> None:
        if self._listen_task is not None:
            self._listen_task.cancel()
        if self._child is not None and self._child.is_alive:
            await self._child.stop(30.0)  # it finishes the writes it is in
        await self._output.close()
        self._socket_folder.cleanup()

    async def _listen(self, client: MoverClient) -> None:
        """Collect events until the mover exits or a newer generation begins.

        The exit callback reports an exit. A mover that is alive and silent for long is killed, so
        that a new one can take its place.
        """
        while self.is_alive:
            try:
                await self._collect_events(client, MOVER_EVENT_POLL_WAIT_S)
            except FencedError:
                return
            except HoldfastError:  # it was stopped, or the machine slept and the proof is too old
                if (
                    time.monotonic() - self._last_reply_at > MOVER_REPLY_TIMEOUT_S
                    and self._child is not None
                ):
                    with suppress(ProcessLookupError):
                        self._child.process.kill()
                    return
                await asyncio.sleep(MOVER_POLL_RETRY_S)

    async def _collect_events(self, client: MoverClient, max_wait_s: float) -> None:
        mark = self._event_cursor
        events, following = await asyncio.to_thread(client.events, mark, max_wait_s)
        self._last_reply_at = time.monotonic()
        if mark != self._event_cursor:
            return  # somebody else took them meanwhile, or the mover is a new one
        self._event_cursor = following
        for event in events:
            if self._state_locations.observe(event):
                self._on_event(event)


class StateLocations:
    """The places of the newest states, by the mover's events."""

    def __init__(self) -> None:
        self._memory_step: int | None = None
        self._peer_copy: tuple[int, str] | None = None  # step, peer
        self._durable_step: int | None = None
        self._newest_commit_key = ""  # the newest commit object

    def observe(self, event: Event) -> bool:
        """Record an event; return False if it repeats the last commit.

        A new mover reports the last commit again, because the old mover's report may have been
        lost.
        """
        if isinstance(event, CheckpointCommitted):
            if event.key == self._newest_commit_key:
                return False
            self._newest_commit_key = event.key
        match event:
            case SnapshotComplete(step=step):
                self._memory_step = step
            case SnapshotKept(peer=peer, step=step):
                self._peer_copy = max((step, peer), self._peer_copy or (step, peer))
            case CheckpointCommitted(step=step):
                self._durable_step = max(step, self._durable_step or step)
        return True

    def drop_memory(self) -> list[Event]:
        """Forget this node's memory after the mover exited; return an event if it held a state."""
        lost, self._memory_step = self._memory_step, None
        if lost is None:
            return []
        kept, durable = self._peer_copy, self._durable_step
        if kept is not None and kept[0] >= (durable or 0):
            rest = f"{kept[1]} keeps a copy of the state after step {kept[0]}"
        elif durable is not None:
            rest = f"the newest checkpoint is of step {durable}"
        else:
            rest = "nothing else holds a state of this run until the next one is saved"
        return [SnapshotDropped(f"the mover ended, and its memory with it; {rest}", step=lost)]


def _is_port_free(interface: str, port: int) -> bool:
    """Return True if the port can be listened on again."""
    try:
        bind_listener(interface, port, "checkpoint.peer_port").close()
    except HoldfastError:
        return False
    return True


GB = 1_000_000_000
BITS_PER_BYTE = 8


def make_peer_settings(
    config: CheckpointConfig, node: str = "", port: int = 0
) -> PeerSettings | None:
    """Return the peer settings; None if the run file names no peers and keeps no copies for them.

    All machines of a run may share one run file: this machine is no peer of its own.

    Args:
        node: this node's name in the topology, if the run may have several nodes. Its mover then
            always listens and keeps copies for the other nodes. If the run file sets no size for
            them, they get half of the free memory. The own ranks' arenas need some, too.
        port: the port that it had before, if the run file sets none.
    """
    others = [peer for peer in config.peers if peer.name not in (node, config.machine.name)]
    if not others and not config.peer_memory_gb and not node:
        return None
    own = _to_machine(config.machine)
    return PeerSettings(
        machine=replace(own, name=node, node=own.node or node) if node else own,
        peers=tuple(Peer(_to_machine(p, int(p.memory_gb * GB) or None), p.address) for p in others),
        interface=config.peer_host,
        port=config.peer_port or port,
        advertise=config.peer_advertise,
        every_steps=1 if config.peer_every_steps == "auto" else config.peer_every_steps,
        copies=config.peer_copies,
        stable=next((p.name for p in others if p.stable), None),
        bytes_per_second=config.peer_mbps * 1e6 / BITS_PER_BYTE,
        room=int(config.peer_memory_gb * GB) or (available_memory() // 2 if node else 0),
    )


def _to_machine(section: MachineConfig, room: int | None = None) -> Machine:
    return Machine(
        section.name, room=room, **{kind: getattr(section, kind) for kind in FAILURE_DOMAINS}
    )
