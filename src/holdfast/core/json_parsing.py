"""JSON from outside: a file of a store, a body from a peer, a line from a socket.

For a text that nests too deep, `json.loads` raises RecursionError. Code that expects corrupt bytes
does not catch it. So one file of 100,000 brackets would end a run that could resume from an older
state. Here it is a ValueError, as for any other text that is not JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""The value of a JSON text."""
JsonObject: TypeAlias = dict[str, Json]
"""What the `to_json` of a message returns."""
ParsedJson: TypeAlias = Mapping[str, Any]
"""A JSON object that was received, which the `from_json` of a message checks."""


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text. Raises ValueError for what is none, or nests too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


Parsers: TypeAlias = Mapping[str, Callable[[Any], Any]]
"""By field, what makes its value of a JSON value."""


@dataclass(frozen=True)
class JsonMessage:
    """Base of a message whose fields, by name, are the keys of its JSON object."""

    absent_if_none: ClassVar[frozenset[str]] = frozenset()  # fields that do not travel when None
    parsers: ClassVar[Parsers] = {}  # for fields that are not as JSON has them

    def to_json(self) -> JsonObject:
        absent = self.absent_if_none
        fields = {k: v for k, v in vars(self).items() if v is not None or k not in absent}
        return {k: _to_json(v) if k in self.parsers else v for k, v in fields.items()}

    @classmethod
    def from_json(cls, value: ParsedJson) -> Self:
        """Parse the message; keys of a newer version are dropped. Raises KeyError, TypeError and
        ValueError if it is malformed."""
        fields = {k: v for k, v in value.items() if k in cls.__dataclass_fields__}
        for key in cls.parsers.keys() & fields.keys():
            if fields[key] is not None:
                fields[key] = cls.parsers[key](fields[key])
        return cls(**fields)


def tuple_of(parse: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return the parser of a list of such values."""
    return lambda rows: tuple(map(parse, rows))


def _to_json(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    return [_to_json(one) for one in value] if isinstance(value, tuple) else value
