"""What a host and its controller tell each other.

`from_json` raises KeyError, TypeError and ValueError for what is no such message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from holdfast.core.json_parsing import JsonMessage, Parsers, tuple_of

HOST_PATH = "/host"
MAX_OUTPUT_BYTES = 64 << 10
"""Bytes of a program's output that travel: the last ones."""


@dataclass(frozen=True)
class Part(JsonMessage):
    """One host's part of a gang. attempt: of the gang. words: the program. rank: the host's place
    among `hosts`."""

    parsers: ClassVar[Parsers] = {
        **dict.fromkeys(("gang", "attempt", "rank"), int),
        **dict.fromkeys(("words", "hosts"), tuple_of(str)),
    }
    gang: int
    attempt: int
    words: tuple[str, ...]
    rank: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class PartEnd(JsonMessage):
    """How a host's part of a gang ended. output: the last of what it printed."""

    parsers: ClassVar[Parsers] = {"gang": int, "attempt": int, "exit_code": int, "output": str}
    gang: int
    attempt: int
    exit_code: int
    output: str


def _running(value: Sequence[Any]) -> tuple[int, int]:
    gang, attempt = value
    return int(gang), int(attempt)


@dataclass(frozen=True)
class HostReport(JsonMessage):
    """A host's report and question: it is answered once there is something else to do.

    mark     random: tells apart the processes that have had this name
    seen     number of the last orders that it has got
    running  (gang, attempt) that it has begun and not ended; None: none
    ended    parts that it has ended since the last report that was answered
    """

    parsers: ClassVar[Parsers] = {
        **dict.fromkeys(("name", "group", "mark"), str),
        "seen": int,
        "running": _running,
        "ended": tuple_of(PartEnd.from_json),
    }
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

    parsers: ClassVar[Parsers] = {"number": int, "queue": tuple_of(Part.from_json), "leave": bool}
    number: int
    queue: tuple[Part, ...] = ()
    leave: bool = False
