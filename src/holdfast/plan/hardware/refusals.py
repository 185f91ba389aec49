"""Refusals of a cluster file: one sentence each, with its line and what would work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from holdfast.config.loading.explain import format_value, nearest_value
from holdfast.errors import ConfigError

Path = tuple[str | int, ...]
Where = Callable[[Path], str]

_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "tuple": "a list",
    "dict": "a section of keys",
    "model": "a section of keys",
}


def refuse_all(error: ValidationError, model: type[BaseModel], where: Where) -> ConfigError:
    """One error for all refusals of the schema."""
    found = [_refusal(each, model, where) for each in error.errors()]
    return found[0] if len(found) == 1 else ConfigError("\n".join(str(each) for each in found))


def _refusal(details: ErrorDetails, model: type[BaseModel], where: Where) -> ConfigError:
    path: Path = tuple(details["loc"])
    key, place = ".".join(map(str, path)), where(path)
    holder, info = _field_at(model, path)
    kind, value = details["type"], details["input"]
    example = _example(path, info)
    if kind == "extra_forbidden":
        known = list(holder.model_fields) if holder else []
        near = get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
        return ConfigError(
            f"unknown key {key}",
            where=place,
            remedy=f"use {near[0]}" if near else f"use one of {', '.join(known)}",
        )
    if kind == "missing":
        return ConfigError(f"{key} is missing", where=place, remedy=f"write {example}")
    if kind in _BOUNDS:
        rule, words = _BOUNDS[kind]
        limit = details.get("ctx", {})[rule]
        return ConfigError(
            f"{key} is {format_value(value)}, but must be {words} {limit:g}",
            where=place,
            remedy=nearest_value(info, value) or f"write {example}",
        )
    if kind == "literal_error" and info is not None:
        return ConfigError(
            f"{key} is {format_value(value)}",
            where=place,
            remedy=f"use {' or '.join(get_args(info.annotation))}",
        )
    wanted = _KINDS.get(kind.split("_")[0], "what this key takes")
    if kind in ("too_short", "too_long"):
        wanted = "a section with a pool" if key == "pools" else "a list of two names"
    return ConfigError(
        f"{key or 'the file'} is {format_value(value)}, not {wanted}",
        where=place,
        remedy=f"write {example}",
    )


def _field_at(
    model: type[BaseModel], path: Path
) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """The section that has the last key of the path, and that key's field."""
    holder: type[BaseModel] | None = model
    info: FieldInfo | None = None
    for part in path:
        if isinstance(part, int) or (info is not None and _is_mapping(info)):
            holder = _section_of(info.annotation) if info is not None else None
            info = None
            continue
        if info is not None:
            holder = _section_of(info.annotation)
        info = holder.model_fields.get(part) if holder is not None else None
        if info is None:
            break
    return holder, info


def _is_mapping(info: FieldInfo) -> bool:
    return "dict" in str(info.annotation)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation: of a mapping, a tuple, or an optional one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        if (found := _section_of(inner)) is not None:
            return found
    return None


def _example(path: Path, info: FieldInfo | None) -> str:
    if path in ((), ("pools",)) or (path[0] == "pools" and len(path) == 2):
        return "'pools:', below it a name, and below that for example 'nodes: 8'"
    if info is not None and info.examples:
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
