"""The commands of an agent to its processes, and the polls that fetch them.

A process asks for commands that are newer than those it has taken. The answer comes as soon as
there is one. Commands are numbered, and only the newest counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, ClassVar

from holdfast.core.json_parsing import JsonMessage, Key
from holdfast.elastic.protocol.generation_record import PreviousState
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.policy.recovery.survivors import HeldState

COMMANDS_PATH = "/orders"


@dataclass(frozen=True)
class Begin(JsonMessage):
    """The command to take part in the spec's generation.

    came_from: by rank, the rank of `previous` that it was. None for all: every worker reads
    `spec.restore_key`. previous: the state that newcomers get from the survivors.
    """

    tag: ClassVar[Mapping[str, str]] = {"kind": "begin"}
    spec: Annotated[WorkerSpec, Key("boot")]
    came_from: tuple[int | None, ...] | None = None
    previous: Annotated[PreviousState | None, Key("before")] = None

    @property
    def ended_generation(self) -> float:
        """Return the newest generation that has ended when this command is given."""
        return self.spec.generation - 1


@dataclass(frozen=True)
class Halt(JsonMessage):
    """The command to stop in this generation, and to hold.

    is_inside_replica: the rank has lost a member of its own replica, so waits there end too.
    """

    tag: ClassVar[Mapping[str, str]] = {"kind": "halt"}
    generation: int
    is_inside_replica: Annotated[bool, Key("inside")] = True

    @property
    def ended_generation(self) -> float:
        return self.generation


@dataclass(frozen=True)
class End(JsonMessage):
    """The command to exit: nothing is left to do."""

    tag: ClassVar[Mapping[str, str]] = {"kind": "end"}

    @property
    def ended_generation(self) -> float:
        return inf


Command = Begin | Halt | End


@dataclass(frozen=True)
class CommandPoll(JsonMessage):
    """A process asks for commands newer than number `seen`. held: the state with which it waits."""

    pid: Annotated[int, Key("process")]
    seen: int
    held: HeldState | None = None


@dataclass(frozen=True)
class CommandReply(JsonMessage):
    """The answer to a poll. number: of the newest command; it is None if the process has it."""

    number: int
    command: Annotated[Command | None, Key("orders")] = None
