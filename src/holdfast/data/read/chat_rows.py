"""Rows of chat data, in four forms, to one: a list of messages.

messages      {"messages": [{"role", "content"}, ...]}, with "tools" if there are any
sharegpt      {"conversations": [{"from", "value"}, ...]}, with "system" and "tools" or without
instruction   {"instruction", "input", "output"}, with "system", "history" and "tools" or without
prompt        {"prompt", "completion"}: two texts, or two lists of messages
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.data.target_weights import byte_of
from holdfast.core.json_parsing import parse_json
from holdfast.data.read.chat_borders import KWARGS, ROLES_OF_SHAREGPT, refuse_loss_keys
from holdfast.errors import DataError, nearest_of


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and `content`. weights: place -> byte of its weight
    (`core.data.target_weights`), of those that do not count once. nulls: place -> keys of which the
    row says null. tools, documents, kwargs: what the row gives to the template."""

    messages: tuple[dict[str, Any], ...]
    weights: Mapping[int, int] = field(default_factory=dict)
    nulls: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    tools: list[Mapping[str, Any]] | None = None
    documents: list[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A text to begin with, and the text that is learnt to follow; no template is used."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class RowForm:
    """columns: the ones that a table must have. field: the default of `field`."""

    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any], str, str], Any]  # a class of this module, or a Preference
    field: str = ""


def refusal(what: str, where: str, remedy: str) -> DataError:
    return DataError(what, where=where, remedy=remedy)


def text_of(row: Mapping[str, Any], key: str, where: str, *, needed: bool = True) -> str:
    value = row.get(key)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        what = "is missing" if value is None else f"is no text but {type(value).__name__}"
        remedy = meant(key, row)
        raise refusal(f"{key!r} {what}; the row has {sorted(row)}", where, remedy)
    return value


def meant(key: str, row: Mapping[str, Any]) -> str:
    """The remedy of a row without the key: the key that is spelt almost so, if there is one."""
    near = "" if key in row else nearest_of(key, row)
    return f"{near!r}: did you mean {key}?" if near else FORM_REMEDY


FORM_REMEDY = (
    "mend the row, or set rows in data.sources to its form "
    "(docs/guide/fine-tuning.md, docs/guide/preference-data.md)"
)


def _parsed(value: Any, key: str, where: str) -> Any:
    """A list or an object, which many tables have as a text of JSON."""
    try:
        return (parse_json(value) if value.strip() else None) if isinstance(value, str) else value
    except ValueError:
        raise refusal(f"{key!r} has a text, and no JSON", where, FORM_REMEDY) from None


def _objects(row: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]] | None:
    given = _parsed(row.get(key), key, where)
    if isinstance(given, list):
        given = [_parsed(one, key, where) for one in given]
    if given is None or (isinstance(given, list) and all(isinstance(o, Mapping) for o in given)):
        return given
    raise refusal(f"{key!r} is no list of objects", where, FORM_REMEDY)


