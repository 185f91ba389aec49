"""Messages between the agent and its fork server: lines of JSON over an inherited socket.

The socket pair has no name and no port. Only the two processes have its ends, so nothing is signed.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from holdfast.core.json_parsing import JsonMessage, Key, ParsedJson, parse_json, tagged_parser
from holdfast.elastic.protocol.messages import Message
from holdfast.elastic.protocol.worker_spec import WorkerSpec

Received = TypeVar("Received")
MAX_DESCRIPTORS = 64
"""Descriptors that one read takes at most; the kernel gives those of one message at a time."""


# --- to the fork server -------------------------------------------------------------------------
@dataclass(frozen=True)
class ForkWorker(JsonMessage):
    """The order to fork a worker, which gets its spec and the run's secret.

    A descriptor comes with it: the worker's standard output and error.
    """

    tag: ClassVar[Mapping[str, str]] = {"op": "fork"}
    spec: Annotated[WorkerSpec, Key("boot")]
    secret: str = field(repr=False)  # as `Secret.hex` has it


@dataclass(frozen=True)
class KillWorkers(JsonMessage):
    """The order to kill all workers."""

    tag: ClassVar[Mapping[str, str]] = {"op": "kill"}


ForkOrder = ForkWorker | KillWorkers

parse_fork_order: Callable[[ParsedJson], ForkOrder] = tagged_parser(ForkWorker, KillWorkers)


# --- from the fork server -----------------------------------------------------------------------
@dataclass(frozen=True)
class ForkServerReady(JsonMessage):
    """The fork server has imported all that workers need. reference: checksum of its reference
    computation; "" if it made none."""

    tag: ClassVar[Mapping[str, str]] = {"event": "ready"}
    absent_if_default = frozenset({"reference"})
    pid: int
    reference: str = ""


@dataclass(frozen=True)
class WorkerForked(JsonMessage):
    """A worker runs. Workers are forked in the order of the orders."""

    tag: ClassVar[Mapping[str, str]] = {"event": "forked"}
    rank: int
    pid: int


@dataclass(frozen=True)
class WorkerExited(JsonMessage):
    """A worker has exited. exit_code: as `os.waitstatus_to_exitcode` gives it."""

    tag: ClassVar[Mapping[str, str]] = {"event": "exited"}
    rank: int
    pid: int
    exit_code: Annotated[int, Key("code")]


ForkEvent = ForkServerReady | WorkerForked | WorkerExited

parse_fork_event: Callable[[ParsedJson], ForkEvent] = tagged_parser(
    ForkServerReady, WorkerForked, WorkerExited
)


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
