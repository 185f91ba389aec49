"""The run file's keys, found by walking the sections.

A dotted key names a field (`train.steps`, `data.sources.0.path`); `*` stands for any index in
the list of all keys (`data.sources.*.path`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from holdfast.config.run import RunConfig
from holdfast.config.sections.base import Change

ITEM = "*"


def as_path(key: str) -> tuple[str | int, ...]:
    """A dotted key in parts; a part of ASCII digits is an index."""
    return tuple(int(p) if is_index(p) else p for p in key.split("."))


def is_index(part: str) -> bool:
    return part.isascii() and part.isdigit()


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, directly, as `X | None` or as the items of a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = section_of(inner)
        if found is not None:
            return found
    return None


def is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple


def allows(annotation: Any, kind: type) -> bool:
    """Return True if a value of `kind` itself is among the annotation's alternatives."""
    if get_origin(annotation) in (Union, UnionType):
        return any(allows(inner, kind) for inner in get_args(annotation))
    return annotation is kind


def field_at(path: Sequence[str | int], root: type[BaseModel] = RunConfig) -> FieldInfo | None:
    """The field a path names, or None where there is none (list indices are stepped over)."""
    section: type[BaseModel] | None = root
    info: FieldInfo | None = None
    is_name = False  # the next part is a name that the user chose
    for part in path:
        if is_name or isinstance(part, int) or part == ITEM or is_index(part):
            is_name = False
            continue
        info = section.model_fields.get(part) if section is not None else None
        if info is None:
            return None
        section = section_of(info.annotation)
        is_name = get_origin(info.annotation) is dict
        if is_name and section is None:
            return info
    return info


@lru_cache(4096)
def adapter_of(key: str) -> TypeAdapter[Any]:
    """Return what checks and converts a value of one key by itself."""
    info = field_at(key.split("."))
    assert info is not None, key
    kind: Any = info.annotation
    if info.metadata:
        kind = Annotated[kind, *info.metadata]
    return TypeAdapter(kind)


def value_at(holder: Any, path: Sequence[str | int]) -> Any:
    """Return the value at a path of a section."""
    for part in path:
        holder = getattr(holder, part) if isinstance(part, str) else holder[part]
    return holder


def with_value(holder: Any, path: Sequence[str | int], value: Any) -> Any:
    """Return a section, a list or a dict with another value at the end of a path. Nothing is
    checked."""
    first, *rest = path
    if isinstance(holder, BaseModel):
        name = str(first)
        inner = with_value(getattr(holder, name), rest, value) if rest else value
        return holder.model_copy(update={name: inner})
    if isinstance(holder, dict):
        return {**holder, first: with_value(holder[first], rest, value) if rest else value}
    items = list(holder)
    index = int(first)
    items[index] = with_value(items[index], rest, value) if rest else value
    return tuple(items)


def siblings(path: Sequence[str | int], root: type[BaseModel] = RunConfig) -> list[str]:
    """Names of all keys of the section that `path` lies in."""
    parent = [p for p in path[:-1] if not isinstance(p, int) and not is_index(p)]
    if not parent:
        return list(root.model_fields)
    holder = field_at(parent, root)
    section = section_of(holder.annotation) if holder is not None else None
    read_before = ["from"] if parent in (["model"], ["lora"]) else []  # of a folder, see model_from
    return read_before + list(section.model_fields) if section is not None else []


def all_keys(
    section: type[BaseModel] = RunConfig, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[str, FieldInfo]]:
    """Every key that holds a value (not a section), in the order of declaration."""
    for name, info in section.model_fields.items():
        inner = section_of(info.annotation)
        if inner is None:
            yield ".".join((*prefix, name)), info
        else:
            step = (name, ITEM) if is_list(info.annotation) else (name,)
            yield from all_keys(inner, (*prefix, *step))


def leaves(value: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a dumped configuration; lists of sections are walked by index, a
    list of plain values is one value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*prefix, key))
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*prefix, str(index)))
    else:
        yield ".".join(prefix), value


@lru_cache(4096)
def change_of(key: str) -> Change | None:
    """Return what a change of a key does to a run that has begun; None for an unknown key.

    A key without a class of its own has that of the innermost section around it with one."""
    path = key.split(".")
    if field_at(path) is None:
        return None
    for length in range(len(path), 0, -1):
        info = field_at(path[:length])
        for declared in info.metadata if info is not None else ():
            if isinstance(declared, Change):
                return declared
    return None
