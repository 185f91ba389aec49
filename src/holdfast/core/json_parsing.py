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
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

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


class _Codec(NamedTuple):
    """How the values of a type travel."""

    parse: Callable[[Any], Any]
    write: Callable[[Any], Any]


class _JsonField(NamedTuple):
    """How a field travels."""

    name: str
    key: str
    parse: Callable[[Any], Any]
    write: Callable[[Any], Any]
    default: Any
    absent: Any  # the value that does not travel, if any
    merged_keys: Set[str]  # of the message that is merged


@dataclass(frozen=True)
class _Parsed:
    """Base of what travels field by field."""

    absent_if_default: ClassVar[Set[str]] = frozenset()  # fields that travel only if they differ
    empty_if_none: ClassVar[Set[str]] = frozenset()  # fields whose None travels as {}
    required: ClassVar[Set[str]] = frozenset()  # fields with a default that must travel
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
            name, kind, key = field.name, types[field.name], field.name
            if get_origin(kind) is Annotated:
                kind, key = get_args(kind)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            absent = default if name in cls.absent_if_default else MISSING
            merged_keys = frozenset[str]()
            if name in cls.merged:
                merged_keys = frozenset(each.key for each in get_args(kind)[0].json_fields())
            codec = _codec_of(kind, {} if name in cls.empty_if_none else None)
            rows.append(_JsonField(name, key, *codec, default, absent, merged_keys))
        return tuple(rows)


@dataclass(frozen=True)
class JsonMessage(_Parsed):
    """Base of a message. Its fields travel in a JSON object, under their names or a `Key`.

    The type of a field says how its value travels: numbers, text, enums, classes with `to_json` and
    `from_json`, and tuples, lists and mappings of these. Bytes travel as base64. A value of any
    other type travels as it is. In a union, the tags tell the messages apart.
    """

    tag: ClassVar[Mapping[str, str]] = {}  # a key that tells messages apart, and its value

    def to_json(self) -> JsonObject:
        message: JsonObject = dict(self.tag)
        values = vars(self)
        for name, key, _, write, _, absent, merged_keys in self.json_fields():
            value = values[name]
            if merged_keys:
                message |= write(value) or {}
            elif absent is MISSING or value != absent:
                message[key] = write(value)
        return message

    @classmethod
    def from_json(cls, value: ParsedJson) -> Self:
        """Parse the message; keys of a newer version are dropped. Raises KeyError, TypeError and
        ValueError if it is malformed."""
        values = {}
        for name, key, parse, _, default, _, merged_keys in cls.json_fields():
            if merged_keys:
                values[name] = None if merged_keys.isdisjoint(value) else parse(value)
            elif key in value:
                values[name] = parse(value[key])
            elif default is MISSING or name in cls.required:
                raise KeyError(key)
        return cls(**values)


@dataclass(frozen=True)
class JsonRow(_Parsed):
    """Base of a message whose fields travel as a list, in their order. Only the last field may be
    absent."""

    def to_json(self) -> list[Json]:
        values = [(field, getattr(self, field.name)) for field in self.json_fields()]
        return [
            field.write(value)
            for field, value in values
            if field.absent is MISSING or value != field.absent
        ]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Self:
        """Parse a row. Raises TypeError and ValueError if it is malformed."""
        fields = cls.json_fields()
        if len(row) > len(fields):
            raise ValueError(f"{len(row)} values in a row of {len(fields)}")
        # the last field may be absent
        return cls(*(field.parse(value) for field, value in zip(fields, row, strict=False)))


Tagged = TypeVar("Tagged", bound=JsonMessage, covariant=True)


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


def _codec_of(kind: Any, none: Any = None) -> _Codec:
    """Return the codec of a type. none: how None travels, where the type allows it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [each for each in arguments if each is not NoneType]
        if not all(hasattr(kind, "from_json") for kind in kinds):
            if len(kinds) > 1:
                return _Codec(_as_it_is, _as_it_is)
            parse, write = _codec_of(kinds[0])
            return _Codec(
                lambda value: None if value is None else parse(value),
                lambda value: none if value is None else write(value),
            )
        parse_message = tagged_parser(*kinds) if len(kinds) > 1 else kinds[0].from_json
        return _Codec(
            lambda value: parse_message(value) if value else None,
            lambda value: none if value is None else value.to_json(),
        )
    codecs = [_codec_of(each) for each in arguments if each is not Ellipsis]
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _Codec(
            lambda row: tuple(c.parse(value) for c, value in zip(codecs, row, strict=True)),
            lambda row: [codec.write(value) for codec, value in zip(codecs, row, strict=True)],
        )
    if origin in (tuple, list):
        parse, write = codecs[0]
        return _Codec(lambda rows: origin(map(parse, rows)), lambda rows: list(map(write, rows)))
    if origin in (dict, Mapping):
        of_key, of_item = codecs
        return _Codec(
            lambda items: {of_key.parse(k): of_item.parse(v) for k, v in dict(items).items()},
            lambda items: {k: of_item.write(v) for k, v in items.items()},
        )
    if hasattr(kind, "from_json"):
        return _Codec(kind.from_json, lambda value: value.to_json())
    if kind is bytes:
        return _Codec(lambda text: b64decode(text, validate=True), lambda v: b64encode(v).decode())
    if isclass(kind) and issubclass(kind, Enum):
        return _Codec(kind, lambda value: value.value)
    return _Codec(kind if kind in (bool, int, float, str) else _as_it_is, _as_it_is)


def _as_it_is(value: Any) -> Any:
    return value
