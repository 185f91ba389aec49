"""Follows the remedy of a message about a run file, literally and without any other knowledge.

A remedy that this program cannot follow is no remedy, except for what only a person knows: the path
of a file, or a name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from holdfast.config.loading.fields import as_path, field_at, is_list
from holdfast.config.loading.yaml_tree import parse_scalar, parse_value, parse_yaml

Tree = dict[str, Any]
Path = tuple[str | int, ...]
A_PATH = "texts"  # what a person would name where a path is asked for


class NoRemedyError(Exception):
    """The message does not say what to do."""


def follow(text: str, sentence: str) -> str:
    """Return the run file's text after the remedy of one sentence was carried out."""
    where, _, rest = sentence.partition(": ")
    what, semicolon, remedy = rest.rpartition("; ")
    if not semicolon:
        raise NoRemedyError(sentence)
    for pattern, change_text in _TEXT_RULES:
        if re.search(pattern, remedy):
            return change_text(text, int(where.rpartition(":")[2]))
    tree = parse_yaml(text, "run.yaml").value
    for pattern, change in _RULES:
        if found := re.search(pattern, remedy):
            change(tree, _key_of(what), found)
            return to_yaml(tree)
    raise NoRemedyError(sentence)


def to_yaml(value: Any, indent: str = "") -> str:
    """Write a tree in block style; each scalar so that it is read back as it is."""
    if isinstance(value, dict) and value:
        return "".join(
            f"{indent}{json.dumps(key)}:{_below(inner, indent)}" for key, inner in value.items()
        )
    if isinstance(value, list) and value:
        return "".join(f"{indent}-{_below(inner, indent)}" for inner in value)
    return f"{indent}{_scalar(value)}\n"


def _below(value: Any, indent: str) -> str:
    if isinstance(value, dict | list) and value:
        return "\n" + to_yaml(value, indent + "  ")
    return f" {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
        return repr(value)
    return json.dumps(value)


# --- remedies about the text ----------------------------------------------------------------------
def _remove_line(text: str, line: int) -> str:
    lines = text.splitlines()
    del lines[line - 1]
    return "\n".join(lines) + "\n"


def _remove_block(text: str, line: int) -> str:
    """Remove a key's line with all that belongs to it."""
    lines = text.splitlines()
    key = lines[line - 1]
    own = len(key) - len(key.lstrip(" -"))
    end = line
    while end < len(lines):
        content = lines[end].lstrip(" ")
        depth = len(lines[end]) - len(content)
        is_item = content.startswith("-") and not key.lstrip().startswith("-")
        if not (depth > own or (is_item and depth == own)):
            break
        end += 1
    del lines[line - 1 : end]
    return "\n".join(lines) + "\n"


def _write_out(text: str, _: int) -> str:
    return to_yaml(yaml.safe_load(text))  # that reader follows aliases


def _write_example(text: str, _: int) -> str:
    return "train:\n  steps: 1000\n"


def _outdent(text: str, line: int) -> str:
    lines = text.splitlines()
    lines[line - 1] = lines[line - 1].lstrip()
    return "\n".join(lines) + "\n"


_TEXT_RULES: list[tuple[str, Callable[[str, int], str]]] = [
    (r"^keep one$", _remove_block),
    (r"^remove the line", _remove_line),
    (r"^begin it at the start of the line$", _outdent),
    (r"^write the value out, or put it in quotes if it is text$", _write_out),
    (r"^write for example 'train:' and, indented below it, 'steps: 1000'$", _write_example),
    (r"^write 'key: value' with a space after the colon, and indent by two spaces$", _remove_line),
]


# --- remedies about a key -------------------------------------------------------------------------
def _key_of(what: str) -> Path:
    """Return the key that a sentence is about: its first word that names one."""
    what = what.removeprefix("unknown key ")
    return as_path(what.split(" ")[0].rstrip(":"))