def message_list(row: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(row.get(key), str | list) or (given := _objects(row, key, where)) is None:
        remedy = meant(key, row)
        named = [k for k in row if _holds_messages(row[k])]
        if named and remedy == FORM_REMEDY:
            remedy = f"set field: {named[0]} in data.sources"
        raise refusal(f"{key!r} is no list of messages; the row has {sorted(row)}", where, remedy)
    return given


def _holds_messages(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and ("role" in first or "from" in first)


def _content(value: Any, where: str) -> str:
    """A text, or a list of parts that are all text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, Mapping)
        and isinstance(part.get("text"), str)
        and str(part.get("type", "text")).endswith("text")
        for part in value
    ):
        for part in value:
            refuse_loss_keys(part, where, "a part of a message")
        return "".join(part["text"] for part in value)
    raise refusal("a message's content is no text", where, "leave out rows with other media")


def conversation(
    given: Sequence[Mapping[str, Any]], row: Mapping[str, Any], where: str
) -> Conversation:
    """Of messages with `role` and `content`."""
    messages, weights, nulls = [], {}, {}
    for place, message in enumerate(given):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            remedy = (
                "set rows: sharegpt in data.sources"
                if "from" in message
                else meant("role", message)
            )
            raise refusal(f"a message has no role; it has {sorted(message)}", where, remedy)
        refuse_loss_keys(message, where, f"message {place + 1}", "weight")
        weight = message.get("weight")
        byte = 1 if weight is None else byte_of(weight)
        if byte is None:
            raise refusal(
                f"a message has weight {weight!r}",
                where,
                "use 1, 0 for one without loss, or with data.chat.weights hundredths up to 2.54",
            )
        if byte != 1:
            weights[place] = byte
        nulls[place] = tuple(key for key, value in message.items() if value is None)
        read = {k: value for k, value in message.items() if value is not None and k != "weight"}
        if calls := _objects(message, "tool_calls", where):
            read["tool_calls"] = calls
        for call in calls or ():
            refuse_loss_keys(call, where, f"a call in message {place + 1}")
        messages.append(read | {"content": _content(message.get("content"), where)})
    kwargs = _parsed(row.get(KWARGS), KWARGS, where) or {}
    if not isinstance(kwargs, Mapping):
        raise refusal(f"{KWARGS!r} is no object", where, FORM_REMEDY)
    tools, documents = (_objects(row, key, where) for key in ("tools", "documents"))
    return Conversation(tuple(messages), weights, nulls, tools, documents, kwargs)


def _messages(row: Mapping[str, Any], field: str, where: str) -> Conversation:
    return conversation(message_list(row, field, where), row, where)


def _sharegpt(row: Mapping[str, Any], field: str, where: str) -> Conversation:
    messages = _system(row, where)
    for given in message_list(row, field, where):
        role = ROLES_OF_SHAREGPT.get(name := str(given.get("from")))
        if role is None or {"role", "content"} & given.keys():
            near = nearest_of(name, ROLES_OF_SHAREGPT)
            raise refusal(
                f"a message is from {given.get('from')!r}, and the known ones are "
                f"{', '.join(ROLES_OF_SHAREGPT)}; it has {sorted(given)}",
                where,
                f"did you mean {near}?" if near and role is None else FORM_REMEDY,
            )
        more = {key: value for key, value in given.items() if key not in ("from", "value")}
        messages.append({**more, "role": role, "content": text_of(given, "value", where)})
    return conversation(messages, row, where)


def _system(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    system = text_of(row, "system", where, needed=False)
    return [{"role": "system", "content": system}] if system else []


def _instruction(row: Mapping[str, Any], field: str, where: str) -> Conversation:
    messages = _system(row, where)
    history = _parsed(row.get("history"), "history", where) or []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_text, pair)):
            raise refusal("'history' is no list of two texts each", where, FORM_REMEDY)
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    parts = [text_of(row, "instruction", where), text_of(row, "input", where, needed=False)]
    messages.append({"role": "user", "content": "\n".join(part for part in parts if part)})
    messages.append({"role": "assistant", "content": text_of(row, "output", where)})
    return conversation(messages, row, where)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _prompt(row: Mapping[str, Any], field: str, where: str) -> Conversation | Completion:
    return answer(row, "prompt", "completion", where)


def answer(row: Mapping[str, Any], prompt: str, key: str, where: str) -> Conversation | Completion:
    """Columns of a prompt and of what follows it: two texts, or two lists of messages."""
    kinds = [holds_messages(row.get(name)) for name in (prompt, key)]
    if kinds[0] != kinds[1] and None not in (row.get(prompt), row.get(key)):
        what = f"one of {prompt!r} and {key!r} is a list of messages, the other is none"
        raise refusal(what, where, FORM_REMEDY)
    if not any(kinds):
        return Completion(text_of(row, prompt, where), text_of(row, key, where))
    first, then = message_list(row, prompt, where), message_list(row, key, where)
    return continued(first, then, row, where)


def continued(
    first: Sequence[Mapping[str, Any]],
    then: Sequence[Mapping[str, Any]],
    row: Mapping[str, Any],
    where: str,
) -> Conversation:
    """A prompt's messages, which carry no loss, and those that follow them."""
    if any(message.get("weight") not in (None, 0) for message in first):
        what = "a message of 'prompt' has a weight, and loss lies on what follows it alone"
        raise refusal(what, where, "leave the weight out, or use rows: messages")
    return conversation([*(m | {"weight": 0} for m in map(dict, first)), *then], row, where)


def holds_messages(value: Any) -> bool:
    """Return True for a list, and for a text of JSON that is a list of messages."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except ValueError:
            return False
        return bool(value) and all(isinstance(one, Mapping) and "role" in one for one in value)
    return isinstance(value, list)


CHAT_FORMS = {
    "messages": RowForm((), _messages, "messages"),
    "sharegpt": RowForm((), _sharegpt, "conversations"),
    "instruction": RowForm(("instruction", "output"), _instruction),
    "prompt": RowForm(("prompt", "completion"), _prompt),
}
"""By `data.sources.*.rows`; `preference_rows` has more."""
