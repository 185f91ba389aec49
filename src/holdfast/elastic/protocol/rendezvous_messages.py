"""The requests to the rendezvous of a generation's processes, a key-value store, and its answers.

Values are bytes, which travel as base64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from holdfast.core.json_parsing import JsonMessage, JsonObject, Key, ParsedJson

RENDEZVOUS_PATH = "/store"

_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "set": ("key", "value"),
    "append": ("key", "value"),
    "add": ("key", "amount"),
    "compare_set": ("key", "expected", "desired"),
    "delete": ("key",),
    "wait": ("keys", "timeout"),
    "gather": ("key", "value", "keys", "timeout"),
    "check": ("keys",),
    "num_keys": (),
    "list": (),
}
"""By operation, the keys of its request."""


@dataclass(frozen=True)
class StoreRequest(JsonMessage):
    """An operation on the store. Only the arguments that it has travel.

    request_id: of an operation that must not happen twice; "": it may.
    """

    op: str
    key: str = ""
    value: bytes = b""
    amount: int = 0
    expected: bytes = b""
    desired: bytes = b""
    keys: tuple[str, ...] = ()
    timeout_s: Annotated[float, Key("timeout")] = 0.0
    request_id: Annotated[str, Key("id")] = ""

    def to_json(self) -> JsonObject:
        request = super().to_json()
        request_id = ("id",) if self.request_id else ()
        return {key: request[key] for key in ("op", *request_id, *_ARGUMENTS[self.op])}

    @classmethod
    def from_json(cls, value: ParsedJson) -> Self:
        """Parse the message.

        Raises KeyError, TypeError and ValueError if it is malformed, or of an unknown operation."""
        if value["op"] not in _ARGUMENTS:
            raise ValueError(f"the rendezvous does not know the operation {value['op']!r}")
        keys = ("op", "id", *_ARGUMENTS[value["op"]])
        return super().from_json({key: value[key] for key in keys if key != "id" or key in value})


@dataclass(frozen=True)
class ValueReply(JsonMessage):
    """The value of a key after an operation that changes one."""

    value: bytes


@dataclass(frozen=True)
class WaitReply(JsonMessage):
    """The answer to a wait.

    is_ready: all keys are there; if not, nothing else travels. value: the first one's, which saves
    a round trip; None without keys. values: of all keys, if the request gathers; otherwise None.
    """

    absent_if_default = frozenset({"values"})
    is_ready: Annotated[bool, Key("ready")]
    value: bytes | None = None
    values: tuple[bytes, ...] | None = None

    def to_json(self) -> JsonObject:
        return super().to_json() if self.is_ready else {"ready": False}


@dataclass(frozen=True)
class CheckReply(JsonMessage):
    """Whether all keys are there."""

    has_all: Annotated[bool, Key("all")]


@dataclass(frozen=True)
class DeleteReply(JsonMessage):
    """Whether the deleted key was there."""

    was_there: Annotated[bool, Key("deleted")]


@dataclass(frozen=True)
class CountReply(JsonMessage):
    """The number of keys."""

    key_count: Annotated[int, Key("number")]


@dataclass(frozen=True)
class KeysReply(JsonMessage):
    """All keys, in order."""

    keys: tuple[str, ...]


StoreReply = ValueReply | WaitReply | CheckReply | DeleteReply | CountReply | KeysReply
