"""Keys of rows and messages of chat data: used, counted with their place, or refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.read.chat_borders import (
    COLUMNS,
    LEFT_OUT,
    MESSAGE_KEYS,
    TEMPLATE_KWARGS,
    ChatNotes,
)
from holdfast.data.read.chat_documents import EMPTY_REPLY, ChatDocument, ChatFormat, ChatReader
from holdfast.data.read.chat_format import chat_settings, compile_templates, read_chat_format
from holdfast.data.read.chat_render import ChatTemplate
from holdfast.data.read.chat_templates import BY_KEY, joined
from holdfast.errors import DataError
from tests.runtime.data.test_chat_templates import ADD, TALK, WITH_TOOLS, read, trained
from tests.support.borders import unknown_entries
from tests.support.chat import CHATML, tokenizer_folder
from tests.support.corpus import data_config

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
    *("calculate_loss", "mask_history", "train_on_inputs"),
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


JSON_COLUMNS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("messages", {"messages": TALK, "tools": [ADD]}, ("messages", "tools")),
    ("sharegpt", FORMS["sharegpt"][1] | {"tools": [ADD]}, ("conversations", "tools")),
    ("instruction", FORMS["instruction"][1] | {"history": [["a", "b"]]}, ("history",)),
    ("prompt", FORMS["prompt"][1], ("prompt", "completion")),
)


@pytest.mark.parametrize(("rows", "row", "columns"), JSON_COLUMNS)
def test_columns_may_be_texts_of_json(
    rows: str, row: dict[str, Any], columns: tuple[str, ...]
) -> None:
    texts = {key: json.dumps(row[key]) for key in columns}
    assert read(row | texts, WITH_TOOLS, rows=rows) == read(row, WITH_TOOLS, rows=rows)
    each = {key: [json.dumps(one) for one in row[key]] for key in columns if key != "history"}
    assert read(row | each, WITH_TOOLS, rows=rows) == read(row, WITH_TOOLS, rows=rows)
    with pytest.raises(DataError, match=f"rows.jsonl:3: .*'{columns[-1]}'"):
        read(row | {columns[-1]: "[{"}, WITH_TOOLS, rows=rows)
    call = {"role": "assistant", "content": "", "tool_calls": json.dumps([{"name": "add"}])}
    assert "add" in read({"messages": [TALK[1], call]}, WITH_TOOLS).text


NULLS = CHATML.replace(
    "message['content'] +",
    "('NULL' if message.content is none else message['content']) + (message.calls or '') +",
)


def test_a_null_reaches_a_template_that_asks_for_it() -> None:
    row = {"messages": [{"role": "system", "content": None}, *TALK[1:]]}
    assert read(row, NULLS).text.startswith("<|im_start|>system\nNULL<|im_end|>")
    assert read(row).text.startswith("<|im_start|>system\n<|im_end|>")
    used = {"type": "function", "function": {"name": "add", "default": None}}
    assert '"default": null' in read({"messages": TALK, "tools": [used]}, WITH_TOOLS).text


def test_a_table_s_nulls_are_missing_keys(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet
    from xxhash import xxh3_128

    from holdfast.data.read.columnar_sources import read_records

    rows = [{"messages": [{"role": "user", "content": None, "name": "a"}], "x": None}, {"x": 1}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found: list[Any] = []

    def take(value: Any, where: str, *, bare: bool = False) -> str:
        found.append(value)
        return where

    path = str(tmp_path / "a.parquet")
    list(read_records("parquet", path, 0, 1, "", take, 10_000, xxh3_128()))
    assert found == [{"messages": [{"role": "user", "name": "a"}]}, {"x": 1}]


PARAMETERS = {"type": "object", "properties": {"left": {"description": "first number"}}}
DESCRIBED = {"function": {"name": "add", "description": "Adds up.", "parameters": PARAMETERS}}
CALL_OF_ADD = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
ARGUED = {"function": {"name": "add", "arguments": {"left": "one"}}}


def without(what: str, template: str = WITH_TOOLS) -> str:
    """The template with some words left out of what it writes."""
    return template.replace(
        "{{ tool | tojson }}", f"{{{{ tool | tojson | replace('{what}', '') }}}}"
    )


@pytest.mark.parametrize(
    ("row", "template", "words"),
    [
        ({"tools": [DESCRIBED]}, without("Adds up."), "the tool 'add' .*Adds up"),
        ({"tools": [DESCRIBED]}, without("first number"), "the tool 'add' .*first number"),
        ({"tools": [DESCRIBED]}, without("left"), "the tool 'add' .*left"),
        ({"documents": [{"title": "a", "text": "bc"}]}, CHATML, "document 1 .*bc"),
        (
            {"messages": [*TALK, {"role": "tool", "content": "42"}]},
            CHATML.replace("in messages %}", "in messages if message.role != 'tool' %}"),
            "message 6 of the role tool",
        ),
        ({"messages": [*TALK[:4], TALK[4] | {"thinking": "so"}]}, CHATML, "thinking of message 5"),
        ({"messages": [*TALK[:4], TALK[4] | {"images": ["a"]}]}, CHATML, "images of message 5"),
        (
            {"messages": [TALK[1], CALL_OF_ADD | {"tool_calls": [ARGUED]}]},
            WITH_TOOLS.replace("tojson if", "tojson | replace('one', '') if"),
            "an argument of 'add' in message 2.*one",
        ),
        (
            {"messages": [TALK[1], CALL_OF_ADD | {"tool_calls": [ARGUED]}]},
            WITH_TOOLS.replace("message.tool_calls | tojson", "message.tool_calls | string"),
            "in Python's form.*text of JSON",
        ),
    ],
)
def test_a_text_of_a_row_that_the_template_drops_is_refused(
    row: dict[str, Any], template: str, words: str
) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl:3: .*{words}"):
        read({"messages": TALK} | row, template)


def test_thoughts_have_the_names_of_transformers_and_earlier_ones_may_be_dropped() -> None:
    thinks = BY_KEY["chatml"].replace(
        "{{ message['content'] + '<|im_end|>' }}",
        "{{ (message.thinking if loop.last else '') + message['content'] + '<|im_end|>' }}",
    )
    talk = [TALK[1], TALK[2] | {"reasoning": "a"}, TALK[3], TALK[4] | {"reasoning": "So. "}]
    assert trained(read({"messages": talk}, thinks))[1] == "So. Two, of course.<|im_end|>"
    talk[1] = talk[1] | {"reasoning": "Zzz"}
    assert unread({"messages": talk}, template=thinks) == {
        "reasoning of earlier replies, or a part of it"
    }


def test_rows_with_tools_take_the_template_for_them(tmp_path: Path) -> None:
    """As a list in tokenizer_config.json, and as files in the folders of transformers."""
    listed = [{"name": "default", "template": CHATML}, {"name": "rag", "template": "R" + CHATML}]
    tools = {"name": "tool_use", "template": "T\n" + WITH_TOOLS}
    row = {"messages": TALK, "tools": [ADD]}
    folder = tokenizer_folder(tmp_path / "listed", [*listed, tools])
    made = [format_of(folder)]
    for name in ("chat_templates", "additional_chat_templates"):
        folder = tokenizer_folder(tmp_path / name, "ignored")
        (folder / name).mkdir()
        (folder / "chat_template.jinja").write_text(CHATML)
        for one in (listed[1], tools):
            (folder / name / f"{one['name']}.jinja").write_text(one["template"])
        made.append(format_of(folder))
    assert made[0] == made[1] == made[2]
    folder = tokenizer_folder(tmp_path / "both")  # the default is in tokenizer_config.json
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "tool_use.jinja").write_text(tools["template"])
    assert format_of(folder) == replace(made[0], others=())
    folder = tmp_path / "listed"
    notes = ChatNotes()
    reader = ChatReader("messages", "text", made[0], notes)
    documents = [reader.read(one, WHERE) for one in (row, row | {"tools": []})]
    texts = [ChatDocument.decode(one).text for one in documents]
    assert [text[:2] for text in texts] == ["T\n", "<|"]
    assert "template tool_use for 1 rows, default for 1 rows" in list(notes.lines())
    both = ChatTemplate(joined(made[0].template, made[0].tool_template), dict(made[0].variables))
    assert [both.render(TALK, WHERE, tools=t).text for t in ([ADD], None)] == texts
    assert chat_settings(made[0]) != chat_settings(replace(made[0], tool_template=""))
    assert format_of(folder, template_name="rag").template == "R" + CHATML
    with pytest.raises(DataError, match="template_name to default or rag or tool_use"):
        format_of(folder, template_name="rga")
    with pytest.raises(DataError, match=r"data.chat.template_name: rag"):
        reader.read({"messages": TALK, "documents": [{"text": "bc"}]}, WHERE)
    warm = format_of(folder, template_kwargs={"warm": True, "steps": 3})
    assert {("warm", True), ("steps", 3)} <= set(warm.variables)
    with pytest.raises(DataError, match=r"template_kwargs: the template does not read warm"):
        compile_templates(warm, {"warm": True})


def format_of(folder: Path, **chat: Any) -> ChatFormat:
    source = {"kind": "jsonl", "path": "rows.jsonl", "rows": "messages"}
    more = {"tokenizer": {"path": str(folder)}, "attention": "document", "chat": chat}
    found = read_chat_format(data_config(folder / "dataset", source, **more))
    assert found is not None
    return ChatFormat.from_json(json.loads(json.dumps(asdict(found))))
