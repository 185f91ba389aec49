"""One program drives uneven groups of hosts, with futures.

    with Controller(secret_file="controller.secret") as controller:
        trained = controller.submit(["holdfast", "train", "run.yaml", ...], on={"big": 4})
        score = controller.submit(["python", "score.py"], on={"small": 1}, after=[trained])
        print(score.result()[0].output)

A gang runs one program on several hosts at once. Hosts join a group by `holdfast host`, whenever
they like. The order of gangs is `holdfast_platform/clouds/gangs.py`'s; a future is done when all
parts of its gang are. Each host fills in `{rank}`, `{host}` and `{size}` in the program's words. A
word may be a future. It becomes what rank 0 of that gang has printed, without the last newline, and
the gang waits for it. (Pathways: Barham et al., MLSys 2022.)
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.config.sections.peers import is_loopback
from holdfast.elastic.protocol.messages import handler_of
from holdfast.errors import HoldfastError, UserError
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.server import HttpListener, SignedApplication
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.http.tls import with_tls
from holdfast.wire.secret import Secret, create_secret, read_secret
from holdfast_platform.clouds.gangs import GangBoard, GangState
from holdfast_platform.pods.messages import HOST_PATH, HostOrders, HostReport, Part, PartEnd

ANSWER_AFTER_S = 1.0
"""Seconds after which a host is answered although nothing is new for it."""
BUSY_ANSWER_AFTER_S = 0.1
LOST_AFTER_S = 15.0
"""Seconds without a report after which a host counts as lost."""


def open_secret_file(path: Path, host: str) -> Secret:
    """Return the secret of a controller that listens on `host`. Raises RunFolderError."""
    if not path.exists():
        create_secret(path)
    secret = read_secret(path, is_given=True)
    return secret if is_loopback(host) else with_tls(secret)


class GangFailedError(HoldfastError):
    """A gang ended with an error, lost a host, or was cancelled. Users know it as
    `Controller.Failed`."""


@dataclass(frozen=True)
class HostResult:
    """What a host's part of a gang gave. output: the last 64 KiB that it printed."""

    host: str
    exit_code: int
    output: str


