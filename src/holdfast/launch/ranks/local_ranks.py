"""One agent for the processes that a launcher has started on a node.

The process of local rank 0 becomes the agent. The rest say to it who they are, wait, and end with
its exit code. They speak over a socket of this machine that has no file, so a start that was
killed leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from holdfast.errors import ConfigError, UserError
from holdfast.launch.ranks.launchers import LauncherPlace, read_launcher, refuse_shell, unset_words

GATHER_TIMEOUT_S = 60.0  # Seconds in which all processes of a node must have started
_RETRY_S = 0.05
_PEER_CREDENTIALS = "3i"  # pid, uid, gid: unix(7)


def as_one_node(
    start: Callable[[LauncherPlace | None], int],
    environ: Mapping[str, str] = os.environ,
    timeout_s: float = GATHER_TIMEOUT_S,
) -> int:
    """Start one agent for all processes that a launcher has started on this node.

    start: starts it, with the launcher's place; None without a launcher.
    Returns the agent's exit code, in each process. Raises ConfigError if the processes do not fit
    together."""
    place = read_launcher(environ)
    if place is None:
        return start(None)
    refuse_shell(place, environ)
    if place.local_rank:
        return _wait_for_agent(place, timeout_s)
    with ExitStack() as open_until_end:
        listener = open_until_end.enter_context(agent_socket(place))
        code = 1
        peers: list[socket.socket] = []
        try:
            ranks: dict[int, int] = {place.local_rank: place.rank}
            for peer in _accept_all(listener, place, ranks, timeout_s, environ):
                peers.append(open_until_end.enter_context(peer))
            code = start(replace(place, ranks=tuple(sorted(ranks.values()))))
            return code
        except UserError as error:
            code = error.exit_code
            raise
        finally:
            for peer in peers:
                with suppress(OSError):
                    peer.sendall(b"%d\n" % code)


@contextmanager
def agent_socket(place: LauncherPlace) -> Iterator[socket.socket]:
    """Take the place of this node's agent. Raises ConfigError if another process has it."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address(place))
        except OSError:
            raise ConfigError(
                f"two processes of this node have local rank 0 under {place.launcher}",
                where="environment",
                remedy="start one set of processes at a time",
            ) from None
        listener.listen(place.local_world)
        yield listener


def _accept_all(
    listener: socket.socket,
    place: LauncherPlace,
    ranks: dict[int, int],
    timeout_s: float,
    environ: Mapping[str, str],
) -> Iterator[socket.socket]:
    """Yield a connection to each other process of the node, and add its rank to `ranks`, by local
    rank. Raises ConfigError."""
    deadline = time.monotonic() + timeout_s
    while len(ranks) < place.local_world:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            raise ConfigError(
                f"{place.launcher} has {place.local_world} processes on this node, and only "
                f"{len(ranks)} of them came within {timeout_s:g} s",
                where="environment",
                remedy="start the same command in all of them, or one process alone after: "
                + unset_words(environ),
            ) from None
        if not _is_ours(peer):
            peer.close()
            continue
        peer.settimeout(timeout_s)
        told = json.loads(peer.makefile("rb").readline())
        yield peer
        local_rank, rank, world = told["local_rank"], told["rank"], told["world"]
        if local_rank in ranks or rank in ranks.values():
            raise _conflict(place, f"two processes of this node have rank {rank}")
        if world != place.world:
            raise _conflict(place, f"{place.variable} is {place.world} here and {world} there")
        ranks[local_rank] = rank


def _conflict(place: LauncherPlace, what: str) -> ConfigError:
    return ConfigError(
        f"the processes of {place.launcher} do not fit together: {what}",
        where="environment",
        remedy=f"start all of them with one {place.launcher}",
    )


def _wait_for_agent(place: LauncherPlace, timeout_s: float) -> int:
    """Return the agent's exit code; 1 if it was killed. Raises ConfigError if there is none."""
    deadline = time.monotonic() + timeout_s
    with _patient(), socket.socket(socket.AF_UNIX) as agent:
        while True:
            try:
                agent.connect(_address(place))
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"no process of local rank 0 came within {timeout_s:g} s, which would be "
                        "this node's agent",
                        where="environment",
                        remedy=f"start all processes with one {place.launcher}",
                    ) from None
            time.sleep(_RETRY_S)
        if not _is_ours(agent):
            return 1
        own = {"rank": place.rank, "local_rank": place.local_rank, "world": place.world}
        with suppress(OSError):
            agent.sendall(json.dumps(own).encode() + b"\n")
            return int(agent.makefile("rb").readline() or b"1")
    return 1


@contextmanager
def _patient() -> Iterator[None]:
    """Inside, the first request to end is the agent's to answer; a second one ends this process."""
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _address(place: LauncherPlace) -> str:
    """A name in Linux' abstract namespace, of this user and this start on this node."""
    digest = hashlib.sha256(f"{os.getuid()} {place.start}".encode()).hexdigest()[:32]
    return f"\0holdfast-{digest}"


def _is_ours(connection: socket.socket) -> bool:
    """Return True if the process at the other end is this user's."""
    size = struct.calcsize(_PEER_CREDENTIALS)
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack(_PEER_CREDENTIALS, told)[1] == os.getuid())
