"""What a host and its controller tell each other.

`from_json` raises KeyError, TypeError and ValueError for what is no such message.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.json_parsing import JsonMessage

HOST_PATH = "/host"
MAX_OUTPUT_BYTES = 64 << 10
"""Bytes of a program's output that travel: the last ones."""


@dataclass(frozen=True)
class Part(JsonMessage):
    """One host's part of a gang. attempt: of the gang. words: the program. rank: the host's place
    among `hosts`."""

    gang: int
    attempt: int
    words: tuple[str, ...]
    rank: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class PartEnd(JsonMessage):
    """How a host's part of a gang ended. output: the last of what it printed."""

    gang: int
    attempt: int
    exit_code: int
    output: str


@dataclass(frozen=True)
class HostReport(JsonMessage):
    """A host's report and question: it is answered once there is something else to do.

    mark     random: tells apart the processes that have had this name
    seen     number of the last orders that it has got
    running  (gang, attempt) that it has begun and not ended; None: none
    ended    parts that it has ended since the last report that was answered
    """

    name: str
    group: str
    mark: str
    seen: int
    running: tuple[int, int] | None
    ended: tuple[PartEnd, ...]


@dataclass(frozen=True)
class HostOrders(JsonMessage):
    """The controller's answer.

    queue: the parts that the host runs, one after the other. If the host runs another part, it ends
        that one. leave: the host is to end.
    """

    number: int
    queue: tuple[Part, ...] = ()
    leave: bool = False