class GangFuture(Future[tuple[HostResult, ...]]):
    """The result of a gang: one HostResult for each host, in rank order. `result` raises
    GangFailedError for a gang that failed, with what its first failed part printed last."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @property
    def text(self) -> str:
        """What rank 0 printed, without the last newline. Raises as `result` does."""
        return self.result()[0].output.rstrip("\n")


Word = str | GangFuture


@dataclass
class _Known:
    """A host as the controller knows it. told: number and text of its last orders."""

    mark: str
    heard_at: float
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    number: int = 0
    told: tuple[tuple[int, int], ...] = ()


class Controller:
    """Lives in the thread of its user; a thread of its own answers the hosts."""

    Failed = GangFailedError

    def __init__(
        self,
        *,
        secret_file: Path | str,
        interface: str = "127.0.0.1",
        port: int = 0,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        """interface, port: where hosts find it; port 0 takes a free one. secret_file: is made if it
        is missing; each host needs it. On any address but loopback, hosts speak TLS. Raises
        RunFolderError for an address that is not this machine's, or a file that is no secret."""
        secret = open_secret_file(Path(secret_file), interface)
        self._bound = bind_listener(interface, port, "interface")
        self.address = address_of(self._bound)
        """HOST:PORT, for `holdfast host`."""
        self._secret, self._lost_after_s = secret, lost_after_s
        self._board = GangBoard()
        self._words: dict[int, tuple[Word, ...]] = {}
        self._attempts: dict[int, int] = {}
        self._outputs: dict[int, dict[str, HostResult]] = {}
        self._futures: dict[int, GangFuture] = {}
        self._hosts: dict[str, _Known] = {}
        self._is_closing = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- for the program --------------------------------------------------------------------
    def submit(
        self,
        words: Sequence[Word],
        *,
        on: Mapping[str, int],
        after: Sequence[GangFuture] = (),
        retries: int = 0,
    ) -> GangFuture:
        """Run a program on hosts at once. on: hosts of each group; rank order follows the groups'
        names. after: gangs that must be done before. retries: how often it runs again after it lost
        a host. Raises UserError for a gang that needs no host."""
        return asyncio.run_coroutine_threadsafe(
            self._submit(tuple(words), dict(on), tuple(after), retries), self._loop
        ).result()

    def cancel(self, future: GangFuture) -> None:
        """End a gang; its future fails."""
        self._loop.call_soon_threadsafe(self._cancel, future.number)

    def hosts(self) -> dict[str, tuple[str, ...]]:
        """Names of the hosts that are there, by group."""
        found: dict[str, list[str]] = {}
        for host in list(self._board.hosts.values()):
            found.setdefault(host.group, []).append(host.name)
        return {group: tuple(sorted(names)) for group, names in sorted(found.items())}

    def close(self, timeout_s: float = 30.0) -> None:
        """Fail what is not done, and have all hosts leave. Waits for their last report."""
        if self._is_closing:
            return
        self._loop.call_soon_threadsafe(self._begin_close)
        deadline = time.monotonic() + timeout_s
        while self._hosts and time.monotonic() < deadline:
            time.sleep(0.02)
        self._loop.call_soon_threadsafe(self._listener.close)
        self._thread.join(timeout_s)

    # --- in the loop ------------------------------------------------------------------------
    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        handlers = {HOST_PATH: handler_of(HostReport.from_json, self._answer)}
        guard = SignedApplication(
            handlers,
            self._secret,
            Verifier(self._secret, time.time),
            lambda: 1,
            generationless_paths=frozenset({HOST_PATH}),
        )
        self._listener = HttpListener(guard, self._bound)
        watch = asyncio.create_task(self._watch_hosts())
        self._ready.set()
        await self._listener.serve()
        watch.cancel()

    async def _submit(
        self,
        words: tuple[Word, ...],
        on: Mapping[str, int],
        after: tuple[GangFuture, ...],
        retries: int,
    ) -> GangFuture:
        needed = {each.number for each in after}
        needed |= {word.number for word in words if isinstance(word, GangFuture)}
        try:
            number = self._board.submit(on, sorted(needed), retries)
        except ValueError as error:
            raise UserError(
                str(error), where="submit", remedy="give on={GROUP: HOSTS} with 1 or more hosts"
            ) from None
        self._words[number], self._attempts[number] = words, 0
        future = self._futures[number] = GangFuture(number)
        self._advance()
        return future

    def _cancel(self, number: int) -> None:
        self._board.cancel(number)
        self._advance()

    def _begin_close(self) -> None:
        self._is_closing = True
        for number in self._futures:
            self._board.cancel(number)
        self._advance()
        for known in self._hosts.values():
            known.changed.set()

    async def _answer(self, generation: int, report: HostReport) -> HostOrders:
        known = self._known(report)
        known.heard_at = self._loop.time()
        for part in report.ended:
            self._note_end(report.name, part)
        if report.running is not None and report.running[0] in self._board.queue_of(report.name):
            self._board.begin(report.name, report.running[0])
        self._advance()
        if report.seen == known.number and not self._is_closing:
            known.changed.clear()
            # A host that runs a part asks often, so that the end of the part is known soon.
            wait_s = ANSWER_AFTER_S if report.running is None else BUSY_ANSWER_AFTER_S
            with suppress(TimeoutError):
                await asyncio.wait_for(known.changed.wait(), wait_s)
            known.heard_at = self._loop.time()
        if self._is_closing:
            self._hosts.pop(report.name, None)
            return HostOrders(known.number, (), leave=True)
        return HostOrders(known.number, self._queue(report.name))

    def _note_end(self, host: str, part: PartEnd) -> None:
        """Note the end of a part. One of an earlier attempt only frees the host."""
        if part.attempt == self._attempts[part.gang]:
            result = HostResult(host, part.exit_code, part.output)
            self._outputs.setdefault(part.gang, {})[host] = result
        elif host in self._board.gangs[part.gang].hosts:
            return  # it is to run the newer attempt, too
        self._board.end(host, part.gang, part.exit_code)

    def _known(self, report: HostReport) -> _Known:
        known = self._hosts.get(report.name)
        if known is not None and known.mark == report.mark:
            return known
        if known is not None:  # another process has the name now
            self._board.lose_host(report.name)
        self._hosts[report.name] = _Known(report.mark, self._loop.time())
        self._board.add_host(report.name, report.group)
        return self._hosts[report.name]

    def _queue(self, name: str) -> tuple[Part, ...]:
        return tuple(self._part(name, number) for number in self._board.queue_of(name))

    def _part(self, name: str, number: int) -> Part:
        hosts = self._board.gangs[number].hosts
        rank = hosts.index(name)
        words = tuple(
            word.text
            if isinstance(word, GangFuture)
            else word.replace("{rank}", str(rank))
            .replace("{host}", name)
            .replace("{size}", str(len(hosts)))
            for word in self._words[number]
        )
        return Part(number, self._attempts[number], words, rank, hosts)

    def _advance(self) -> None:
        """Queue gangs, settle futures, and wake the hosts whose orders have changed."""
        while True:
            for number, future in self._futures.items():
                if not future.done():
                    gang, outputs = self._board.gangs[number], self._outputs.get(number, {})
                    if gang.state is GangState.DONE:
                        future.set_result(tuple(outputs[host] for host in gang.hosts))
                    elif gang.state is GangState.FAILED:
                        failed = next((each for each in outputs.values() if each.exit_code), None)
                        last = "" if failed is None else f": {failed.output.strip()[-500:]}"
                        future.set_exception(GangFailedError(f"gang {number}: {gang.reason}{last}"))
            queued = self._board.advance()
            for number in queued:
                self._attempts[number] += 1
                self._outputs.pop(number, None)
            if not queued and all(
                future.done() or self._board.gangs[number].state is not GangState.FAILED
                for number, future in self._futures.items()
            ):
                break
        for name, known in self._hosts.items():
            told = tuple((n, self._attempts[n]) for n in self._board.queue_of(name))
            if told != known.told:
                known.told, known.number = told, known.number + 1
                known.changed.set()

    async def _watch_hosts(self) -> None:
        while True:
            await asyncio.sleep(self._lost_after_s / 10)
            silent = [
                name
                for name, known in self._hosts.items()
                if self._loop.time() - known.heard_at > self._lost_after_s
            ]
            for name in silent:
                del self._hosts[name]
                self._board.lose_host(name)
            if silent:
                self._advance()
