"""The commands of an agent to its processes, and the polls that fetch them.

A process asks for commands that are newer than those it has taken. The answer comes as soon as
there is one. Commands are numbered, and only the newest counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from holdfast.core.json_parsing import JsonObject
from holdfast.elastic.protocol.generation_record import PreviousState
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.policy.recovery.survivors import HeldState

COMMANDS_PATH = "/orders"


@dataclass(frozen=True)
class Begin:
    """The command to take part in the spec's generation.

    came_from: by rank, the rank of `previous` that it was. None for all: every worker reads
    `spec.restore_key`. previous: the state that newcomers get from the survivors.
    """

    spec: WorkerSpec
    came_from: tuple[int | None, ...] | None = None
    previous: PreviousState | None = None

    @property
    def ended_generation(self) -> float:
        """Return the newest generation that has ended when this command is given."""
        return self.spec.generation - 1

    def to_json(self) -> JsonObject:
        return {
            "kind": "begin",
            "boot": self.spec.to_json(),
            "came_from": None if self.came_from is None else list(self.came_from),
            "before": None if self.previous is None else self.previous.to_json(),
        }


@dataclass(frozen=True)
class Halt:
    """The command to stop in this generation, and to hold.

    is_inside_replica: the rank has lost a member of its own replica, so waits there end too.
    """

    generation: int
    is_inside_replica: bool = True

    @property
    def ended_generation(self) -> float:
        return self.generation

    def to_json(self) -> JsonObject:
        return {"kind": "halt", "inside": self.is_inside_replica, "generation": self.generation}


@dataclass(frozen=True)
class End:
    """The command to exit: nothing is left to do."""

    @property
    def ended_generation(self) -> float:
        return inf

    def to_json(self) -> JsonObject:
        return {"kind": "end"}


Command = Begin | Halt | End


def command_from_json(value: Mapping[str, Any]) -> Command:
    """Parse a command.

    Raises KeyError, TypeError and ValueError if it is malformed, or of an unknown kind."""
    match value["kind"]:
        case "halt":
            return Halt(int(value["generation"]), bool(value.get("inside", True)))
        case "end":
            return End()
        case "begin":
            came_from, previous = value.get("came_from"), value.get("before")
            return Begin(
                WorkerSpec.from_json(value["boot"]),
                None if came_from is None else tuple(came_from),
                PreviousState.from_json(previous) if previous else None,
            )
        case kind:
            raise ValueError(f"orders of an unknown kind: {kind!r}")


@dataclass(frozen=True)
class CommandPoll:
    """A process asks for commands newer than number `seen`. held: the state with which it waits."""

    pid: int
    seen: int
    held: HeldState | None = None

    def to_json(self) -> JsonObject:
        held = None if self.held is None else self.held.to_json()
        return {"process": self.pid, "seen": self.seen, "held": held}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CommandPoll:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        held = value.get("held")
        return CommandPoll(
            int(value["process"]),
            int(value["seen"]),
            None if held is None else HeldState.from_json(held),
        )


@dataclass(frozen=True)
class CommandReply:
    """The answer to a poll. number: of the newest command; it is None if the process has it."""

    number: int
    command: Command | None = None

    def to_json(self) -> JsonObject:
        command = None if self.command is None else self.command.to_json()
        return {"number": self.number, "orders": command}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CommandReply:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        told = value["orders"]
        return CommandReply(int(value["number"]), None if told is None else command_from_json(told))
