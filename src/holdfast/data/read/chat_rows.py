"""Rows of chat data, in four forms, to one: a list of messages.

messages      {"messages": [{"role", "content"}, ...]}, with "tools" if there are any
sharegpt      {"conversations": [{"from", "value"}, ...]}, with "system" and "tools" or without
instruction   {"instruction", "input", "output"}, with "system", "history" and "tools" or without
prompt        {"prompt", "completion"}: two texts, or two lists of messages
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.data.target_weights import byte_of
from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and `content`. weights: place -> byte of its weight
    (`core.data.target_weights`), of those that do not count once. tools: what the row says of
    tools, for the template."""

    messages: tuple[dict[str, Any], ...]
    weights: Mapping[int, int] = field(default_factory=dict)
    tools: Any = None


@dataclass(frozen=True)
class Completion:
    """A text to begin with, and the text that is learnt to follow; no template is used."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class RowForm:
    """columns: the ones that a table must have. field: the default of `field`."""

    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any], str, str], Conversation | Completion]
    field: str = ""


def _refusal(what: str, where: str, remedy: str) -> DataError:
    return DataError(what, where=where, remedy=remedy)


def _text(row: Mapping[str, Any], key: str, where: str, *, needed: bool = True) -> str:
    value = row.get(key)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        what = "is missing" if value is None else f"is no text but {type(value).__name__}"
        raise _refusal(f"{key!r} {what}; the row has {sorted(row)}", where, _FORM_REMEDY)
    return value


_FORM_REMEDY = "mend the row, or set rows in data.sources to its form (docs/guide/fine-tuning.md)"


def _list(row: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    value = row.get(key)
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise _refusal(
            f"{key!r} is no list of messages; the row has {sorted(row)}", where, _FORM_REMEDY
        )
    return value


def _tools(row: Mapping[str, Any], where: str) -> list[Any] | None:
    """What the row says of tools: a list, which some files have as a text of JSON."""
    given = row.get("tools")
    if isinstance(given, str):
        try:
            given = parse_json(given) if given.strip() else None
        except ValueError:
            raise _refusal("'tools' is a text, and no JSON", where, _FORM_REMEDY) from None
    if given is None or (isinstance(given, list) and all(isinstance(t, Mapping) for t in given)):
        return given
    raise _refusal("'tools' is no list of objects", where, _FORM_REMEDY)


def _content(value: Any, where: str) -> str:
    """A text, or a list of parts that are all text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value
    ):
        return "".join(part["text"] for part in value)
    raise _refusal("a message's content is no text", where, "leave out rows with other media")


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise _refusal(f"a message has no role; it has {sorted(given)}", where, _FORM_REMEDY)
    # A table fills in what a row does not have.
    known = {key: value for key, value in given.items() if value is not None and key != "weight"}
    return known | {"content": _content(given.get("content"), where)}


def _messages(row: Mapping[str, Any], field: str, where: str) -> Conversation:
    given = _list(row, field, where)
    weights = {}
    for place, message in enumerate(given):
        weight = message.get("weight")
        byte = 1 if weight is None else byte_of(weight)
        if byte is None:
            raise _refusal(
                f"a message has weight {weight!r}",
                where,
                "use 1, 0 for one without loss, or with data.chat.weights hundredths up to 2.54",
            )
        if byte != 1:
            weights[place] = byte
    messages = tuple(_message(message, where) for message in given)
    return Conversation(messages, weights, _tools(row, where))


def _sharegpt(row: Mapping[str, Any], field: str, where: str) -> Conversation:
    messages = []
    if system := _text(row, "system", where, needed=False):
        messages.append({"role": "system", "content": system})
    for given in _list(row, field, where):
        role = SHAREGPT_ROLES.get(str(given.get("from")))
        if role is None:
            raise _refusal(
                f"a message is from {given.get('from')!r}, and the known ones are "
                f"{', '.join(SHAREGPT_ROLES)}",
                where,
                "rename it, or use rows: messages, which takes any role",
            )
        messages.append({"role": role, "content": _text(given, "value", where)})
    return Conversation(tuple(messages), tools=_tools(row, where))


def _instruction(row: Mapping[str, Any], field: str, where: str) -> Conversation:
    messages = []
    if system := _text(row, "system", where, needed=False):
        messages.append({"role": "system", "content": system})
    for pair in row.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_text, pair)):
            raise _refusal("'history' is no list of two texts each", where, _FORM_REMEDY)
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    parts = [_text(row, "instruction", where), _text(row, "input", where, needed=False)]
    messages.append({"role": "user", "content": "\n".join(part for part in parts if part)})
    messages.append({"role": "assistant", "content": _text(row, "output", where)})
    return Conversation(tuple(messages), tools=_tools(row, where))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _prompt(row: Mapping[str, Any], field: str, where: str) -> Conversation | Completion:
    if isinstance(row.get("prompt"), list):
        first = _messages(row, "prompt", where).messages
        then = _messages(row, "completion", where)
        weights = dict.fromkeys(range(len(first)), 0)
        weights |= {place + len(first): byte for place, byte in then.weights.items()}
        return Conversation((*first, *then.messages), weights, _tools(row, where))
    return Completion(_text(row, "prompt", where), _text(row, "completion", where))


FORMS = {
    "messages": RowForm((), _messages, "messages"),
    "sharegpt": RowForm((), _sharegpt, "conversations"),
    "instruction": RowForm(("instruction", "output"), _instruction),
    "prompt": RowForm(("prompt", "completion"), _prompt),
}
"""By `data.sources.*.rows`."""


def field_of(rows: str, field: str) -> str:
    """The column of a source: `field`, or the form's own where the run file names none."""
    return FORMS[rows].field if field == "text" else field
