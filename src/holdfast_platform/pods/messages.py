"""What a host and its controller tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.json_parsing import JsonObject

HOST_PATH = "/host"
MAX_OUTPUT_BYTES = 64 << 10
"""Bytes of a program's output that travel: the last ones."""


@dataclass(frozen=True)
class Part:
    """One host's part of a gang. attempt: of the gang. words: the program. rank: the host's place
    among `hosts`."""

    gang: int
    attempt: int
    words: tuple[str, ...]
    rank: int
    hosts: tuple[str, ...]

    def to_json(self) -> JsonObject:
        return {
            "gang": self.gang,
            "attempt": self.attempt,
            "words": list(self.words),
            "rank": self.rank,
            "hosts": list(self.hosts),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Part:
        """Raises KeyError, TypeError and ValueError for what is no part."""
        words = tuple(str(word) for word in value["words"])
        hosts = tuple(str(host) for host in value["hosts"])
        return Part(int(value["gang"]), int(value["attempt"]), words, int(value["rank"]), hosts)


@dataclass(frozen=True)
class PartEnd:
    """How a host's part of a gang ended. output: the last of what it printed."""

    gang: int
    attempt: int
    exit_code: int
    output: str

    def to_json(self) -> JsonObject:
        return {
            "gang": self.gang,
            "attempt": self.attempt,
            "exit_code": self.exit_code,
            "output": self.output,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> PartEnd:
        """Raises KeyError, TypeError and ValueError for what is none."""
        return PartEnd(
            int(value["gang"]),
            int(value["attempt"]),
            int(value["exit_code"]),
            str(value["output"]),
        )


@dataclass(frozen=True)
class HostReport:
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

    def to_json(self) -> JsonObject:
        return {
            "name": self.name,
            "group": self.group,
            "mark": self.mark,
            "seen": self.seen,
            "running": None if self.running is None else list(self.running),
            "ended": [part.to_json() for part in self.ended],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> HostReport:
        """Raises KeyError, TypeError and ValueError for what is no report."""
        running = value["running"]
        return HostReport(
            str(value["name"]),
            str(value["group"]),
            str(value["mark"]),
            int(value["seen"]),
            None if running is None else (int(running[0]), int(running[1])),
            tuple(PartEnd.from_json(part) for part in value["ended"]),
        )


@dataclass(frozen=True)
class HostOrders:
    """The controller's answer.

    queue: the parts that the host runs, one after the other. If the host runs another part, it ends
        that one. leave: the host is to end.
    """

    number: int
    queue: tuple[Part, ...] = ()
    leave: bool = False

    def to_json(self) -> JsonObject:
        return {
            "number": self.number,
            "queue": [part.to_json() for part in self.queue],
            "leave": self.leave,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> HostOrders:
        """Raises KeyError, TypeError and ValueError for what is no answer."""
        queue = tuple(Part.from_json(part) for part in value["queue"])
        return HostOrders(int(value["number"]), queue, bool(value["leave"]))
