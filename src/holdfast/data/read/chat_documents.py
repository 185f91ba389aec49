"""From a row of chat data to a document: its text, and the parts of it that carry loss.

A template that marks replies with `{% generation %}` says what is trained. Otherwise that is
derived: the text up to a message, and the text with it, are rendered. Both must be beginnings of
the full text. Then what lies between them is the message. A template that does not fit is refused
with the row, the message and the place in the text; nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.data.read.chat_render import ChatTemplate, Span, compiled, has_marks
from holdfast.data.read.chat_rows import FORMS, Completion, Conversation, field_of
from holdfast.data.read.chat_templates import NAME_THE_TEMPLATE
from holdfast.data.read.text_sources import clean_text
from holdfast.errors import DataError

REPLY = "assistant"
PROMPTS = ("system", "developer", "user")
SHOWN = 60  # characters of a text in a refusal
TAIL = 40  # characters of a reply that must be found in the text
NO_REPLY = "have no message to train on"
SPELLS_TOKEN = "spell a special token in a message"
OWN_TEMPLATE = "mend the template in a copy of the folder, or name another in data.chat"


@dataclass(frozen=True)
class ChatFormat:
    """How the rows of a run's chat sources become text. JSON-safe.

    template: "" if no row needs one. variables: what the template knows of the tokenizer.
    special: spellings of special tokens. train_on: roles whose messages carry loss. weights:
    whether messages may have weights other than 0 and 1.
    """

    template: str
    variables: tuple[tuple[str, str], ...]
    special: tuple[str, ...]
    train_on: tuple[str, ...]
    weights: bool = False

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "weights" or value}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ChatFormat:
        return ChatFormat(
            value["template"],
            tuple((str(k), str(v)) for k, v in value["variables"]),
            tuple(value["special"]),
            tuple(value["train_on"]),
            bool(value.get("weights")),
        )


@dataclass(frozen=True)
class ChatDocument:
    """text: as it is tokenised. trained: its parts that carry loss. weights: the byte of each part
    (`core.data.target_weights`); none: each counts once. is_framed: a begin token comes
    before the text, and the end token, which is trained, after it."""

    text: str
    trained: tuple[Span, ...]
    is_framed: bool = False
    weights: tuple[int, ...] = ()

    def encode(self) -> str:
        """One text for all of it: what is hashed and compared."""
        value = {key: said for key, said in asdict(self).items() if key != "weights" or said}
        return json.dumps(value, ensure_ascii=False, sort_keys=True)

    @staticmethod
    def decode(text: str) -> ChatDocument:
        value = parse_json(text)
        spans = tuple((int(a), int(b)) for a, b in value["trained"])
        weights = tuple(int(byte) for byte in value.get("weights", ()))
        return ChatDocument(value["text"], spans, bool(value["is_framed"]), weights)


class ChatReader:
    """Reads the rows of one source. left_out: counts rows that are left out, by reason."""

    def __init__(self, rows: str, field: str, format: ChatFormat, left_out: Counter[str]):
        self._form, self._field = FORMS[rows], field_of(rows, field)
        self._format, self._left_out = format, left_out

    def read(self, value: Any, where: str, *, bare: bool = False) -> str:
        """A document as `ChatDocument.encode` spells it, or "" for a row that is left out. Raises
        DataError for a row of another form, and for a template that does not fit."""
        if not isinstance(value, Mapping):
            raise DataError("the row is no object", where=where, remedy="write one object a row")
        found = _cleaned(self._form.read(value, self._field, where), where)
        if any(any(token in text for token in self._format.special) for text in _texts(found)):
            self._left_out[SPELLS_TOKEN] += 1
            return ""
        if isinstance(found, Completion):
            document = _completion(found)
        else:
            document = self._conversation(found, where)
        if document is None:
            self._left_out[NO_REPLY] += 1
            return ""
        return document.encode()

    def _conversation(self, found: Conversation, where: str) -> ChatDocument | None:
        trained = [
            place
            for place, message in enumerate(found.messages)
            if message["role"] in self._format.train_on and found.weights.get(place) != 0
        ]
        if not trained:
            return None
        weights = tuple(found.weights.get(place, 1) for place in trained)
        if max(weights) > 1 and not self._format.weights:
            raise DataError(
                "a message has a weight other than 0 and 1",
                where=where,
                remedy="use 1, or 0 for one without loss, or set data.chat.weights=true",
            )
        if not self._format.template:
            raise DataError(
                "the row has messages, and the tokenizer's folder has no chat template",
                where=where,
                remedy=NAME_THE_TEMPLATE,
            )
        template = compiled(self._format.template, self._format.variables)
        spans = _Spans(template, found, self._format, where)
        marked = template.marks_replies and self._format.train_on == (REPLY,)
        document = spans.marked(trained) if marked else spans.derived(trained)
        spans.require_prompts()
        return replace(document, weights=weights) if max(weights) > 1 else document


class _Spans:
    """Finds the trained messages of one conversation in its text."""

    def __init__(
        self, template: ChatTemplate, conversation: Conversation, format: ChatFormat, where: str
    ):
        self._template, self._where, self._format = template, where, format
        self._messages, self._tools = conversation.messages, conversation.tools
        self._full = template.render(self._messages, where, tools=self._tools)

    def require_prompts(self) -> None:
        """Raises DataError for a message or a tool that the template leaves out."""
        text = _without_spaces(self._full.text)
        for function in _functions(self._tools):
            if (name := function["name"]) not in self._full.text:
                raise self._refusal(f"the template leaves out the tool {name!r} of the row")
        for place, message in enumerate(self._messages):
            content = message["content"]
            if message["role"] in PROMPTS and _without_spaces(content) not in text:
                raise self._refusal(
                    f"the template leaves out message {place + 1} of the role {message['role']}, "
                    f"or a part of it: {content[:SHOWN]!r}"
                )

    def marked(self, trained: list[int]) -> ChatDocument:
        """By `{% generation %}`."""
        text, marked = self._full.text, self._full.marked
        replies = [i for i, message in enumerate(self._messages) if message["role"] == REPLY]
        if len(marked) != len(replies):
            raise self._refusal(
                f"the row has {len(replies)} replies, and the template marks {len(marked)} parts "
                "with {% generation %}"
            )
        chosen = []
        for place, (start, stop) in zip(replies, marked, strict=True):
            self._require_reply(place, text[start:stop], "between {% generation %} and its end")
            if place in trained:
                chosen.append((start, stop))
        return ChatDocument(text, tuple(chosen))

    def derived(self, trained: list[int]) -> ChatDocument:
        """By rendering what comes before a message, and what comes up to its end."""
        text, chosen = self._full.text, []
        for place in trained:
            is_reply = self._messages[place]["role"] == REPLY
            before = self._beginning(place, begins_reply=is_reply) if place else ""
            after = self._beginning(place + 1)
            for part, what in ((before, "before"), (after, "up to the end of")):
                if not text.startswith(part):
                    raise self._not_a_beginning(place, part, what)
            if len(after) < len(before):
                raise self._refusal(f"the text ends before message {place + 1} begins")
            if is_reply:
                self._check_reply(place, text[len(before) : len(after)])
            chosen.append((len(before), len(after)))
        return ChatDocument(text, tuple(chosen))

    def _beginning(self, messages: int, begins_reply: bool = False) -> str:
        if messages == len(self._messages) and not begins_reply:
            return self._full.text
        part = self._messages[:messages]
        return self._template.render(
            part, self._where, tools=self._tools, begins_reply=begins_reply
        ).text

    def _check_reply(self, place: int, part: str) -> None:
        """The reply is there, and its header is not: that comes from the prompt."""
        self._require_reply(place, part, "in its place")
        content = self._messages[place]["content"].strip()
        at = part.find(content) if content else -1
        header = part[: max(at, 0)]
        named = re.search(rf"\b{REPLY}\b", header, re.IGNORECASE)
        if named or any(token in header for token in self._format.special):
            raise self._refusal(
                f"the text of message {place + 1} begins with {header[:SHOWN]!r}, because the "
                "template does not begin a reply when add_generation_prompt is true"
            )

    def _require_reply(self, place: int, part: str, what: str) -> None:
        """A template may leave out the thoughts of an earlier reply, and nothing else."""
        content = self._messages[place]["content"].strip()
        if content[-TAIL:].strip() not in part:
            raise self._refusal(
                f"the reply in message {place + 1} ends with {content[-TAIL:]!r}, which is not "
                f"{what}: {part[:SHOWN]!r}"
            )
        is_last = place == len(self._messages) - 1
        if is_last and _without_spaces(content) not in _without_spaces(part):
            raise self._refusal(
                f"the template leaves out a part of the reply in message {place + 1}: of "
                f"{content[:SHOWN]!r} it keeps {part[:SHOWN]!r}"
            )
        for function in _functions(self._messages[place].get("tool_calls")):
            self._require_call(place, part, function)

    def _require_call(self, place: int, part: str, function: Mapping[str, Any]) -> None:
        """Many files have a call's arguments as a text of JSON, which a template quotes again."""
        name, arguments = function["name"], function.get("arguments")
        if name not in part:
            raise self._refusal(
                f"the template leaves out the call of {name!r} in message {place + 1}"
            )
        if isinstance(arguments, str) and '"' in arguments and _quoted(arguments) in part:
            raise self._refusal(
                f"the template writes the arguments of {name!r} in message {place + 1} as a quoted "
                f"text: {_quoted(arguments)[:SHOWN]}",
                "write arguments as an object, not as a text of JSON",
            )

    def _not_a_beginning(self, place: int, part: str, what: str) -> DataError:
        text = self._full.text
        at = next(
            (i for i, (a, b) in enumerate(zip(text, part, strict=False)) if a != b),
            min(len(text), len(part)),
        )
        return self._refusal(
            f"the text {what} message {place + 1}, rendered alone, is no beginning of the full "
            f"text: from character {at} on it has {part[at : at + SHOWN]!r}, not "
            f"{text[at : at + SHOWN]!r}",
            "mark replies with {% generation %} in a copy of the template, and name it in "
            "data.chat.template_file",
        )

    def _refusal(self, what: str, remedy: str = OWN_TEMPLATE) -> DataError:
        return DataError(what, where=self._where, remedy=remedy)


