"""Keys of rows and messages of chat data: used, counted with their place, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.data.read.chat_borders import (
    COLUMNS,
    LEFT_OUT,
    MESSAGE_KEYS,
    TEMPLATE_KWARGS,
    ChatNotes,
)
from holdfast.data.read.chat_documents import EMPTY_REPLY
from holdfast.errors import DataError
from tests.runtime.data.test_chat_templates import ADD, TALK, WITH_TOOLS, read, trained
from tests.support.borders import unknown_entries
from tests.support.chat import CHATML

WHERE = "rows.jsonl:3"
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("messages", {"messages": TALK[1:3]}),
    "sharegpt": (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "Say one."},
                {"from": "gpt", "value": "One."},
            ]
        },
    ),
    "instruction": ("instruction", {"instruction": "Say one.", "output": "One."}),
    "prompt": ("prompt", {"prompt": [TALK[1]], "completion": [TALK[2]]}),
    "prompt, two texts": ("prompt", {"prompt": "Say one.", "completion": "One."}),
}
OF_LOSS = (
    *("weight", "weights", "train", "training", "loss", "mask", "labels", "label", "train_on_turn"),
    *("loss_mask", "sampleWeight", "is_masked", "train_detail", "completion_mask", "no_loss"),
)


@pytest.mark.parametrize("form", FORMS)
def test_columns_of_no_list_are_counted_and_those_of_loss_are_refused(form: str) -> None:
    rows, row = FORMS[form]
    drawn = unknown_entries(COLUMNS[form])
    notes = ChatNotes()
    assert read(row | drawn, rows=rows, notes=notes) == read(row, rows=rows)
    assert notes.seen.get(COLUMNS[form].name) == dict.fromkeys(drawn, (1, WHERE))
    for value in (0, False, 2, "no"):
        for key in OF_LOSS:
            with pytest.raises(DataError, match=rf"rows.jsonl:3: the row has {key} .*weight: 0"):
                read(row | {key: value}, rows=rows)
    read(row | {"weight": 1, "train": None}, rows=rows)
    for key in (key for key, plain in COLUMNS[form].plain.items() if not plain):
        with pytest.raises(DataError, match=rf"rows.jsonl:3: this has {key}"):
            read(row | {key: ["a"]}, rows=rows)
    assert "train_test_split" in unread(row | {"train_test_split": "train"}, rows)


def unread(row: dict[str, Any], rows: str = "messages", template: str = CHATML) -> set[str]:
    notes = ChatNotes()
    read(row, template, rows=rows, notes=notes)
    return {name for names in notes.seen.values() for name in names}


@pytest.mark.parametrize("form", ["messages", "sharegpt", "prompt"])
def test_keys_of_messages_are_alike_in_each_form(form: str) -> None:
    rows, row = FORMS[form]
    column = "completion" if form == "prompt" else next(iter(row))
    talk = row[column]

    def last(**more: Any) -> dict[str, Any]:
        return row | {column: [*talk[:-1], talk[-1] | more]}

    drawn = unknown_entries(MESSAGE_KEYS)
    assert unread(last(**drawn), rows) == set(drawn)
    for key in OF_LOSS[1:]:
        with pytest.raises(DataError, match=rf"rows.jsonl:3: message 2 has {key}"):
            read(last(**{key: False}), rows=rows)
    for key in MESSAGE_KEYS.plain:
        with pytest.raises(DataError, match=rf"leaves out {key} of message 2"):
            read(last(**{key: "a b"}), rows=rows)
    assert not read(last(weight=0), rows=rows).text
    with pytest.raises(DataError, match="other than 0 and 1"):
        read(last(weight=0.5), rows=rows)
    assert read(last(weight=0.5), rows=rows, weights=True).weights == (51,)


def test_a_key_that_the_template_reads_is_used() -> None:
    named = CHATML.replace("message['role'] +", "message['role'] + (message.name or '') +")
    row = {"messages": [TALK[1] | {"name": "Ann"}, TALK[2]]}
    assert "<|im_start|>userAnn" in read(row, named).text
    assert unread(row, template=named) == set()
    assert unread(row) == {"name"}


def test_kwargs_of_a_row_reach_the_template() -> None:
    thinks = "{{ mood | default('') }}" + CHATML
    row = {"messages": TALK[1:3]}
    given = row | {"chat_template_kwargs": {"mood": "calm"}}
    assert read(given, thinks).text.startswith("calm")
    drawn = unknown_entries(TEMPLATE_KWARGS) | {"mood": False}
    assert unread(row | {"chat_template_kwargs": drawn}) == set(drawn)
    with pytest.raises(DataError, match=r"the template reads mood.*chat_template_kwargs"):
        read(row | {"mood": False}, thinks)
    for key in TEMPLATE_KWARGS.plain:
        with pytest.raises(DataError, match=f"this has {key}"):
            read(row | {"chat_template_kwargs": {key: True}}, thinks)


@pytest.mark.parametrize("empty", ["", "  ", None])
def test_an_empty_reply_is_left_out_in_every_form(empty: str | None) -> None:
    rows = {
        "messages": {"messages": [TALK[1], TALK[2] | {"content": empty}]},
        "sharegpt": {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": empty or ""},
            ]
        },
        "instruction": {"instruction": "a", "output": empty or ""},
        "prompt": {"prompt": "a", "completion": empty or ""},
    }
    for form, row in rows.items():
        notes = ChatNotes()
        assert not read(row, rows=form, notes=notes).text
        assert notes.seen == {LEFT_OUT: {EMPTY_REPLY: (1, WHERE)}}
        assert next(notes.lines()) == f"left out: 1 rows that {EMPTY_REPLY} (first {WHERE})"
    call = {"role": "assistant", "content": empty, "tool_calls": [{"function": {"name": "add"}}]}
    assert "add" in read({"messages": [TALK[1], call], "tools": [ADD]}, WITH_TOOLS).text


@pytest.mark.parametrize(
    ("role", "meant"),
    [
        ("assistent", "assistant"),
        ("User", "user"),
        ("gpt", "assistant"),
        ("toll", "tool"),
        ("zzz", ""),
    ],
)
def test_a_role_that_nothing_knows_is_refused(role: str, meant: str) -> None:
    with pytest.raises(DataError) as refused:
        read({"messages": [*TALK, {"role": role, "content": "a"}]})
    assert f"rows.jsonl:3: message 6 has the role {role!r}" in str(refused.value)
    assert (f"did you mean {meant}?" in str(refused.value)) == bool(meant)
    mentions = CHATML + "{% if 'judge' %}{% endif %}"
    assert read({"messages": [{"role": "judge", "content": "a"}, *TALK]}, mentions).text


def test_a_reply_that_comes_first_is_trained_without_its_header() -> None:
    assert trained(read({"messages": [TALK[2], *TALK[1:3]]}))[0] == "One.<|im_end|>\n"
    with pytest.raises(DataError, match=r"begins with a reply.*fails in line 1.*weight: 0"):
        read({"messages": [TALK[2], *TALK[1:3]]}, "{{ messages[0].role[0] }}" + CHATML)
