"""The host of a node's actors and scorers: `python -m holdfast.rollout.roles.host --lifeline FD`.

It imports torch once, computes nothing, and forks them. One that exits is forked again, after a
pause that grows if it exits soon. The host says so to the queue, whose leases end at once. All end
with the agent (`lifeline`); an actor of `holdfast actor` has no agent, and ends with its host.
"""

from __future__ import annotations

import argparse
import gc
import logging
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from holdfast.config.run import RunConfig
from holdfast.core.json_parsing import parse_json
from holdfast.errors import HoldfastError, UserError
from holdfast.rollout.roles.client import NoQueueError, QueueClient
from holdfast.rollout.roles.messages import Role, RoleLost
from holdfast.rollout.roles.spec import HostSpec
from holdfast.rollout.roles.texts import Texts
from holdfast.rollout.roles.work import Actor, Scorer
from holdfast.training.engine.precision import same_products_on_any_threads
from holdfast.wire import lifeline
from holdfast.wire.process_title import set_process_title
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_location import store_of_run
from holdfast.wire.term import newest_term

logger = logging.getLogger("holdfast.rollout.roles.host")  # it runs as __main__

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 30.0
"""Seconds before a process that exited is started again: at first, and at most."""
STABLE_S = 20.0
"""A process that ran for so long has recovered: the next pause is the first one again."""
WORK_WAIT_S = 2.0
"""Seconds for which a question for work stays open."""
CHECK_S = 0.05
LOOK_S, PATIENCE_S = 2.0, 60.0
"""Seconds between two looks for an agent that leads, and without one, if no agent started us."""
_REFUSED = 2  # exit code: the user must act, so it is not started again


@dataclass
class _Child:
    """One place of an actor or a scorer, and its process."""

    role: Role
    number: int
    pid: int = 0  # 0: none runs
    name: str = ""  # of the process, in the queue
    started_at: float = 0.0
    failures: int = 0  # in a row
    retry_at: float = 0.0
    is_refused: bool = False
    loss: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 8))
    """Shared with the process: tokens that its death would lose, int64"""

    def count_loss(self, tokens: int) -> None:
        self.loss[:] = tokens.to_bytes(8, "little")

    @property
    def lost_tokens(self) -> int:
        return int.from_bytes(self.loss[:], "little")


class RoleHost:
    """The processes of one node. One thread."""

    def __init__(self, spec: HostSpec, lifeline_fd: int) -> None:
        self._spec, self._lifeline = spec, lifeline_fd
        self._secret = Secret.from_hex(spec.secret)
        config = RunConfig.model_validate(spec.config)
        self._texts = Texts.open(config)  # read once for all
        self._has_server = bool(config.rollout.server.url)
        self._find_agent = agent_finder(spec)
        self._next_look_at, self._led_at = 0.0, time.monotonic()
        self._client = QueueClient(self._find_agent, self._secret)
        counts: tuple[tuple[Role, int], ...] = (("actor", spec.actors), ("scorer", spec.scorers))
        self._children = [_Child(role, n) for role, count in counts for n in range(count)]
        self._line_read, self._line_write = lifeline.open_lifeline()

    def run(self) -> None:
        """Keep all of them running until the agent ends."""
        agent = select.poll()
        agent.register(self._lifeline, select.POLLIN)
        while not agent.poll(CHECK_S * 1000):
            now = time.monotonic()
            if self._has_no_run(now):
                return
            for child in self._children:
                if child.pid:
                    self._look(child, now)
                elif not child.is_refused and now >= child.retry_at:
                    self._fork(child, now)

    def _has_no_run(self, now: float) -> bool:
        """Return True if an actor without an agent has waited for too long for one that leads."""
        if self._spec.agent or now < self._next_look_at:
            return False
        self._next_look_at = now + LOOK_S
        try:
            self._find_agent()
        except NoQueueError:
            return now - self._led_at > PATIENCE_S
        except HoldfastError:
            return False  # a run store that does not answer
        self._led_at = now
        return False

    def _look(self, child: _Child, now: float) -> None:
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # what it left behind
        code = os.waitstatus_to_exitcode(status)
        logger.info("%s (process %d) exited with %d", child.name, child.pid, code)
        tokens = child.lost_tokens if child.role == "actor" and not self._has_server else None
        self._client.lose(RoleLost(child.name, self._spec.node, code, tokens))
        child.pid, child.is_refused = 0, code == _REFUSED
        if now - child.started_at > STABLE_S:
            child.failures = 0
        child.retry_at = now + min(FIRST_PAUSE_S * 2**child.failures, MAX_PAUSE_S)
        child.failures += 1

    def _fork(self, child: _Child, now: float) -> None:
        child.started_at = now
        child.count_loss(0)
        child.name = f"{self._spec.node} {child.role} {child.number} {os.urandom(4).hex()}"
        child.pid = os.fork()
        if child.pid == 0:
            os.close(self._line_write)
            lines = self._lifeline, self._line_read
            _become(self._spec, self._secret, self._texts, child, lines)
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(child.pid, child.pid)


