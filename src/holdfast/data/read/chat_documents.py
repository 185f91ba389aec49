"""From a row of chat data to a document: its text, and the parts of it that carry loss.

A template that marks replies with `{% generation %}` says what is trained. Otherwise that is
derived: the text up to a message, and the text with it, are rendered. Both must be beginnings of
the full text. Then what lies between them is the message. A template that does not fit is refused
with the row, the message and the place in the text; nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.borders import says_nothing
from holdfast.core.json_parsing import JsonMessage, parse_json
from holdfast.data.read.chat_borders import (
    COLUMNS,
    KWARGS,
    LEFT_OUT,
    MARGIN,
    MESSAGE_KEYS,
    REPLY,
    TEMPLATE,
    TEMPLATE_KWARGS,
    TEXTS,
    THOUGHTS,
    ChatNotes,
    read_columns,
    refuse_role,
)
from holdfast.data.read.chat_render import ChatTemplate, Rendered, Span, compiled, has_marks
from holdfast.data.read.chat_rows import Completion, Conversation
from holdfast.data.read.chat_templates import NAME_THE_TEMPLATE
from holdfast.data.read.preference_rows import (
    CHOSEN,
    FORMS,
    LEAVE_OUT,
    REJECTED,
    Preference,
    field_of,
)
from holdfast.data.read.text_sources import clean_text
from holdfast.errors import DataError

SHOWN = 60  # characters of a text in a refusal
TAIL = 40  # characters of a reply that must be found in the text
NO_REPLY = "have no message to train on"
EMPTY_REPLY = "have an empty reply"
IN_A_PREFERENCE = {NO_REPLY: "has no message to train on", EMPTY_REPLY: "is an empty reply"}
"""What is refused in a row of preferences, where a missing answer changes the pair."""
SPELLS_TOKEN = "spell a special token in a message"
FIRST_REPLY = (
    "give it weight: 0, put a message before it, or mark replies with {% generation %} in a copy "
    "of the template"
)
OWN_TEMPLATE = "mend the template in a copy of the folder, or name another in data.chat"


@dataclass(frozen=True)
class ChatFormat(JsonMessage):
    """How the rows of a run's chat sources become text. JSON-safe.

    template: "" if no row needs one. variables: what the template knows of the tokenizer and the
    run file. special: spellings of special tokens. train_on: roles whose messages carry loss.
    weights: whether messages may have weights other than 0 and 1. tool_template: of rows with
    tools; "": `template`.
    """

    template: str
    variables: tuple[tuple[str, Any], ...]
    special: tuple[str, ...]
    train_on: tuple[str, ...]
    weights: bool = False
    tool_template: str = ""
    others: tuple[str, ...] = ()  # names of templates of the folder that no row takes


@dataclass(frozen=True)
class ChatDocument:
    """text: as it is tokenised. trained: its parts that carry loss. weights: the byte of each part
    (`core.data.target_weights`); none: each counts once. is_framed: a begin token comes
    before the text, and the end token, which is trained, after it."""

    text: str
    trained: tuple[Span, ...]
    is_framed: bool = False
    weights: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {key: said for key, said in asdict(self).items() if key != "weights" or said}

    def encode(self) -> str:
        """One text for all of it: what is hashed and compared."""
        return _spelt(self.to_json())

    @staticmethod
    def decode(text: str) -> ChatDocument:
        return ChatDocument.from_json(parse_json(text))

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ChatDocument:
        spans = tuple((int(a), int(b)) for a, b in value["trained"])
        weights = tuple(int(byte) for byte in value.get("weights", ()))
        return ChatDocument(value["text"], spans, bool(value["is_framed"]), weights)


@dataclass(frozen=True)
class RowDocuments:
    """The documents of one row, which stay together: one, or those of a pair."""

    documents: tuple[ChatDocument, ...]
    value: float | None = None  # margin of a pair; label, 1 or -1

    def encode(self) -> str:
        """One text for all of it. A single document without a value is spelt as itself."""
        if len(self.documents) == 1 and self.value is None:
            return self.documents[0].encode()
        answers = [document.to_json() for document in self.documents]
        return _spelt({"answers": answers, "value": self.value})

    @staticmethod
    def decode(text: str) -> RowDocuments:
        value = parse_json(text)
        answers = value.get("answers", [value])
        return RowDocuments(tuple(map(ChatDocument.from_json, answers)), value.get("value"))


def _spelt(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


class ChatReader:
    """Reads the rows of one source. notes: counts what is not trained on."""

    def __init__(self, rows: str, field: str, format: ChatFormat, notes: ChatNotes):
        self._rows, self._field = rows, field_of(rows, field)
        self._format, self._notes = format, notes
        self._used: set[tuple[str, str]] = set()  # (role, key) that the template was seen to read

    def read(self, value: Any, where: str, *, bare: bool = False) -> str:
        """A row as `RowDocuments.encode` spells it, or "" for one that is left out. Raises
        DataError for a row of another form, and for a template that does not fit."""
        if not isinstance(value, Mapping):
            raise DataError("the row is no object", where=where, remedy="write one object a row")
        found = FORMS[self._rows].read(value, self._field, where)
        answers = found.answers if isinstance(found, Preference) else (found,)
        answers = tuple(_cleaned(answer, where) for answer in answers)
        self._read_columns(value, answers[0], where)
        documents = [self._document(answer, where) for answer in answers]
        named = (CHOSEN, REJECTED) if len(answers) > 1 else ("completion",)
        for name, document in zip(named, documents, strict=True):
            if isinstance(document, ChatDocument):
                continue
            if isinstance(found, Preference) and document in IN_A_PREFERENCE:
                what = f"{name!r} {IN_A_PREFERENCE[document]}"
                raise DataError(what, where=where, remedy=LEAVE_OUT)
            self._notes.add(LEFT_OUT, document, where)
            return ""
        kept = tuple(one for one in documents if isinstance(one, ChatDocument))
        if len(kept) > 1:
            if kept[0].text == kept[1].text:
                what = "'chosen' and 'rejected' become the same text"
                raise DataError(what, where=where, remedy=LEAVE_OUT)
            self._notes.add(MARGIN, "missing" if found.value is None else "given", where)
        value_of_row = found.value if isinstance(found, Preference) else None
        return RowDocuments(kept, value_of_row).encode()

    def _document(self, found: Conversation | Completion, where: str) -> ChatDocument | str:
        """The document, or the reason why the row is left out."""
        special = self._format.special
        if any(token in text for text in texts_of(vars(found)) for token in special):
            return SPELLS_TOKEN
        if isinstance(found, Conversation):
            return self._conversation(found, where)
        if not found.completion.strip():
            return EMPTY_REPLY
        text = found.prompt + found.completion
        return ChatDocument(text, ((len(found.prompt), len(text)),), True)

    def read_prompt(self, row: Mapping[str, Any], where: str) -> str:
        """Return the text of a row's messages, up to where the model begins its reply. Raises
        DataError for a row or a template that does not fit."""
        found = _cleaned(FORMS["messages"].read(row, self._field, where), where)
        assert isinstance(found, Conversation)
        template = self._template(found)
        if template is None:
            raise _no_template(where)
        TEMPLATE_KWARGS.check(found.kwargs, where, DataError, f"take it out of {KWARGS}")
        if unread := [name for name in found.kwargs if name not in template.variables]:
            remedy = f"take it out of {KWARGS}"
            raise DataError(f"the template does not read {unread[0]}", where=where, remedy=remedy)
        read = {*template.variables} - {self._field, "messages", "tools", "documents"}
        if names := [name for name in row if name in read]:
            what = f"the template reads {names[0]}, and a column of that name is not given to it"
            raise DataError(what, where=where, remedy=f"put it into {KWARGS}, or rename it")
        named = {*self._format.train_on, *template.spelt}
        for place, message in enumerate(found.messages):
            refuse_role(message["role"], place, named, where)
        return _Spans(template, found, self._format, where).prompt(self._used)

    def _template(self, found: Conversation) -> ChatTemplate | None:
        text = (self._format.tool_template if found.tools else "") or self._format.template
        return compiled(text, self._format.variables) if text else None

    def _read_columns(
        self, row: Mapping[str, Any], found: Conversation | Completion, where: str
    ) -> None:
        template = self._template(found) if isinstance(found, Conversation) else None
        read, kwargs = template.variables if template else (), getattr(found, "kwargs", {})
        border = COLUMNS[self._rows if isinstance(found, Conversation) else TEXTS[self._rows]]
        for name in read_columns(border, row, self._field, read, where):
            self._notes.add(border.name, name, where)
        TEMPLATE_KWARGS.check(kwargs, where, DataError, f"take it out of {KWARGS}")
        for name in (name for name in kwargs if name not in read):
            self._notes.add(TEMPLATE_KWARGS.name, name, where)

    def _conversation(self, found: Conversation, where: str) -> ChatDocument | str:
        """The document, or the reason why the row is left out."""
        format, template = self._format, self._template(found)
        named = {*format.train_on, *(template.spelt if template else ())}
        for place, message in enumerate(found.messages):
            refuse_role(message["role"], place, named, where)
        trained = [
            place
            for place, message in enumerate(found.messages)
            if message["role"] in format.train_on and found.weights.get(place) != 0
        ]
        if not trained:
            return NO_REPLY
        if any(_is_empty(found.messages[place]) for place in trained):
            return EMPTY_REPLY
        weights = tuple(found.weights.get(place, 1) for place in trained)
        if max(weights) > 1 and not format.weights:
            raise DataError(
                "a message has a weight other than 0 and 1",
                where=where,
                remedy="use 1, or 0 for one without loss, or set data.chat.weights=true",
            )
        if template is None:
            raise _no_template(where)
        spans = _Spans(template, found, format, where)
        marked = template.marks_replies and format.train_on == (REPLY,)
        document = spans.marked(trained) if marked else spans.derived(trained)
        spans.require_prompts()
        for name in spans.unread_keys(self._used):
            self._notes.add(MESSAGE_KEYS.name, name, where)
        if format.tool_template:
            self._notes.add(TEMPLATE, "tool_use" if found.tools else "default", where)
        return replace(document, weights=weights) if max(weights) > 1 else document


def _no_template(where: str) -> DataError:
    what = "the row has messages, and the tokenizer's folder has no chat template"
    return DataError(what, where=where, remedy=NAME_THE_TEMPLATE)


def _is_empty(message: Mapping[str, Any]) -> bool:
    keys = ("content", *THOUGHTS, "tool_calls", "function_call")
    said = [message.get(key) for key in keys]
    return not any(one.strip() if isinstance(one, str) else one for one in said)


class _Spans:
    """Finds the trained messages of one conversation in its text."""

    def __init__(
        self, template: ChatTemplate, conversation: Conversation, format: ChatFormat, where: str
    ):
        self._template, self._where, self._format = template, where, format
        self._row, self._messages = conversation, conversation.messages
        self._full = self._render(self._messages)
        self._bare = _without_spaces(self._full.text)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], begins_reply: bool = False
    ) -> Rendered:
        row, asked = self._row, self._template.asks_null
        nulls = (row.nulls.get(i, ()) for i in range(len(messages)))
        pairs = zip(messages, nulls, strict=True)
        given = [{**m, **dict.fromkeys(asked & {*keys})} for m, keys in pairs]
        more = {"tools": row.tools, "documents": row.documents, **row.kwargs}
        return self._template.render(given, self._where, begins_reply=begins_reply, **more)

    def prompt(self, used: set[tuple[str, str]]) -> str:
        """The text up to where the reply begins. used: as for `unread_keys`."""
        if not self._messages or self._messages[-1]["role"] == REPLY:
            what = "ends with a reply" if self._messages else "has no message"
            raise self._refusal(f"the prompt {what}", "leave the last reply out of the prompt")
        self.require_prompts()
        if unread := next(self.unread_keys(used), None):
            raise self._refusal(f"the template does not read {unread}", "take it out of the row")
        text, reply = self._render(self._messages, True).text, "0a7"
        answered = self._render([*self._messages, {"role": REPLY, "content": reply}]).text
        header = answered[len(text) :].partition(reply)[0]
        if answered.startswith(text) and header.strip():
            raise self._refusal(
                f"the template does not begin a reply when add_generation_prompt is true: "
                f"{header[:SHOWN]!r} is missing",
                OWN_TEMPLATE,
            )
        return text

    def require_prompts(self) -> None:
        """Raises DataError for a text of the row that the template leaves out: of a message, a
        call, a tool or a document."""
        for tool in self._row.tools or ():
            for text in _tool_texts(tool):
                self._require(text, f"the tool {_name(tool)!r} of the row, or a part of it")
        for number, document in enumerate(self._row.documents or (), start=1):
            for text in texts_of(document):
                self._require(text, f"document {number} of the row, or a part of it")
        for place, message in enumerate(self._messages):
            content, role = message["content"], message["role"]
            if role == REPLY:  # of an earlier one its thoughts may be missing
                content = content.strip()[-TAIL:]
            self._require(content, f"message {place + 1} of the role {role}, or a part of it")
            for function in _functions(message.get("tool_calls")):
                self._require_call(place, self._full.text, function)

    def _require(self, text: str, what: str, bare: str = "") -> None:
        if not _holds(bare or self._bare, text):
            remedy = OWN_TEMPLATE
            if self._format.others:
                remedy += f" (data.chat.template_name: {' or '.join(self._format.others)})"
            raise self._refusal(f"the template leaves out {what}: {text[:SHOWN]!r}", remedy)

    def unread_keys(self, used: set[tuple[str, str]]) -> Iterator[str]:
        """Keys of messages that change nothing of the text; once for each message that has one.
        used: roles and keys that were seen to change one. Raises DataError if a medium or
        thoughts would be missing."""
        last_user = max((i for i, m in enumerate(self._messages) if m["role"] == "user"), default=0)
        for place, message in enumerate(self._messages):
            role = message["role"]
            texts = {key: message[key] for key in THOUGHTS if key in message}
            texts |= {"content": message["content"]} if role == REPLY else {}
            dropped = [key for key, text in texts.items() if not _holds(self._bare, str(text))]
            if place < last_user:
                yield from (f"{key} of earlier replies, or a part of it" for key in dropped)
            for key in message:
                unread = key in dropped and key != "content" and place >= last_user
                if key not in (*texts, *MESSAGE_KEYS.used) and not says_nothing(message[key]):
                    unread = (role, key) not in used and not self._changes_text(role, key)
                    used |= set() if unread else {(role, key)}
                if unread and key in MESSAGE_KEYS.plain:
                    raise self._refusal(f"the template leaves out {key} of message {place + 1}")
                if unread:
                    yield key

    def _changes_text(self, role: str, key: str) -> bool:
        """Return True if messages of a role give another text without a key, or none."""
        messages = [
            {k: v for k, v in m.items() if k != key or m["role"] != role} for m in self._messages
        ]
        try:
            return self._render(messages).text != self._full.text
        except DataError:
            return True

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
            before = self._beginning(place, is_reply) if place or is_reply else ""
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
        try:
            return self._render(self._messages[:messages], begins_reply).text
        except DataError as error:
            if messages:
                raise
            raise self._refusal(
                f"the row begins with a reply, and without a message before it {error.message}",
                FIRST_REPLY,
            ) from None

    def _check_reply(self, place: int, part: str) -> None:
        """The reply is there, and its header is not: that comes from the prompt."""
        self._require_reply(place, part, "in its place")
        content = self._messages[place]["content"].strip()
        at = part.find(content) if content else -1
        header = part[: max(at, 0)]
        named = re.search(rf"\b{REPLY}\b", header, re.IGNORECASE)
        if named or any(token in header for token in self._format.special):
            when = "when add_generation_prompt is true" if place else "without a message before it"
            raise self._refusal(
                f"the text of message {place + 1} begins with {header[:SHOWN]!r}, because the "
                f"template does not begin a reply {when}",
                OWN_TEMPLATE if place else FIRST_REPLY,
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
        name, arguments, bare = function["name"], function.get("arguments"), _without_spaces(part)
        self._require(name, f"the call of {name!r} in message {place + 1}", bare)
        given = arguments if isinstance(arguments, Mapping) else {}
        for text in (*given, *texts_of(given)):
            self._require(text, f"an argument of {name!r} in message {place + 1}", bare)
        wrong, how, other = str(arguments), "in Python's form", "a text of JSON"
        if isinstance(arguments, str):
            wrong, how, other = _quoted(arguments), "as a quoted text", "an object"
        if arguments and re.search("[\"':]", str(arguments)) and wrong in part:
            raise self._refusal(
                f"the template writes the arguments of {name!r} in message {place + 1} {how}: "
                f"{wrong[:SHOWN]}",
                f"write arguments as {other}",
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


def _name(tool: Mapping[str, Any]) -> str:
    return next((str(function["name"]) for function in _functions([tool])), "without a name")


def _tool_texts(tool: Any) -> Iterator[str]:
    """Names and descriptions of a tool and of its parameters."""
    for key, value in tool.items() if isinstance(tool, Mapping) else ():
        if key in ("name", "description") and isinstance(value, str):
            yield value
        if key == "properties" and isinstance(value, Mapping):
            yield from value
        for inner in value if isinstance(value, list) else (value,):
            yield from _tool_texts(inner)


def _holds(bare: str, text: str) -> bool:
    """Return True if a text, or what JSON makes of it, is in one without spaces."""
    return _without_spaces(text) in bare or any(
        _without_spaces(json.dumps(text, ensure_ascii=ascii_only)[1:-1]) in bare
        for ascii_only in (False, True)
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _cleaned(found: Conversation | Completion, where: str) -> Conversation | Completion:
    """With all texts in normal form."""
    return replace(found, **{key: _clean(value, where) for key, value in vars(found).items()})


def _clean(value: Any, where: str) -> Any:
    if isinstance(value, str):
        if has_marks(value):
            what = "a message has U+FDD0 or U+FDD1, which are no characters"
            raise DataError(what, where=where, remedy="remove them")
        return clean_text(value, where)
    if isinstance(value, Mapping):
        return {key: _clean(inner, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_clean(inner, where) for inner in value)
    return value


def texts_of(value: Any) -> Iterator[str]:
    """Every text of a row or of a part of it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from texts_of(inner)
