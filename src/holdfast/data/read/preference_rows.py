"""Rows of preferences, in the forms of TRL's datasets.

preference            {"prompt", "chosen", "rejected"}: texts, or lists of messages. Without
                      "prompt", the common beginning of chosen and rejected is the prompt. "margin"
                      is a number, if there is one
unpaired_preference   {"prompt", "completion", "label"}: true for a good completion
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from holdfast.data.read.chat_rows import (
    CHAT_FORMS,
    FORM_REMEDY,
    Completion,
    Conversation,
    RowForm,
    answer,
    continued,
    holds_messages,
    meant,
    message_list,
    refusal,
    text_of,
)

CHOSEN, REJECTED = "chosen", "rejected"
DOCUMENTS = {"preference": 2, "unpaired_preference": 2}
"""Documents of a row, by the forms of preferences: chosen and rejected, or a rated answer and its
row of the KL baseline (`data/stages/chat_tokens.py`)."""
LEAVE_OUT = "mend the row, or leave it out"


@dataclass(frozen=True)
class Preference:
    """The answers of a row to one prompt: chosen and rejected, or one that has a label."""

    answers: tuple[Conversation | Completion, ...]
    value: float | None = None  # margin of a pair; label, 1 or -1


def _pair(row: Mapping[str, Any], field: str, where: str) -> Preference:
    for key in (CHOSEN, REJECTED):
        if row.get(key) is None:
            what = f"{key!r} is missing, and a pair needs it; the row has {sorted(row)}"
            raise refusal(what, where, meant(key, row))
    kinds = [holds_messages(row[key]) for key in (CHOSEN, REJECTED)]
    if kinds[0] != kinds[1]:
        what = "one of 'chosen' and 'rejected' is a list of messages, the other is none"
        raise refusal(what, where, FORM_REMEDY)
    if row[CHOSEN] == row[REJECTED]:
        raise refusal("'chosen' and 'rejected' are equal", where, LEAVE_OUT)
    prompt = row.get("prompt")
    answers: Sequence[Conversation | Completion]
    if prompt is not None and holds_messages(prompt) == kinds[0]:
        answers = [answer(row, "prompt", key, where) for key in (CHOSEN, REJECTED)]
    elif kinds[0]:
        answers = _complete_chats(row, where)
    elif prompt is None:
        answers = _complete_texts(row, where)
    else:
        what = "'prompt' is a list of messages, 'chosen' and 'rejected' are none"
        raise refusal(what, where, FORM_REMEDY)
    return Preference(tuple(answers), _margin(row, where))


def _complete_chats(row: Mapping[str, Any], where: str) -> list[Conversation]:
    """Chats whose common messages are the prompt. A column `prompt` may repeat the first one."""
    chats = [message_list(row, key, where) for key in (CHOSEN, REJECTED)]
    same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*chats, strict=False)))
    if not same:
        what = "'chosen' and 'rejected' have no first message in common, so there is no prompt"
        raise refusal(what, where, "add the column 'prompt'")
    for key, chat in zip((CHOSEN, REJECTED), chats, strict=True):
        if len(chat) == same:
            what = f"{key!r} has no message after its common beginning with the other"
            raise refusal(what, where, LEAVE_OUT)
    common = chats[0][:same]
    if (text := row.get("prompt")) is not None and text not in [m.get("content") for m in common]:
        what = "'prompt' is a text, and no message that 'chosen' and 'rejected' share has it"
        raise refusal(what, where, "write 'prompt' as a list of messages, or leave it out")
    return [continued(common, chat[same:], row, where) for chat in chats]


def _complete_texts(row: Mapping[str, Any], where: str) -> list[Completion]:
    """Texts whose common beginning is the prompt. A space before the answers belongs to them."""
    chosen, rejected = (text_of(row, key, where) for key in (CHOSEN, REJECTED))
    both = zip(chosen, rejected, strict=False)
    same = sum(1 for _ in takewhile(lambda two: two[0] == two[1], both))
    if same < min(len(chosen), len(rejected)) and chosen[:same].endswith(" "):
        same -= 1
    if not same:
        what = "'chosen' and 'rejected' have no common beginning, so there is no prompt"
        raise refusal(what, where, "add the column 'prompt'")
    return [Completion(text[:same], text[same:]) for text in (chosen, rejected)]


def _margin(row: Mapping[str, Any], where: str) -> float | None:
    margin = row.get("margin")
    if margin is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise refusal(f"'margin' is {margin!r}, and no number", where, LEAVE_OUT)
    return float(margin)


def _rated(row: Mapping[str, Any], field: str, where: str) -> Preference:
    label = row.get("label")
    if not isinstance(label, bool):
        what = f"is {label!r}" if "label" in row else f"is missing; the row has {sorted(row)}"
        remedy = "write true for a good completion and false for a bad one"
        raise refusal(f"'label' {what}", where, remedy)
    return Preference((answer(row, "prompt", "completion", where),), 1.0 if label else -1.0)


FORMS = CHAT_FORMS | {
    "preference": RowForm((CHOSEN, REJECTED), _pair),
    "unpaired_preference": RowForm(("prompt", "completion", "label"), _rated),
}
"""By `data.sources.*.rows`."""


def field_of(rows: str, field: str) -> str:
    """The column of a source: `field`, or the form's own where the run file names none."""
    return FORMS[rows].field if field == "text" else field
