"""YAML text -> plain values plus the line of every key.

Two choices make a run file mean what it seems to mean. First, scalars follow YAML 1.2's core
schema (section 10.3.2), so `3e-3` is a number, `010` is ten and `no` is a word. (PyYAML's own
rules are those of YAML 1.1.) Second, some features have no use in a run file but can surprise:
anchors, merge keys, custom tags, a key written twice. They are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from holdfast.errors import ConfigError

Path = tuple[str | int, ...]

_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_HEX = re.compile(r"^0x[0-9a-fA-F]+$")
_FLOAT = re.compile(
    r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
"""What YAML's reader refuses: C0, DEL, C1, surrogates and the two non-characters."""


class _Composer(yaml.SafeLoader):
    """Composes nodes only; values are made by `scalar`, so no tag can construct anything."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            raise yaml.composer.ComposerError(None, None, "alias", event.start_mark)
        return super().compose_node(parent, index)


_Composer.yaml_implicit_resolvers = {}


@dataclass(frozen=True)
class YamlTree:
    """Plain values (dict, list, str, int, float, bool, None); `lines[path]` counts from 1."""

    value: dict[str, Any]
    lines: dict[Path, int] = field(default_factory=dict)


def parse_scalar(text: str) -> str | int | float | bool | None:
    """A plain (unquoted) scalar's value by the core schema."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _HEX.match(text):
        return int(text, 16)
    if _FLOAT.match(text):
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower().replace("_", "")))
    return text


def parse_yaml(text: str, name: str) -> YamlTree:
    """The run file's text as a tree. Raises ConfigError naming `name` and the line."""
    node = _compose(text, name)
    if node is None:
        raise ConfigError(
            "the run file is empty", where=name, remedy="start from one made by 'holdfast init'"
        )
    if not isinstance(node, MappingNode):
        raise ConfigError(
            "a run file is made of sections and keys, and this is not",
            where=f"{name}:{_line(node)}",
            remedy="write for example 'train:' and, indented below it, 'steps: 1000'",
        )
    lines: dict[Path, int] = {}
    value = _build(node, (), name, lines)
    return YamlTree(value, lines)


def parse_file(text: str, name: str) -> tuple[Any, dict[Path, int]]:
    """Value and lines of another file than a run file, by the same rules. An empty one is None."""
    lines: dict[Path, int] = {}
    try:
        node = _compose(text, name)
        return (None if node is None else _build(node, (), name, lines)), lines
    except ConfigError as error:
        what = error.message.replace("a run file", "this file")
        raise ConfigError(what, where=error.where, remedy=error.remedy) from None


def parse_value(text: str, where: str) -> Any:
    """One value as the command line gives it: a scalar, or a list or mapping in flow style."""
    node = _compose(text, where)
    return None if node is None else _build(node, (), where, {})


@lru_cache(4096)
def is_plain(text: str) -> bool:
    """Return True if `parse_value` reads this text, written without quotes, as itself."""
    try:
        return bool(parse_value(text, "") == text)
    except ConfigError:
        return False


def dump(values: Any) -> str:
    """Return YAML text that `parse_yaml` reads as these values. PyYAML writes the text `1e-4`
    without quotes, and a run file reads that as a number."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts that look like other values in quotes."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> Node:
    style = None if is_plain(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _compose(text: str, name: str) -> Node | None:
    _refuse_control_characters(text, name)
    loader = _Composer(text)
    try:
        node: Node | None = loader.get_single_node()
        return node
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, name) from None
    except RecursionError:
        raise ConfigError("nested too deeply", where=name, remedy="write it flatter") from None
    finally:
        loader.dispose()


def _refuse_control_characters(text: str, name: str) -> None:
    """Control characters mean that this is no text: say where, before YAML says it worse."""
    if found := _CONTROL.search(text):
        raise ConfigError(
            f"the character {found[0]!r} does not belong in a text file",
            where=f"{name}:{text.count(chr(10), 0, found.start()) + 1}",
            remedy="give a YAML file as 'holdfast init' writes it",
        )


def _syntax_error(error: yaml.MarkedYAMLError, text: str, name: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    where = f"{name}:{line}"
    lines = text.split("\n")
    if found := _misplaced_beginning(lines, name):
        return found
    content = lines[line - 1] if line <= len(lines) else ""
    if "\t" in content[: len(content) - len(content.lstrip())] or "\\t" in (error.problem or ""):
        return ConfigError("a tab cannot indent YAML", where=where, remedy="use spaces")
    if "single document" in (error.context or ""):
        return ConfigError(
            "a run file is one YAML document", where=where, remedy="remove the '---' line"
        )
    scanned = f"{error.context} {error.problem}"
    if "alias" in scanned or "anchor" in scanned:
        return ConfigError(
            "anchors (&) and aliases (*) are not used in a run file",
            where=where,
            remedy="write the value out, or put it in quotes if it is text",
        )
    problem = (error.problem or "not valid YAML").strip()
    return ConfigError(
        f"this is not valid YAML ({problem})",
        where=where,
        remedy="write 'key: value' with a space after the colon, and indent by two spaces",
    )


def _misplaced_beginning(lines: list[str], name: str) -> ConfigError | None:
    """The parser names the line after a first line that does not fit. Name the first line."""
    first = next((n for n, line in enumerate(lines) if line.split("#")[0].strip()), None)
    if first is None:
        return None
    if lines[first].lstrip().startswith("- "):
        return ConfigError(
            "a list belongs to a key, and none is above it",
            where=f"{name}:{first + 1}",
            remedy="remove the line, or write its key above it",
        )
    if lines[first].startswith(" "):
        return ConfigError(
            "the first key is indented, and a later one is not",
            where=f"{name}:{first + 1}",
            remedy="begin it at the start of the line",
        )
    return None


def _build(node: Node, path: Path, name: str, lines: dict[Path, int]) -> Any:
    where = f"{name}:{_line(node)}"
    lines.setdefault(path, _line(node))
    if node.tag not in _PLAIN_TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise ConfigError(
            f"the tag {tag} is not used in a run file", where=where, remedy="remove it"
        )
    if isinstance(node, ScalarNode):
        return parse_scalar(node.value) if node.style is None else node.value
    if len(path) > 16:
        raise ConfigError("nested too deeply", where=where, remedy="write it flatter")
    if isinstance(node, SequenceNode):
        return [_build(item, (*path, i), name, lines) for i, item in enumerate(node.value)]
    assert isinstance(node, MappingNode)
    value: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{name}:{_line(key_node)}"
        if not isinstance(key_node, ScalarNode):
            raise ConfigError("a key must be a word", where=where, remedy="write 'key: value'")
        key = str(key_node.value)
        dotted = ".".join(map(str, (*path, key)))
        if key in value:
            first = lines[(*path, key)]
            raise ConfigError(
                f"{dotted} was already given on line {first}", where=where, remedy="keep one"
            )
        lines[(*path, key)] = _line(key_node)
        value[key] = _build(value_node, (*path, key), name, lines)
    return value


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1
