"""The processes of one node: mover, fork server and workers, and what follows from their exits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from holdfast.checkpoint.peers.config import Peer
from holdfast.core.devices import device_kind
from holdfast.elastic.agent.final_upload import FinalUpload
from holdfast.elastic.agent.run_progress import LearntProgress
from holdfast.elastic.event_log import Say
from holdfast.elastic.node.device_places import DevicePlaces
from holdfast.elastic.node.identity import find_identity
from holdfast.elastic.node.launch_specs import make_mover_settings
from holdfast.elastic.node.mover_supervisor import MoverSupervisor
from holdfast.elastic.node.node_runner import NodeRunner
from holdfast.elastic.node.output_relay import ProcessLog
from holdfast.elastic.node.process_manager import ProcessManager
from holdfast.elastic.node.worker_group import WorkerGroup
from holdfast.elastic.protocol.worker_spec import modules_to_preload
from holdfast.elastic.reviving import MoverRestarter
from holdfast.elastic.run_context import RunContext
from holdfast.policy.membership.node_identity import NodeIdentity
from holdfast.policy.recovery.survivors import HeldState
from holdfast.wire import lifeline


class NodeProcesses:
    """The processes of one node. Lives in one event loop; `attach` comes before any process."""

    def __init__(
        self,
        context: RunContext,
        progress: LearntProgress,
        say: Say,
        require_folder: Callable[[], Awaitable[None]],
    ) -> None:
        """require_folder: raises an error if the run folder is missing."""
        it, self._say = context, say
        self._is_killed = False
        self._config = it.config
        self._node_runner: NodeRunner | None = None
        self._publish_mover: Callable[[Peer | None], None] = lambda peer: None
        self._publish_identity: Callable[[NodeIdentity], None] = lambda identity: None
        self._lifeline_fd, self._line_end = lifeline.open_lifeline()
        settings = make_mover_settings(it.config, it.config_hash, it.dataset_version)
        self.mover = MoverSupervisor(
            it.config,
            it.folder,
            it.secret,
            settings,
            progress.on_mover_event,
            it.node_suffix,
            require_folder,
        )
        self._mover_restarter = MoverRestarter(
            lambda: self.mover.restart(self._lifeline_fd, self._on_mover_exit),
            lambda: self.mover.is_alive,
            self._say,
            self.publish_mover_address,
        )
        self.process_manager = ProcessManager(
            self.mover,
            it.folder,
            it.secret,
            it.worker_entry,
            modules_to_preload(it.config),
            self._lifeline_fd,
            self,
            on_mover_exit=self._on_mover_exit,
            on_fork_server_exit=self._on_fork_server_exit,
            say=self._say,
            devices=DevicePlaces(device_kind(it.config.device), it.places),
        )
        self.final_upload = FinalUpload(
            self.mover, it.config.checkpoint.bucket_wait_seconds, self._say
        )

    def attach(
        self,
        node_runner: NodeRunner,
        publish_mover: Callable[[Peer | None], None],
        publish_identity: Callable[[NodeIdentity], None],
    ) -> None:
        """Connect the processes to the node's part in the run. publish_mover: lets the coordinator
        know where this node's mover listens. publish_identity: what this node computes with."""
        self._node_runner = node_runner
        self._publish_mover, self._publish_identity = publish_mover, publish_identity

    @property
    def lifeline_fd(self) -> int:
        """Return the read end of the lifeline, for children."""
        return self._lifeline_fd

    @property
    def is_killed(self) -> bool:
        """True if the agent exits at once."""
        return self._is_killed

    @property
    def _worker_group(self) -> WorkerGroup | None:
        return None if self._node_runner is None else self._node_runner.worker_group

    def ignore_exits(self) -> None:
        """Ignore exits from here on: the agent exits at once."""
        self._is_killed = True

    async def stop(self) -> None:
        """End all processes; at once, if the agent exits at once."""
        if self._is_killed:
            os.close(self._line_end)  # ends every child
        await self._mover_restarter.stop()
        await self.process_manager.shut_down()

    def close(self) -> None:
        """Close the lifeline, after `stop`."""
        if not self._is_killed:
            os.close(self._line_end)
        os.close(self._lifeline_fd)

    def _on_fork_server_exit(self) -> None:
        if self._is_killed:
            return
        self._say("the fork server has exited; training continues, a new one starts when needed")

    def _on_mover_exit(self) -> None:
        if self._is_killed:
            return
        self._mover_restarter.start()

    def publish_mover_address(self) -> None:
        """Let the next request to the coordinator carry the mover's address."""
        self._publish_mover(self.mover.peer)  # the coordinator passes its address on

    async def publish_identity(self) -> None:
        """Let requests to join carry what of this node decides the bits that it computes."""
        self._publish_identity(
            await asyncio.to_thread(find_identity, self._config, self.process_manager.reference)
        )

    # --- events of processes (`process_manager`) ------------------------------------------------
    def on_joined(self, generation: int, rank: int, pid: int) -> None:
        current = self._worker_group
        if current is not None and current.generation == generation:
            current.on_joined(rank, pid)

    def on_exited(
        self,
        generation: int,
        rank: int,
        pid: int,
        exit_code: int,
        log: ProcessLog,
        kill_reason: str,
    ) -> None:
        current = self._worker_group
        if current is not None and current.generation == generation:
            current.on_exited(rank, pid, exit_code, log, kill_reason)

    def on_held(self, generation: int, rank: int, held_state: HeldState) -> None:
        current = self._worker_group
        if current is not None and current.generation == generation:
            current.on_held(rank, held_state)
            assert self._node_runner is not None
            self._node_runner.on_worker_held(rank, held_state)
