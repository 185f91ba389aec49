"""The processes of one node: mover, fork server and workers, and what follows from their exits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

from holdfast.checkpoint.peers.config import Peer
from holdfast.core.devices import run_device_kind
from holdfast.elastic.agent.final_upload import FinalUpload
from holdfast.elastic.agent.run_records import LearntProgress
from holdfast.elastic.event_log import Say
from holdfast.elastic.node.identity import find_identity
from holdfast.elastic.node.launch_specs import make_mover_settings
from holdfast.elastic.node.mover_supervisor import MoverSupervisor
from holdfast.elastic.node.process_manager import DevicePlaces, ProcessManager
from holdfast.elastic.protocol.worker_spec import modules_to_preload
from holdfast.elastic.run_context import RunContext
from holdfast.errors import FencedError, HoldfastError
from holdfast.policy.membership.node_identity import NodeIdentity
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
        self.is_killed = False
        """True if the agent exits at once."""
        self._config = it.config
        self._publish_mover: Callable[[Peer | None], None] = lambda peer: None
        self._publish_identity: Callable[[NodeIdentity], None] = lambda identity: None
        self.lifeline_fd, self._line_end = lifeline.open_lifeline()
        """The read end is for children."""
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
            lambda: self.mover.restart(self.lifeline_fd, self._on_mover_exit),
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
            self.lifeline_fd,
            on_mover_exit=self._on_mover_exit,
            on_fork_server_exit=self._on_fork_server_exit,
            say=self._say,
            devices=DevicePlaces(run_device_kind(it.config), it.places),
        )
        self.final_upload = FinalUpload(
            self.mover, it.config.checkpoint.bucket_wait_seconds, self._say
        )

    def attach(
        self,
        publish_mover: Callable[[Peer | None], None],
        publish_identity: Callable[[NodeIdentity], None],
    ) -> None:
        """Connect the processes to the node's part in the run. publish_mover: lets the coordinator
        know where this node's mover listens. publish_identity: what this node computes with."""
        self._publish_mover, self._publish_identity = publish_mover, publish_identity

    def ignore_exits(self) -> None:
        """Ignore exits from here on: the agent exits at once."""
        self.is_killed = True

    async def stop(self) -> None:
        """End all processes; at once, if the agent exits at once."""
        if self.is_killed:
            os.close(self._line_end)  # ends every child
        await self._mover_restarter.stop()
        await self.process_manager.shut_down()

    def close(self) -> None:
        """Close the lifeline, after `stop`."""
        if not self.is_killed:
            os.close(self._line_end)
        os.close(self.lifeline_fd)

    def _on_fork_server_exit(self) -> None:
        if self.is_killed:
            return
        self._say("the fork server has exited; training continues, a new one starts when needed")

    def _on_mover_exit(self) -> None:
        if self.is_killed:
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


# Restarts a mover that exits while training continues, and retries until one is alive.
#
# A cause that prevents the start may pass, such as an unreachable run folder. A new mover may
# also exit before it learns of the generation. So the exit of a mover starts one task. The task
# ends when a mover is alive that serves the run.

FIRST_MOVER_RESTART_DELAY_S, MAX_MOVER_RESTART_DELAY_S = 1.0, 15.0
"""Pause before the next attempt, in seconds: the first pause, and the longest."""


class MoverRestarter:
    """Restarts of the mover, at most one attempt at a time."""

    def __init__(
        self,
        restart: Callable[[], Awaitable[None]],
        is_alive: Callable[[], bool],
        say: Callable[[str], None],
        on_restarted: Callable[[], None] = lambda: None,
        delays_s: tuple[float, float] = (FIRST_MOVER_RESTART_DELAY_S, MAX_MOVER_RESTART_DELAY_S),
    ) -> None:
        """restart: starts a mover and tells it of the running generation
        (`MoverSupervisor.restart`). is_alive: returns True if a mover is alive. on_restarted:
        called when one is alive again. delays_s: the first and the longest pause between attempts,
        in seconds."""
        self._restart = restart
        self._is_alive = is_alive
        self._say = say
        self._on_restarted = on_restarted
        self._delays_s = delays_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the restart task unless it runs: a running task notices a lost mover itself."""
        if self._task is None or self._task.done():
            self._say("the mover has exited; a new one is started while training continues")
            self._task = asyncio.create_task(self._restart_until_alive())

    async def stop(self) -> None:
        """Start no further mover."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _restart_until_alive(self) -> None:
        pause, most = self._delays_s
        said = ""
        while words := await self._try_restart():
            if words != said:
                self._say(f"there is no new mover yet, and no checkpoint: {words}")
                said = words
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def _try_restart(self) -> str:
        """Try once; return why there is still no mover, "" if there is one."""
        try:
            await self._restart()
        except FencedError:  # the mover learned of a newer generation meanwhile
            pass
        except (HoldfastError, OSError) as error:
            return str(error)
        except Exception as error:  # our own bug: training continues anyway
            return f"{type(error).__name__}: {error}"
        if not self._is_alive():
            return "the new mover exited right after its start"
        self._on_restarted()
        return ""
