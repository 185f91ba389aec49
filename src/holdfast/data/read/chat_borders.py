"""What rows of chat data and their messages say besides text: used, named or refused.

A key that speaks of loss, or that steers a rendering elsewhere, is refused if it is not used. So is
a column that the template would read under its name. Each other one is counted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.borders import Border, Unread
from holdfast.errors import DataError, nearest_of

REPLY = "assistant"
ROLES = ("system", "developer", "user", REPLY, "tool", "function", "ipython", "observation")
"""Roles of messages that need no mention in a template."""
ROLES_OF_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": REPLY,
    "chatgpt": REPLY,
    "assistant": REPLY,
    "model": REPLY,
    "tool": "tool",
    "observation": "tool",
}
KWARGS = "chat_template_kwargs"
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thoughts; transformers gives a template each under the first two."""
_MEDIA = ("image", "images", "audio", "audios", "video", "videos", "files", "objects")
_STEERING = (
    *("add_generation_prompt", "continue_final_message", "chat_template", "system", "tools"),
    *("functions", "function_call", "enable_thinking", "reasoning_effort", "documents", KWARGS),
)
TWO_TEXTS = "prompt, two texts"
_COLUMNS = {
    "messages": ("tools", "documents", KWARGS),
    "sharegpt": ("system", "tools", "documents", KWARGS),
    "instruction": (
        *("instruction", "input", "output", "system", "history", "tools", "documents", KWARGS),
    ),
    "prompt": ("prompt", "completion", "tools", "documents", KWARGS),
    TWO_TEXTS: ("prompt", "completion"),
}


def _columns(form: str, used: tuple[str, ...]) -> Border:
    plain = {name: () for name in (*_STEERING, *_MEDIA) if name not in used}
    name = f"rows: {form}" if form != "two texts" else "rows: prompt with two texts"
    return Border(
        name, frozenset(used), plain=plain | {"weight": (1,)}, unknown="count", entry="column"
    )


COLUMNS = {form: _columns(form, used) for form, used in _COLUMNS.items()}
"""By form of rows. The column of messages is added by the reader: a run file names it."""
MESSAGE_KEYS = Border(
    "messages",
    frozenset(("role", "content", "weight", "tool_calls")),
    plain=dict.fromkeys((*THOUGHTS, *_MEDIA, "function_call"), ()),
    unknown="count",
)
"""Keys of a message. The ones that the template reads are used, too."""

TEMPLATE_KWARGS = Border(
    KWARGS,
    frozenset(),
    plain=dict.fromkeys(
        (*_STEERING[:3], "messages", "tools", "documents", "conversation", "tokenize"), ()
    ),
    unknown="count",
)
"""Names that a row gives to the template. The ones that the template reads are used."""

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_LOSS = re.compile(
    "(?:un)?(?:weight(?:s|ed)?|train(?:s|ed|ing|able)?|loss(?:es)?|mask(?:s|ed|ing)?"
    "|label(?:s|ed)?|learn|ignored?|supervised?)"
)
_AROUND_LOSS = frozenset(
    (
        *("is", "do", "on", "no", "not", "has", "in", "for", "use", "with", "without", "this"),
        *("all", "only", "turn", "turns", "message", "messages", "assistant", "user", "prompt"),
        *("completion", "reply", "response", "output", "sample", "token", "tokens", "row", "scale"),
        *("coef", "factor", "value", "detail", "include", "exclude", "skip", "compute"),
    )
)
LOSS_REMEDY = "write weight: 0 for a message without loss, and leave other such keys out"


def refuse_loss_keys(entries: Mapping[str, Any], where: str, what: str, *used: str) -> None:
    """Raises DataError for a key that speaks of loss, whatever its value, and is none of `used`."""
    for key, value in entries.items():
        words = [word.lower() for word in _WORDS.findall(key)]
        of_loss = any(_LOSS.fullmatch(word) for word in words) and all(
            word in _AROUND_LOSS or _LOSS.fullmatch(word) for word in words
        )
        if of_loss and key not in used and value is not None and value not in ("", [], {}):
            raise DataError(
                f"{what} has {key} {value!r}, which Holdfast would train without",
                where=where,
                remedy=LOSS_REMEDY,
            )


def refuse_role(role: str, place: int, known: Collection[str], where: str) -> None:
    """Raises DataError for a role of a message that neither Holdfast nor the template knows."""
    meant = ROLES_OF_SHAREGPT.get(role.lower(), "")
    if role in ROLES or (role in known and meant not in ("user", REPLY)):
        return
    near = nearest_of(role, known) or meant or nearest_of(role, ROLES)
    raise DataError(
        f"message {place + 1} has the role {role!r}, which the template does not name"
        + (f"; did you mean {near}?" if near else ""),
        where=where,
        remedy=f"use one of {', '.join(ROLES)}, or name the role in the template",
    )


@dataclass
class ChatNotes:
    """Counts of what the rows of a source say that is not trained on."""

    seen: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)
    """Kind -> name -> (how often, place of the first). JSON-safe."""

    def add(self, kind: str, name: str, where: str, count: int = 1) -> None:
        before, first = self.seen.setdefault(kind, {}).get(name, (0, where))
        self.seen[kind][name] = before + count, first

    def merge(self, seen: Mapping[str, Mapping[str, tuple[int, str]]]) -> None:
        for kind, names in seen.items():
            for name, (count, where) in names.items():
                self.add(kind, name, where, count)

    def lines(self) -> Iterator[str]:
        if left_out := self.seen.get(LEFT_OUT):
            parts = [
                f"{n:,} rows that {why} (first {w})" for why, (n, w) in sorted(left_out.items())
            ]
            yield "left out: " + ", ".join(parts)
        if templates := self.seen.get(TEMPLATE):
            yield "template " + ", ".join(f"{t} for {n:,} rows" for t, (n, _) in templates.items())
        for border in (*COLUMNS.values(), MESSAGE_KEYS, TEMPLATE_KWARGS):
            unread = Unread(border)
            for name, (count, where) in self.seen.get(border.name, {}).items():
                unread.add([name], where, count)
            if line := unread.line():
                yield line


LEFT_OUT, TEMPLATE = "left out", "template"
"""Kinds of notes, besides the names of borders."""


def read_columns(
    border: Border, row: Mapping[str, Any], column: str, read: Collection[str], where: str
) -> tuple[str, ...]:
    """Return the columns to count. column: of the messages. read: names that the template reads."""
    rest = {name: value for name, value in row.items() if name != column}
    weighted = ("weight",) if row.get("weight") == 1 else ()
    refuse_loss_keys(rest, where, "the row", *weighted)
    remedy = f"put what the template reads into {KWARGS}, and leave out the rest"
    unread = border.check(rest, where, DataError, remedy)
    for name in (name for name in rest if name in read and name not in border.used):
        raise DataError(
            f"the template reads {name}, and a row's column of that name is not given to it",
            where=where,
            remedy=f"put it into the row's {KWARGS}, or rename the column",
        )
    return unread
