"""Refusals of a cluster file: one sentence each, with its line and what would work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from holdfast.config.loading.explain import nearest_value, what_is_wrong
from holdfast.config.loading.fields import field_at, siblings
from holdfast.errors import ConfigError, use_one_of

Path = tuple[str | int, ...]
Where = Callable[[Path], str]


def refuse_all(error: ValidationError, model: type[BaseModel], where: Where) -> ConfigError:
    """One error for all refusals of the schema."""
    refusals = [_refusal(details, model, where) for details in error.errors()]
    return refusals[0] if len(refusals) == 1 else ConfigError("\n".join(map(str, refusals)))


def _refusal(details: ErrorDetails, model: type[BaseModel], where: Where) -> ConfigError:
    path: Path = tuple(details["loc"])
    key, place = ".".join(map(str, path)), where(path)
    info, kind = field_at(path, model), details["type"]
    if kind == "extra_forbidden":
        remedy = use_one_of(siblings(path, model), str(path[-1]), cutoff=0.5)
        return ConfigError(f"unknown key {key}", where=place, remedy=remedy)
    if kind == "literal_error" and info is not None:
        remedy = use_one_of(get_args(info.annotation), str(details["input"]))
    else:
        remedy = nearest_value(info, details["input"]) or f"write {_example(path, info)}"
    return ConfigError(f"{key or 'the file'} {what_is_wrong(details)}", where=place, remedy=remedy)


def _example(path: Path, info: FieldInfo | None) -> str:
    if path in ((), ("pools",)) or (path[0] == "pools" and len(path) == 2):
        return "'pools:', below it a name, and below that for example 'nodes: 8'"
    if info is not None and info.examples and isinstance(path[-1], str):
        return f"for example '{path[-1]}: {info.examples[0]}'"
    return f"a value after '{path[-1]}:', or remove the key"


def place_in(name: str, lines: Mapping[Path, int]) -> Where:
    """Tell the line of a key: its own, or that of the nearest key around it."""

    def where(path: Path) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in lines:
                return f"{name}:{lines[path[:length]]}"
        return name

    return where