def _holder(tree: Tree, path: Path) -> Any:
    holder: Any = tree
    for depth, part in enumerate(path[:-1]):
        if isinstance(holder, dict) and holder.get(str(part)) is None:
            field = field_at(path[: depth + 1])
            holder[str(part)] = [{}] if field is not None and is_list(field.annotation) else {}
        holder = holder[part]
    return holder


def _set(tree: Tree, path: Path, value: Any) -> None:
    holder, last = _holder(tree, path), path[-1]
    if isinstance(holder, list) and last == len(holder):
        holder.append(value)
    else:
        holder[last] = value


def _remove(tree: Tree, path: Path, _: re.Match[str]) -> None:
    del _holder(tree, path)[path[-1]]


def _move(tree: Tree, path: Path, found: re.Match[str]) -> None:
    """Give an unknown key the name that is meant. If that key is there too, one is enough."""
    meant = as_path(found["value"])
    if field_at(path) is not None:  # no unknown key: the value is wrong
        _set(tree, path, parse_scalar(found["value"]))
        return
    value = _holder(tree, path).pop(path[-1])
    holder = _holder(tree, meant)
    holder.setdefault(meant[-1], value)


def _move_below(tree: Tree, path: Path, found: re.Match[str]) -> None:
    value = _holder(tree, path).pop(path[-1])
    _set(tree, (*path[:-1], *as_path(str(path[-1]))), value)


def _use(tree: Tree, path: Path, found: re.Match[str]) -> None:
    """Set the key itself, or the other key that the remedy names before the value."""
    target = path
    if name := found["name"]:
        named = as_path(name)
        places = ((*path, *named), (*path[:-1], *named), named)  # in the section, next to it
        target = next((place for place in places if field_at(place) is not None), named)
    _set(tree, target, parse_value(found["value"], "remedy"))


def _use_text(tree: Tree, path: Path, found: re.Match[str]) -> None:
    _set(tree, path, found["value"])


def _name_path(tree: Tree, path: Path, _: re.Match[str]) -> None:
    _set(tree, path, A_PATH)


def _empty_section(tree: Tree, path: Path, _: re.Match[str]) -> None:
    _set(tree, path, {})


_VALUE = r"(?P<value>\[[^\]]*\]|'[^']*'|[^\s,;?]+)"
_RULES: list[tuple[str, Callable[[Tree, Path, re.Match[str]], None]]] = [
    (rf"^did you mean {_VALUE}\?$", _move),
    (r"^write '[^']*:' indented below '[^']*:'$", _move_below),
    (r"^(\S+|a run file) has [a-z_]+(, |$)", _remove),
    (r"^remove it", _remove),
    (r"^remove the stage", lambda tree, path, found: _remove(tree, path[:-1], found)),
    (
        rf"^{_VALUE} would work$",
        lambda tree, path, found: _set(tree, path, parse_value(found["value"], "remedy")),
    ),
    (r"^use a (file, folder or glob|data set's name)$", _name_path),
    (r"^name a file or a folder$", _name_path),
    (r"^write the path in full", _name_path),
    (r"^write (?P<value>/.*)$", _use_text),
    (r"^use a shorter one$", _name_path),
    (rf"^use a shorter one, such as {_VALUE}$", _use_text),
    (r"^write a word, in quotes if it has other characters than letters$", _name_path),
    (
        r"^use one of \[(?P<name>)(?P<value>[^,\]]+)",
        lambda tree, path, found: _set(tree, path, parse_scalar(found["value"])),
    ),
    (rf"^(use|give it, for example) (?:(?P<name>[a-z_.0-9]*[a-z_]) )?{_VALUE}", _use),
    (r"^put it in quotes: '(?P<value>.*)'$", _use_text),
    (r"^write its keys indented below it$", _empty_section),
    (r"^(name at least one|write its items below it, each after '- '), or remove", _remove),
    (rf"^nearest: {_VALUE}$", _use_text),
]
