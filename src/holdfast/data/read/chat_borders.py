"""What rows of chat data and their messages say in addition to text: used, named or refused.

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
ROLES_OF_SHAREGPT = {"system": "system", "human": "user", "user": "user", "tool": "tool"}
ROLES_OF_SHAREGPT |= dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), REPLY)
ROLES_OF_SHAREGPT |= {"observation": "tool"}
KWARGS = "chat_template_kwargs"
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thoughts; transformers gives a template each under the first two."""
_GIVEN = ("tools", "documents", KWARGS)
_MEDIA = ("image", "images", "audio", "audios", "video", "videos", "files", "objects")
_STEERING = ("add_generation_prompt", "continue_final_message", "chat_template")
_ELSEWHERE = ("system", "functions", "function_call", "enable_thinking", "reasoning_effort")
_PAIRS = ("instruction", "input", "output", "history", "system")
_PAIR = ("prompt", "chosen", "rejected", "margin")
_RATED = ("prompt", "completion", "label")
TEXTS = {"prompt": "prompt, two texts", "preference": "preference, texts"}
TEXTS |= {"unpaired_preference": "unpaired_preference, texts"}
"""Form of rows -> its border if a row has texts, which need no template."""


def _columns(form: str, *used: str) -> Border:
    refused = {*_GIVEN, *_MEDIA, *_STEERING, *_ELSEWHERE}.difference(used)
    plain = dict.fromkeys(sorted(refused), ()) | {"weight": (1,)}
    return Border(f"rows: {form}", frozenset(used), plain=plain, unknown="count", entry="column")


COLUMNS = {
    "messages": _columns("messages", *_GIVEN),
    "sharegpt": _columns("sharegpt", "system", *_GIVEN),
    "instruction": _columns("instruction", *_PAIRS, *_GIVEN),
    "prompt": _columns("prompt", "prompt", "completion", *_GIVEN),
    TEXTS["prompt"]: _columns(TEXTS["prompt"], "prompt", "completion"),
    "preference": _columns("preference", *_PAIR, *_GIVEN),
    TEXTS["preference"]: _columns(TEXTS["preference"], *_PAIR),
    "unpaired_preference": _columns("unpaired_preference", *_RATED, *_GIVEN),
    TEXTS["unpaired_preference"]: _columns(TEXTS["unpaired_preference"], *_RATED),
}
"""By form of rows. A run file names the column of messages."""
PROMPT_COLUMNS = Border(
    "rows of prompts",
    frozenset(),
    plain=dict.fromkeys((*_MEDIA, *_STEERING, *_ELSEWHERE), ()),
    unknown="count",
    entry="column",
)
"""Any other column goes to the rewards by its name."""
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
    plain=dict.fromkeys((*_STEERING, "messages", "tools", "documents", "tokenize"), ()),
    unknown="count",
)
"""Names that a row gives to the template. The ones that the template reads are used."""

_OF_LOSS = "(un)?(weight(s|ed)?|train(s|ed|ing|able)?|loss(es)?|mask(s|ed)?|labels?)|learn|ignored?"
_AROUND = (
    "is|do|on|no|not|has|in|for|use|with|without|this|all|only|turns?|messages?|assistants?|user|"
    "prompts?|completions?|reply|response|output|samples?|tokens?|row|scale|coef|factor|value|"
    "details?|include|exclude|skip|compute|calculate|apply|enable|inputs?|history|instructions?|last"
)
_LOSS_KEY = re.compile(rf"(({_AROUND})[-_]?)*({_OF_LOSS})([-_]?({_OF_LOSS}|{_AROUND}))*", re.I)


def refuse_loss_keys(entries: Mapping[str, Any], where: str, what: str, *used: str) -> None:
    """Raises DataError for a key that speaks of loss, whatever its value, and is none of `used`."""
    for key, value in entries.items():
        if value not in (None, "", [], {}) and key not in used and _LOSS_KEY.fullmatch(key):
            raise DataError(
                f"{what} has {key} {value!r}, which Holdfast would train without",
                where=where,
                remedy="write weight: 0 for a message without loss, and leave such keys out",
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
        if rows := self.seen.get(LEFT_OUT):
            each = [f"{n:,} rows that {why} (first {at})" for why, (n, at) in sorted(rows.items())]
            yield "left out: " + ", ".join(each)
        if rows := self.seen.get(TEMPLATE):
            yield "template " + ", ".join(f"{name} for {n:,} rows" for name, (n, _) in rows.items())
        for border in (*COLUMNS.values(), MESSAGE_KEYS, TEMPLATE_KWARGS):
            unread = Unread(border)
            for name, (count, where) in self.seen.get(border.name, {}).items():
                unread.add([name], where, count)
            if line := unread.line():
                yield line


LEFT_OUT, TEMPLATE, MARGIN = "left out", "template", "margin"
"""Kinds of notes, in addition to the names of borders."""


def read_columns(
    border: Border, row: Mapping[str, Any], column: str, read: Collection[str], where: str
) -> tuple[str, ...]:
    """Return the columns to count. column: of the messages. read: names that the template reads."""
    rest = {name: value for name, value in row.items() if name != column}
    used = (*border.used, *(["weight"] if row.get("weight") == 1 else []))
    refuse_loss_keys(rest, where, "the row", *used)
    remedy = f"make it a message, put it into {KWARGS} if the template reads it, or leave it out"
    given = (*border.used, *_STEERING, "messages")
    if names := [name for name in rest if name in read and name not in given]:
        what = f"the template reads {names[0]}, and a column of that name is not given to it"
        raise DataError(what, where=where, remedy=remedy)
    return border.check(rest, where, DataError, remedy)
