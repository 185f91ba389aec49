"""The actors and scorers of an agent's node, and the queue of completions if it leads.

The agent starts one process, the host, and starts it again if it exits. The host has the actors and
scorers as its children (`rollout/roles/host.py`). Whatever happens to them, no generation ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from holdfast.elastic.event_log import Say
from holdfast.elastic.protocol.messages import handler_of
from holdfast.elastic.run_context import RunContext
from holdfast.events import RoleExited
from holdfast.machine.limits import usable_cores
from holdfast.rollout.roles.devices import actor_devices
from holdfast.rollout.roles.messages import (
    ASK_PATH,
    LOST_PATH,
    WEIGHTS_PATH,
    WORK_PATH,
    Done,
    RoleLost,
    RoleOrders,
    RoleReport,
    TrainerAsk,
    TrainerReply,
    WeightsAsk,
    WeightsPiece,
)
from holdfast.rollout.roles.queue import RolloutQueue
from holdfast.rollout.roles.spec import HOST_MODULE, HostSpec
from holdfast.rollout.roles.weight_files import node_folder, read_piece, remove_leftovers
from holdfast.wire.child_command import module_command
from holdfast.wire.http.server import Handler

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Seconds before a host that exited is started again: at first, and at most."""
_REFUSED = 2  # exit code of a host that the user must help
_UNKNOWN = "?"

Reply = TypeVar("Reply", TrainerReply, RoleOrders, Done)
Request = TypeVar("Request")


class RoleSupervisor:
    """Lives in one event loop."""

    def __init__(
        self,
        context: RunContext,
        address: str,
        lifeline: int,
        find_leader: Callable[[], str],
        say: Say,
        emit: Callable[[RoleExited], None],
    ) -> None:
        """Make a supervisor without processes.

        Args:
            address: of this agent's control.
            lifeline: the read end of the agent's lifeline.
            find_leader: returns the coordinator's address; "" if this agent leads, "?" if no
                agent is known to.
            emit: writes an event into the journal.
        """
        self._context, self._address, self._lifeline = context, address, lifeline
        self._find_leader, self._say = find_leader, say
        self._is_on = context.config.rollout.is_on
        self.folder = node_folder(context.folder, context.node, os.getpid())
        """Of the policies that this node's trainers publish."""
        self.queue = RolloutQueue(
            say,
            lambda: asyncio.get_running_loop().time(),
            lambda lost: emit(RoleExited(lost.name, lost.node, lost.exit_code, lost.tokens)),
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of the roles' requests, which belong to no generation."""
        if not self._is_on:
            return {}
        return {
            ASK_PATH: handler_of(TrainerAsk.from_json, self._led(TrainerReply(), self.queue.ask)),
            WORK_PATH: handler_of(RoleReport.from_json, self._led(RoleOrders(), self.queue.work)),
            LOST_PATH: handler_of(RoleLost.from_json, self._led(Done(), self.queue.lose)),
            WEIGHTS_PATH: handler_of(WeightsAsk.from_json, self._read_weights),
        }

    def start(self) -> None:
        """Start the host of a run that generates its data."""
        if self._is_on and self._task is None:
            remove_leftovers(self.folder)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # for this user alone
            self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End the host with all its children, and remove the policies."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._is_on:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _led(
        self, moved: Reply, answer: Callable[[int, Request], Awaitable[Reply]]
    ) -> Callable[[int, Request], Awaitable[Reply]]:
        """Answer if this agent leads; otherwise say which one does."""

        async def handle(generation: int, request: Request) -> Reply:
            leader = self._find_leader()
            return replace(moved, moved=leader) if leader else await answer(generation, request)

        return handle

    async def _read_weights(self, _: int, asked: WeightsAsk) -> WeightsPiece:
        return await asyncio.to_thread(read_piece, self.folder, asked)

    def _spec(self) -> HostSpec:
        it, rollout = self._context, self._context.config.rollout
        processes = max(1, rollout.actors + rollout.scorers)
        return HostSpec(
            config=it.config.model_dump(mode="json"),
            secret=it.secret.hex(),
            agent=self._address,
            run_folder=str(it.folder),
            node=it.node,
            policies=str(self.folder),
            actors=rollout.actors,
            scorers=rollout.scorers,
            devices=actor_devices(it.config, it.places),
            threads=max(1, usable_cores() // (it.places + processes)),
        )

    async def _keep_running(self) -> None:
        """Run the host again and again."""
        pause = FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            code, said = await self._run_host()
            if code == _REFUSED:
                self._say(f"the actors of {self._context.node} cannot work: {said}")
                return
            logger.warning("the host of the actors exited with %s", code)
            if loop.time() - begun > MAX_PAUSE_S:
                pause = FIRST_PAUSE_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    async def _run_host(self) -> tuple[int | None, str]:
        """Run one host; return its exit code, and what it said."""
        suffix = f".{self._context.node_suffix}" if self._context.node_suffix else ""
        log = Path(self._context.folder, "logs", f"actors{suffix}.log")
        process: Process | None = None
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *module_command(HOST_MODULE, "--lifeline", str(self._lifeline)),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=output,
                    pass_fds=(self._lifeline,),
                    start_new_session=True,
                )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(self._spec().to_json()).encode() + b"\n")
            said = (await process.stdout.read()).decode(errors="replace").strip()
            return await process.wait(), said
        except OSError as error:
            return None, str(error)
        finally:
            if process is not None and process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
