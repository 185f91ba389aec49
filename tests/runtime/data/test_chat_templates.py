"""What of a conversation carries loss, and templates and masks that are refused.

Each is from a public report or from the FAQ of axolotl.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.read.chat_borders import LEFT_OUT, REPLY, ChatNotes
from holdfast.data.read.chat_documents import (
    NO_REPLY,
    SPELLS_TOKEN,
    ChatDocument,
    ChatFormat,
    ChatReader,
)
from holdfast.data.read.chat_render import ChatTemplate
from holdfast.data.read.chat_templates import BY_KEY
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.data.stages.chat_tokens import encode_rows
from holdfast.errors import DataError
from tests.support.chat import (
    CHATML,
    SPECIAL,
    conversation,
    message_rows,
    tokenizer_folder,
    write_rows,
)
from tests.support.corpus import data_config

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say one."},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "And two?"},
    {"role": "assistant", "content": "Two, of course."},
]
VARIABLES = (("bos_token", "<s>"), ("eos_token", "<|im_end|>"))


def read(
    row: Any,
    template: str = CHATML,
    rows: str = "messages",
    train_on: tuple[str, ...] = ("assistant",),
    notes: ChatNotes | None = None,
    weights: bool = False,
) -> ChatDocument:
    form = ChatFormat(template, VARIABLES, SPECIAL, train_on, weights)
    text = ChatReader(rows, "text", form, notes or ChatNotes()).read(row, "rows.jsonl:3")
    return ChatDocument.decode(text) if text else ChatDocument("", ())


def trained(document: ChatDocument) -> list[str]:
    return [document.text[start:stop] for start, stop in document.trained]


# --- masks ------------------------------------------------------------------------------------
def test_a_template_without_marks_trains_each_reply_up_to_the_next_message() -> None:
    found = read({"messages": TALK})
    assert trained(found) == ["One.<|im_end|>\n", "Two, of course.<|im_end|>\n"]
    assert found.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize(
    ("key", "stop"), [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("alpaca", "<|im_end|>")]
)
def test_a_template_by_name_trains_replies_and_their_stop_token(key: str, stop: str) -> None:
    found = read({"messages": TALK}, BY_KEY[key])
    assert trained(found) == [f"One.{stop}", f"Two, of course.{stop}"]


MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + eos_token + ' ' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{% endfor %}"
)
THINKS = (
    "{% set last = namespace(at=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.index0 > last.at %}"
    "{{ '<think>\\n' + message['reasoning_content'] | default('') + '\\n</think>\\n\\n' }}"
    "{% endif %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [(MISTRAL, " ", "<|im_end|> "), (GEMMA, "", "<end_of_turn>\n"), (ZEPHYR, "", "<|im_end|>\n")],
    ids=["mistral", "gemma", "zephyr"],
)
def test_forms_of_public_templates_are_understood(template: str, before: str, after: str) -> None:
    found = read({"messages": TALK[1:]}, template)
    assert trained(found) == [f"{before}{text}{after}" for text in ("One.", "Two, of course.")]


def test_thoughts_carry_loss_and_earlier_ones_that_are_dropped_are_refused() -> None:
    last = TALK[4] | {"reasoning_content": "One more."}
    talk = [TALK[1], TALK[2] | {"weight": 0}, TALK[3], last]
    (text,) = trained(read({"messages": talk}, THINKS))
    assert text == "<think>\nOne more.\n</think>\n\nTwo, of course.<|im_end|>\n"
    with pytest.raises(DataError, match="message 2, rendered alone, is no beginning"):
        read({"messages": [*TALK[1:4], last]}, THINKS)


def test_other_roles_can_carry_loss_and_single_messages_can_not() -> None:
    found = read({"messages": TALK}, train_on=("user",))
    assert trained(found) == [
        "<|im_start|>user\nSay one.<|im_end|>\n",
        "<|im_start|>user\nAnd two?<|im_end|>\n",
    ]
    weighted = [*TALK[:2], TALK[2] | {"weight": 0}, *TALK[3:]]
    for template in (CHATML, BY_KEY["chatml"]):
        found = read({"messages": weighted}, template)
        assert [text.rstrip() for text in trained(found)] == ["Two, of course.<|im_end|>"]


FORM_ROWS: dict[str, dict[str, Any]] = {
    "sharegpt": {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "Say one."},
            {"from": "gpt", "value": "One."},
            {"from": "human", "value": "And two?"},
            {"from": "gpt", "value": "Two, of course."},
        ],
    },
    "instruction": {
        "system": "Be brief.",
        "history": [["Say one.", "One."]],
        "instruction": "And",
        "input": "two?",
        "output": "Two, of course.",
    },
    "prompt": {"prompt": TALK[:4], "completion": TALK[4:]},
}


@pytest.mark.parametrize(("rows", "row"), FORM_ROWS.items())
def test_each_form_of_rows_becomes_the_same_messages(rows: str, row: dict[str, Any]) -> None:
    found = read(row, rows=rows)
    expected = read({"messages": TALK})
    assert found.text == expected.text.replace(
        "And two?", "And\ntwo?" if "input" in row else "And two?"
    )
    assert trained(found)[-1] == "Two, of course.<|im_end|>\n"
    assert len(found.trained) == (1 if rows == "prompt" else 2)


def test_a_prompt_of_text_needs_no_template() -> None:
    found = read({"prompt": "2 + 2 =", "completion": " 4"}, template="", rows="prompt")
    assert (found.text, trained(found), found.is_framed) == ("2 + 2 = 4", [" 4"], True)


def test_masks_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tokenizer_folder(tmp_path / "tokenizer", BY_KEY["chatml"])
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder / "tokenizer.json")
    for seed in range(12):
        talk = conversation(seed, 1 + seed % 3)
        text = read({"messages": talk}, BY_KEY["chatml"]).encode()
        ((found,),) = (row.documents for row in encode_rows([text], ours, None, 0))  # type: ignore[arg-type]
        wanted = theirs.apply_chat_template(
            talk, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        assert found.ids.tolist() == wanted["input_ids"]
        assert found.mask.tolist() == wanted["assistant_masks"]


# --- rows that are left out --------------------------------------------------------------------
def test_rows_without_a_reply_or_with_a_special_token_are_left_out_and_counted() -> None:
    notes = ChatNotes()
    for talk in (
        TALK[:2],
        [TALK[1], TALK[2] | {"weight": 0}],
        [TALK[1] | {"content": "Say <|im_end|>"}, TALK[2]],
    ):
        assert not read({"messages": talk}, notes=notes).text
    where = "rows.jsonl:3"
    assert notes.seen == {LEFT_OUT: {NO_REPLY: (2, where), SPELLS_TOKEN: (1, where)}}


# --- tools -------------------------------------------------------------------------------------
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{{ '<|im_end|>' }}{% endfor %}"
    + CHATML.replace(
        "message['content']",
        "message['content'] + (message.tool_calls | tojson if message.tool_calls else '')",
    )
)
CALL = {"role": REPLY, "content": None, "tool_calls": [{"function": {"name": "add"}}]}
QUOTED = CALL | {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
CALLED = [TALK[1], CALL, {"role": "tool", "content": "2"}, TALK[2]]


def test_tools_may_be_a_list_or_a_text_of_json() -> None:
    found = [
        read({"messages": CALLED, "tools": tools}, WITH_TOOLS)
        for tools in ([ADD], json.dumps([ADD]))
    ]
    assert found[0] == found[1]
    assert found[0].text.startswith(json.dumps(ADD))
    for rows, row in FORM_ROWS.items():
        assert '"add"' in read(row | {"tools": json.dumps([ADD])}, WITH_TOOLS, rows=rows).text
    for none in (None, "", [], "[]"):
        assert read({"messages": TALK, "tools": none}, WITH_TOOLS) == read({"messages": TALK})


@pytest.mark.parametrize(
    ("row", "template", "words"),
    [
        ({"messages": CALLED}, CHATML, "leaves out the call of 'add' in message 2"),
        (
            {"messages": [TALK[1], QUOTED, *CALLED[2:]]},
            WITH_TOOLS,
            "writes the arguments of 'add' in message 2 as a quoted text",
        ),
        ({"messages": TALK, "tools": [ADD]}, CHATML, "leaves out the tool 'add'"),
        ({"messages": TALK, "tools": "add"}, WITH_TOOLS, "has a text, and no JSON"),
        ({"messages": TALK, "tools": {"add": 1}}, WITH_TOOLS, "no list of objects"),
    ],
)
def test_tools_that_would_not_be_trained_on_are_refused(
    row: dict[str, Any], template: str, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        read(row, template)


# --- broken templates --------------------------------------------------------------------------
NO_REPLIES = CHATML.replace(
    "message['content']", "(message['content'] if message['role'] == 'user' else '')"
)
LOOKS_AHEAD = CHATML.replace(
    "message['content']", "(message['content'] if loop.last else message['content'] | upper)"
)
MARKS_HEADER = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ '<|im_start|>assistant\\n' }}{% endgeneration %}"
    "{{ message['content'] + '<|im_end|>' }}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (NO_REPLIES, ["reply in message 3 ends with 'One.'", "not in its place"]),
        (
            LOOKS_AHEAD,
            ["message 3", "no beginning of the full text", "from character", "template_file"],
        ),
        (MARKS_HEADER, ["message 3 ends with 'One.'", "between {% generation %}"]),
        ("{{ messages[0].__class__.__mro__ }}", ["SecurityError", "unsafe"]),
        ("{{ strftime_now('%d %b %Y') }}", ["strftime_now", "clock"]),
        ("{{ messages[0]['content'] + none }}", ["fails in line 1", "TypeError"]),
    ],
    ids=["no reply", "looks ahead", "marked header", "sandbox", "clock", "none"],
)
def test_a_template_that_does_not_fit_is_refused_with_its_row(
    template: str, words: list[str]
) -> None:
    with pytest.raises(DataError) as refused:
        read({"messages": TALK}, template)
    assert refused.value.where == "rows.jsonl:3"
    for word in words:
        assert word in str(refused.value)


def test_a_template_that_is_none_is_refused_with_its_line() -> None:
    with pytest.raises(DataError, match="line 2 is not a template"):
        ChatTemplate("{% if true %}\n{% endfor %}", {})


@pytest.mark.parametrize(
    ("rows", "row", "words"),
    [
        ("messages", {"text": "a"}, "'messages' is no list of messages; the row has ['text']"),
        ("messages", {"chat": TALK}, "set field: chat in data.sources"),
        ("messages", {"mesages": TALK}, "'mesages': did you mean messages?"),
        ("messages", {"messages": [{"from": "gpt"}]}, "a message has no role"),
        ("messages", {"messages": [{"rol": "user", "content": "a"}]}, "'rol': did you mean role?"),
        ("sharegpt", {"conversations": [{"from": "gpt", "valu": "a"}]}, "'valu': did you mean"),
        ("messages", {"messages": [{"role": "user", "content": [{"image": 1}]}]}, "no text"),
        ("messages", {"messages": [TALK[1] | {"weight": 0.333}]}, "weight 0.333"),
        ("messages", {"messages": [TALK[1], TALK[2] | {"weight": 0.5}]}, "other than 0 and 1"),
        ("sharegpt", {"conversations": [{"from": "me", "value": "a"}]}, "from 'me'"),
        ("instruction", {"instruction": "a"}, "'output' is missing"),
        ("prompt", {"prompt": "a", "completion": 1}, "'completion' is no text but int"),
        ("messages", ["a"], "no object"),
    ],
)
def test_a_row_of_another_form_is_refused(rows: str, row: Any, words: str) -> None:
    with pytest.raises(DataError) as refused:
        read(row, rows=rows)
    assert words in str(refused.value)


# --- the gate over a set -----------------------------------------------------------------------
def prepare(
    root: Path, template: str | None, rows: list[Any] | None = None, **more: Any
) -> list[str]:
    """The lines of a preparation with that template."""
    eos = more.pop("eos", "<|im_end|>")
    folder = tokenizer_folder(root / "tokenizer", template, eos)
    path = write_rows(root / "rows.jsonl", message_rows(12) if rows is None else rows)
    form = more.pop("rows_form", "messages")
    config = data_config(
        root / "dataset",
        {"kind": "jsonl", "path": str(path), "rows": form, "name": "chat"},
        tokenizer={"path": str(folder)},
        attention="document",
        sequence_length=128,
        **more,
    )
    lines: list[str] = []
    prepare_dataset(config, say=lines.append)
    return lines


def test_a_preparation_shows_a_row_with_its_mask(tmp_path: Path) -> None:
    lines = "\n".join(prepare(tmp_path, CHATML))
    assert "chat: 12 rows, " in lines
    assert "<|im_start|>assistant\n[[" in lines
    assert "<|im_end|>\n]]" in lines


@pytest.mark.parametrize(
    ("template", "more", "words"),
    [
        (None, {}, ["has no chat template", "data.chat.template"]),
        (CHATML, {"chat": {"train_on": ["tool"]}}, ["nothing is left of 12 documents"]),
        (
            CHATML,
            {"rows": [{"prompt": "", "completion": "a b"}], "rows_form": "prompt"},
            ["everything carries loss"],
        ),
    ],
    ids=["no template", "no such role", "no prompt"],
)
def test_a_set_that_teaches_the_wrong_thing_is_refused(
    tmp_path: Path, template: str | None, more: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(DataError) as refused:
        prepare(tmp_path, template, **more)
    for word in words:
        assert word in str(refused.value)
    assert not (tmp_path / "dataset" / "manifest.json").exists()


def test_jinja_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from holdfast.data.read import chat_render

    monkeypatch.setitem(sys.modules, "jinja2", None)
    chat_render._environment.cache_clear()
    with pytest.raises(DataError, match=r"pip install 'holdfast\[chat\]'"):
        ChatTemplate(CHATML, {})


def test_offsets_without_white_space_give_the_same_mask(tmp_path: Path) -> None:
    """Many tokenizers leave white space out of their offsets."""
    folder = tokenizer_folder(tmp_path / "tokenizer")
    plain = load_tokenizer(folder / "tokenizer.json")
    value = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    value["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    (folder / "tokenizer.json").write_text(json.dumps(value), "utf-8")
    trimmed = load_tokenizer(folder / "tokenizer.json")
    texts = [read({"messages": conversation(seed, 2)}).encode() for seed in range(8)]
    for a, b in zip(
        encode_rows(texts, plain, None, 0),  # type: ignore[arg-type]
        encode_rows(texts, trimmed, None, 0),  # type: ignore[arg-type]
        strict=True,
    ):
        assert np.array_equal(a.documents[0].ids, b.documents[0].ids)
        assert np.array_equal(a.documents[0].mask, b.documents[0].mask)


# --- templates and masks of public reports --------------------------------------------------------
HEADER = "<|im_start|>assistant"
ANSWER = "It is two, because two comes right after one when we count."
THOUGHT = {"role": "assistant", "content": f"<think>\nOne, and then?\n</think>\n\n{ANSWER}"}


@dataclass(frozen=True)
class Report:
    """report: an issue (#) or a pull request (!). what: what was trained wrongly there."""

    report: str
    what: str
    words: tuple[str, ...]  # of the refusal
    template: str = CHATML
    rows: tuple[Any, ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.report


def messages(*talk: dict[str, Any]) -> tuple[Any, ...]:
    return ({"messages": list(talk)},)


def replies_become(text: str) -> str:
    """ChatML with other content for a reply."""
    return CHATML.replace(
        "message['content']", f"({text} if message['role'] == 'assistant' else message['content'])"
    )


REPORTS = (
    Report(
        "marin-community/marin#7237",
        "a mask of zeros: the template marks no reply",
        ("2 replies", "marks 0 parts", "generation"),
        CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}",
        messages(*TALK),
    ),
    Report(
        "NVIDIA-NeMo/Megatron-Bridge#2598",
        "a mask of ones: prompts are trained as well",
        ("everything carries loss", "rows: text"),
        "{% generation %}" + CHATML + "{% endgeneration %}",
        tuple({"messages": conversation(seed)} for seed in range(6)),
    ),
    Report(
        "huggingface/trl!5988",
        "the end of a reply is a token of the next message: the model never stops",
        ("no reply ends with a stop token (<|im_end|>)", "eos_token"),
        BY_KEY["chatml"].replace(
            "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
            "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
        ),
    ),
    Report(
        "axolotl-ai-cloud/axolotl!3756",
        "the folder's eos_token is none that the template writes",
        ("no reply ends with a stop token (<|endoftext|>)", "eos_token"),
        settings={"eos": "<|endoftext|>"},
    ),
    Report(
        "OpenRLHF/OpenRLHF#393",
        "two begin tokens",
        ("begins with '<|endoftext|>' twice",),
        "{{ '<|endoftext|><|endoftext|>' }}" + CHATML,
    ),
    Report(
        "huggingface/trl#4147",
        "the header of a reply is trained, because add_generation_prompt does nothing",
        (f"begins with '{HEADER}", "add_generation_prompt"),
        CHATML.replace("{% if add_generation_prompt %}", "{% if false %}"),
    ),
    Report(
        "modelscope/ms-swift#4939",
        "thoughts of earlier replies are dropped once another message follows",
        ("no beginning of the full text", "generation"),
        replies_become(
            "message['content'] if loop.last else message['content'].split('</think>')[-1]"
        ),
        messages(TALK[1], THOUGHT, TALK[3], THOUGHT),
    ),
    Report(
        "huggingface/trl!6766",
        "the thoughts of the only reply are cut off, and so are never trained",
        ("leaves out a part of the reply in message 2", "One, and then?"),
        replies_become("message['content'].split('</think>')[-1]"),
        messages(TALK[3], THOUGHT),
    ),
    Report(
        "raullenchai/Rapid-MLX#1765",
        "a system message in the middle is dropped",
        ("leaves out message 3 of the role system", "Be brief."),
        CHATML.replace(
            "{% for message in messages %}",
            "{% for message in messages if loop.index0 == 0 or message['role'] != 'system' %}",
        ).replace("loop.index0 == 0", "message == messages[0]"),
        messages(*TALK[1:3], TALK[0], *TALK[3:]),
    ),
    Report(
        "sgl-project/sglang#40082",
        "a role that the template does not know is dropped",
        ("leaves out message 1 of the role developer",),
        CHATML.replace(
            "{% for message in messages %}",
            "{% for message in messages if message['role'] in ('system', 'user', 'assistant') %}",
        ),
        messages({"role": "developer", "content": "Answer in verse."}, *TALK[1:]),
    ),
    Report(
        "huggingface/trl!5526",
        "an end token stands wherever no reply is asked for, so also after a prompt alone",
        ("no beginning of the full text", "generation"),
        CHATML.replace("{% endif %}", "{% else %}{{ '<|endoftext|>' }}{% endif %}"),
        messages(*TALK),
    ),
    Report(
        "huggingface/smol-course#260",
        "rows whose roles do not alternate, as the template demands",
        ("fails in line 1", "roles must alternate", "leave it out"),
        "{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
        "{{ message['content'] }}{% endfor %}",
        messages(*TALK[1:3], TALK[4]),
    ),
)


@pytest.mark.parametrize("case", REPORTS, ids=str)
def test_what_a_public_report_trained_wrongly_is_refused(case: Report, tmp_path: Path) -> None:
    rows = None if case.rows is None else list(case.rows)
    with pytest.raises(DataError) as refused:
        prepare(tmp_path, case.template, rows, **case.settings)
    for word in case.words:
        assert word in str(refused.value)
    assert not (tmp_path / "dataset" / "manifest.json").exists()


def test_a_system_message_that_a_template_folds_into_the_request_is_no_loss(tmp_path: Path) -> None:
    """The form of Gemma 3 and Mistral: nothing is dropped, so nothing is refused."""
    folded = (
        "{% if messages[0]['role'] == 'system' %}"
        "{% set first = messages[0]['content'] + '\\n\\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
        "{% endif %}{% for message in rest %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{{ (first if loop.first else '') + message['content'] | trim + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    lines = "\n".join(prepare(tmp_path, folded, list(messages(*TALK) * 4), deduplicate=False))
    assert "<|im_start|>user\nBe brief.\n\nSay one.<|im_end|>" in lines
