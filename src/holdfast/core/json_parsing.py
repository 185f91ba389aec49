"""JSON from outside: a file of a store, a body from a peer, a line from a socket.

For a text that nests too deep, `json.loads` raises RecursionError. Code that expects corrupt bytes
does not catch it. So one file of 100,000 brackets would end a run that could resume from an older
state. Here it is a ValueError, as for any other text that is not JSON.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from inspect import get_annotations, isclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, TypeAlias, TypeVar, Union, get_args, get_origin

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


class Key(str):
    """In `Annotated` of a field: its key in the JSON object, where that is not its name."""


@dataclass(frozen=True)
class _JsonField:
    name: str
    key: str
    parse: Callable[[Any], Any]
    is_plain: bool  # its value is as JSON has it
    merged_keys: Set[str]  # of the message that is merged
    default: Any


@dataclass(frozen=True)
class _Parsed:
    """Base of what travels field by field."""

    absent_if_default: ClassVar[Set[str]] = frozenset()  # fields that travel only if they differ
    merged: ClassVar[Set[str]] = frozenset()  # fields whose keys stand in the message's own object

    @classmethod
    @cache
    def json_fields(cls) -> tuple[_JsonField, ...]:
        """Return how each field travels."""
        types: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            types |= get_annotations(base, eval_str=True)
        rows = []
        for field in fields(cls):
            kind, key = types[field.name], field.name
            if get_origin(kind) is Annotated:
                kind, key = get_args(kind)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            parse, merged_keys = _parser_of(kind), frozenset[str]()
            if field.name in cls.merged:
                merged_keys = frozenset(each.key for each in get_args(kind)[0].json_fields())
            is_plain = parse in (bool, int, float, str)
            rows.append(_JsonField(field.name, key, parse, is_plain, merged_keys, default))
        return tuple(rows)


@dataclass(frozen=True)
class JsonMessage(_Parsed):
    """Base of a message. Its fields travel in a JSON object, under their names or a `Key`.

    The type of a field says how its value is parsed: numbers, text, enums, classes with a
    `from_json`, and tuples, lists and mappings of these. Bytes travel as base64. A value of any
    other type is taken as JSON has it.
    """

    tag: ClassVar[Mapping[str, str]] = {}  # a key that tells messages apart, and its value
    empty_if_none: ClassVar[Set[str]] = frozenset()  # fields whose None travels as {}

    def to_json(self) -> JsonObject:
        message: JsonObject = dict(self.tag)
        for field in self.json_fields():
            value = getattr(self, field.name)
            if field.merged_keys:
                message |= {} if value is None else value.to_json()
            elif value is None and field.name in self.empty_if_none:
                message[field.key] = {}
            elif field.name not in self.absent_if_default or value != field.default:
                message[field.key] = value if field.is_plain else _to_json(value)
        return message

    @classmethod
    def from_json(cls, value: ParsedJson) -> Self:
        """Parse the message; keys of a newer version are dropped. Raises KeyError, TypeError and
        ValueError if it is malformed."""
        values = {}
        for field in cls.json_fields():
            if field.merged_keys:
                is_there = not field.merged_keys.isdisjoint(value)
                values[field.name] = field.parse(value) if is_there else None
            elif field.key in value:
                values[field.name] = field.parse(value[field.key])
            elif field.default is MISSING:
                raise KeyError(field.key)
        return cls(**values)


Tagged = TypeVar("Tagged", bound=JsonMessage, covariant=True)


@dataclass(frozen=True)
class JsonRow(_Parsed):
    """Base of a message whose fields travel as a list, in their order. Only the last field may be
    absent."""

    def to_json(self) -> list[Json]:
        values = [(field, getattr(self, field.name)) for field in self.json_fields()]
        return [
            _to_json(value)
            for field, value in values
            if field.name not in self.absent_if_default or value != field.default
        ]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Self:
        """Parse a row. Raises TypeError and ValueError if it is malformed."""
        fields = cls.json_fields()
        if len(row) > len(fields):
            raise ValueError(f"{len(row)} values in a row of {len(fields)}")
        pairs = zip(fields, row, strict=False)  # the last field may be absent
        return cls(**{field.name: field.parse(value) for field, value in pairs})


def _parser_of(kind: Any) -> Callable[[Any], Any]:
    """Return the parser of the values of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _optional_parser([each for each in arguments if each is not NoneType])
    if origin is tuple and arguments[-1] is not Ellipsis:
        parsers = [_parser_of(each) for each in arguments]
        return lambda row: tuple(p(value) for p, value in zip(parsers, row, strict=True))
    if origin in (tuple, list):
        parse = _parser_of(arguments[0])
        return lambda rows: origin(map(parse, rows))
    if origin in (dict, Mapping):
        of_key, of_item = map(_parser_of, arguments)
        return lambda items: {of_key(k): of_item(v) for k, v in dict(items).items()}
    if kind is bytes:
        return lambda text: b64decode(text, validate=True)
    if hasattr(kind, "from_json"):
        parser: Callable[[Any], Any] = kind.from_json
        return parser
    is_called = kind in (bool, int, float, str) or (isclass(kind) and issubclass(kind, Enum))
    return kind if is_called else _as_it_is


def _optional_parser(kinds: list[Any]) -> Callable[[Any], Any]:
    is_message = all(hasattr(kind, "from_json") for kind in kinds)
    if len(kinds) > 1 and not is_message:
        return _as_it_is
    parse = _parser_of(kinds[0]) if len(kinds) == 1 else tagged_parser(*kinds)
    return lambda value: None if value is None or (is_message and not value) else parse(value)


def tagged_parser(*kinds: type[Tagged]) -> Callable[[ParsedJson], Tagged]:
    """Return the parser of several messages, which their tags tell apart. It raises ValueError for
    a tag that none of them has."""
    (key,) = {key for kind in kinds for key in kind.tag}
    by_tag = {kind.tag[key]: kind for kind in kinds}

    def parse(value: ParsedJson) -> Tagged:
        if value[key] not in by_tag:
            raise ValueError(f"a message of an unknown kind: {key} {value[key]!r}")
        return by_tag[value[key]].from_json(value)

    return parse


def _as_it_is(value: Any) -> Any:
    return value


def _to_json(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return value.value if isinstance(value, Enum) else value
