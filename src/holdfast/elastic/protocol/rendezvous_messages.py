"""The requests to the rendezvous of a generation's processes, a key-value store, and its answers.

Values are bytes, which travel as base64.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.json_parsing import JsonObject

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
class StoreRequest:
    """An operation on the store, with the arguments that it has.

    request_id: of an operation that must not happen twice; "": it may.
    """

    op: str
    key: str = ""
    value: bytes = b""
    amount: int = 0
    expected: bytes = b""
    desired: bytes = b""
    keys: tuple[str, ...] = ()
    timeout_s: float = 0.0
    request_id: str = ""

    def to_json(self) -> JsonObject:
        arguments: JsonObject = {
            "key": self.key,
            "value": _encode(self.value),
            "amount": self.amount,
            "expected": _encode(self.expected),
            "desired": _encode(self.desired),
            "keys": list(self.keys),
            "timeout": self.timeout_s,
        }
        named = {name: arguments[name] for name in _ARGUMENTS[self.op]}
        return {"op": self.op, **({"id": self.request_id} if self.request_id else {}), **named}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StoreRequest:
        """Parse the message.

        Raises KeyError, TypeError and ValueError if it is malformed, or of an unknown operation."""
        op = str(value["op"])
        if op not in _ARGUMENTS:
            raise ValueError(f"the rendezvous does not know the operation {op!r}")
        given = {name: value[name] for name in _ARGUMENTS[op]}
        return StoreRequest(
            op,
            str(given.get("key", "")),
            _decode(given.get("value", "")),
            int(given.get("amount", 0)),
            _decode(given.get("expected", "")),
            _decode(given.get("desired", "")),
            tuple(map(str, given.get("keys", ()))),
            float(given.get("timeout", 0.0)),
            str(value.get("id", "")),
        )


@dataclass(frozen=True)
class ValueReply:
    """The value of a key after an operation that changes one."""

    value: bytes

    def to_json(self) -> JsonObject:
        return {"value": _encode(self.value)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ValueReply:
        return ValueReply(_decode(value["value"]))


@dataclass(frozen=True)
class WaitReply:
    """The answer to a wait.

    is_ready: all keys are there. value: the first one's, which saves a round trip; None without
    keys. values: of all keys, if the request gathers; otherwise None.
    """

    is_ready: bool
    value: bytes | None = None
    values: tuple[bytes, ...] | None = None

    def to_json(self) -> JsonObject:
        if not self.is_ready:
            return {"ready": False}
        values = self.values
        return {
            "ready": True,
            "value": None if self.value is None else _encode(self.value),
            **({} if values is None else {"values": [_encode(one) for one in values]}),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> WaitReply:
        if not value["ready"]:
            return WaitReply(False)
        first, values = value["value"], value.get("values")
        return WaitReply(
            True,
            None if first is None else _decode(first),
            None if values is None else tuple(map(_decode, values)),
        )


@dataclass(frozen=True)
class CheckReply:
    """Whether all keys are there."""

    has_all: bool

    def to_json(self) -> JsonObject:
        return {"all": self.has_all}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CheckReply:
        return CheckReply(bool(value["all"]))


@dataclass(frozen=True)
class DeleteReply:
    """Whether the deleted key was there."""

    was_there: bool

    def to_json(self) -> JsonObject:
        return {"deleted": self.was_there}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DeleteReply:
        return DeleteReply(bool(value["deleted"]))


@dataclass(frozen=True)
class CountReply:
    """The number of keys."""

    key_count: int

    def to_json(self) -> JsonObject:
        return {"number": self.key_count}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CountReply:
        return CountReply(int(value["number"]))


@dataclass(frozen=True)
class KeysReply:
    """All keys, in order."""

    keys: tuple[str, ...]

    def to_json(self) -> JsonObject:
        return {"keys": list(self.keys)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> KeysReply:
        return KeysReply(tuple(map(str, value["keys"])))


StoreReply = ValueReply | WaitReply | CheckReply | DeleteReply | CountReply | KeysReply


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