def _functions(tools: Any) -> Iterator[Mapping[str, Any]]:
    """The functions that have a name, of a list of tools or of calls."""
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield function


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _completion(found: Completion) -> ChatDocument | None:
    if not found.completion.strip():
        return None
    text = found.prompt + found.completion
    return ChatDocument(text, ((len(found.prompt), len(text)),), is_framed=True)


def _cleaned(found: Conversation | Completion, where: str) -> Conversation | Completion:
    """With all texts in normal form."""
    if isinstance(found, Completion):
        return Completion(_clean(found.prompt, where), _clean(found.completion, where))
    messages = tuple({k: _clean(v, where) for k, v in m.items()} for m in found.messages)
    return Conversation(messages, found.weights, _clean(found.tools, where))


def _clean(value: Any, where: str) -> Any:
    if isinstance(value, str):
        if has_marks(value):
            raise DataError(
                "a message has U+FDD0 or U+FDD1, which are no characters",
                where=where,
                remedy="remove them",
            )
        return clean_text(value, where)
    if isinstance(value, Mapping):
        return {key: _clean(inner, where) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_clean(inner, where) for inner in value]
    return value


def _texts(found: Any) -> Iterator[str]:
    """Every text of a row."""
    if isinstance(found, str):
        yield found
    elif isinstance(found, Completion):
        yield from (found.prompt, found.completion)
    elif isinstance(found, Conversation):
        yield from _texts(list(found.messages))
        yield from _texts(found.tools)
    elif isinstance(found, Mapping):
        for inner in found.values():
            yield from _texts(inner)
    elif isinstance(found, list):
        for inner in found:
            yield from _texts(inner)