def _become(
    spec: HostSpec, secret: Secret, texts: Texts, child: _Child, lines: tuple[int, int]
) -> NoReturn:
    """Work as an actor or a scorer, in the forked process."""
    code = 1
    try:
        with suppress(PermissionError):
            os.setpgid(0, 0)
        for line in lines:
            lifeline.watch_lifeline(line)
        set_process_title(f"{child.role} {child.number}", str(spec.config.get("name", "")))
        serve(spec, secret, texts, child)
    except UserError as error:
        logger.error("%s", error)
        code = _REFUSED
    except BaseException:
        logger.exception("%s failed", child.name)
    finally:
        logging.shutdown()
        os._exit(code)


def serve(spec: HostSpec, secret: Secret, texts: Texts, child: _Child) -> NoReturn:
    """Take leases and work, until the process is ended. Raises UserError."""
    same_products_on_any_threads()
    torch.set_num_threads(spec.threads)
    config = RunConfig.model_validate(spec.config)
    client, name = QueueClient(agent_finder(spec), secret), child.name
    work: Actor | Scorer
    if child.role == "scorer":
        work = Scorer(config, client, name, spec.node, texts=texts)
    else:
        work = Actor(
            config,
            client,
            name,
            spec.node,
            texts=texts,
            device=torch.device(spec.devices[child.number % len(spec.devices)]),
            folder=Path(spec.policies) if spec.policies else None,
            slots=config.rollout.slots,
            count_loss=child.count_loss,
        )
    while True:
        work.turn(WORK_WAIT_S)


def agent_finder(spec: HostSpec) -> Callable[[], str]:
    """Return what finds an agent to ask: the one that started the host, or the coordinator."""
    if spec.agent:
        return lambda: spec.agent
    store = store_of_run(spec.run_folder)

    def find() -> str:
        _, holder = newest_term(store)
        address = "" if holder is None else str(holder.get("address", ""))
        if not address:
            raise NoQueueError("no agent coordinates the run now")
        return address

    return find


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, required=True)
    arguments = parser.parse_args()
    spec = HostSpec.from_json(parse_json(sys.stdin.readline()))
    lifeline.arm_kernel_kill(arguments.lifeline)
    lifeline.ignore_agent_signals()
    set_process_title("actors", str(spec.config.get("name", "")))
    form = "%(asctime)s %(levelname)s %(process)d: %(message)s"
    logging.basicConfig(format=form, level=logging.INFO)  # no thread: this process forks
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        host = RoleHost(spec, arguments.lifeline)
    except UserError as error:
        print(error, flush=True)
        sys.exit(_REFUSED)
    gc.freeze()  # a child's collector must not touch inherited objects
    host.run()


if __name__ == "__main__":
    main()
