"""Messages between the agent and its fork server: lines of JSON over an inherited socket.

The socket pair has no name and no port. Only the two processes have its ends, so nothing is signed.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from holdfast.core.json_parsing import JsonObject, parse_json
from holdfast.elastic.protocol.messages import Message
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.wire.secret import Secret

Received = TypeVar("Received")
MAX_DESCRIPTORS = 64
"""Descriptors that one read takes at most; the kernel gives those of one message at a time."""


# --- to the fork server -------------------------------------------------------------------------
@dataclass(frozen=True)
class ForkWorker:
    """The order to fork a worker, which gets its spec and the run's secret.

    A descriptor comes with it: the worker's standard output and error.
    """

    spec: WorkerSpec
    secret: Secret

    def to_json(self) -> JsonObject:
        return {"op": "fork", "boot": self.spec.to_json(), "secret": self.secret.hex()}


@dataclass(frozen=True)
class KillWorkers:
    """The order to kill all workers."""

    def to_json(self) -> JsonObject:
        return {"op": "kill"}


ForkOrder = ForkWorker | KillWorkers


def fork_order_from_json(value: Mapping[str, Any]) -> ForkOrder:
    """Parse an order. Raises KeyError, TypeError and ValueError if it is malformed."""
    match value["op"]:
        case "fork":
            spec = WorkerSpec.from_json(value["boot"])
            return ForkWorker(spec, Secret.from_hex(value["secret"]))
        case "kill":
            return KillWorkers()
        case op:
            raise ValueError(f"the fork server does not know the operation {op!r}")


# --- from the fork server -----------------------------------------------------------------------
@dataclass(frozen=True)
class ForkServerReady:
    """The fork server has imported all that workers need. reference: checksum of its reference
    computation; "" if it made none."""

    pid: int
    reference: str = ""

    def to_json(self) -> JsonObject:
        event: JsonObject = {"event": "ready", "pid": self.pid}
        return event | {"reference": self.reference} if self.reference else event


@dataclass(frozen=True)
class WorkerForked:
    """A worker runs. Workers are forked in the order of the orders."""

    rank: int
    pid: int

    def to_json(self) -> JsonObject:
        return {"event": "forked", "rank": self.rank, "pid": self.pid}


@dataclass(frozen=True)
class WorkerExited:
    """A worker has exited. exit_code: as `os.waitstatus_to_exitcode` gives it."""

    rank: int
    pid: int
    exit_code: int

    def to_json(self) -> JsonObject:
        return {"event": "exited", "rank": self.rank, "pid": self.pid, "code": self.exit_code}


ForkEvent = ForkServerReady | WorkerForked | WorkerExited


def fork_event_from_json(value: Mapping[str, Any]) -> ForkEvent:
    """Parse an event. Raises KeyError, TypeError and ValueError if it is malformed."""
    pid = int(value["pid"])
    match value["event"]:
        case "ready":
            return ForkServerReady(pid, str(value.get("reference", "")))
        case "forked":
            return WorkerForked(int(value["rank"]), pid)
        case "exited":
            return WorkerExited(int(value["rank"]), pid, int(value["code"]))
        case event:
            raise ValueError(f"the agent does not know the event {event!r} of a fork server")


# --- the channel --------------------------------------------------------------------------------
def encode_message(message: Message) -> bytes:
    return json.dumps(message.to_json(), separators=(",", ":")).encode() + b"\n"


class LineDecoder(Generic[Received]):
    """Cuts received bytes into messages. parse: makes a message of each line's JSON object."""

    def __init__(self, parse: Callable[[Mapping[str, Any]], Received]) -> None:
        self._parse, self._buffer = parse, b""

    def feed(self, data: bytes) -> Iterator[Received]:
        """Yield the messages that `data` completes."""
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        for line in whole:
            yield self._parse(parse_json(line))


def receive_messages(
    control: socket.socket, decoder: LineDecoder[Received]
) -> tuple[list[Received], list[int]] | None:
    """Return the messages on a readable socket, and the descriptors that came with them; None when
    the other end is closed."""
    data, fds, _, _ = socket.recv_fds(control, 1 << 16, MAX_DESCRIPTORS)
    return (list(decoder.feed(data)), fds) if data else None
