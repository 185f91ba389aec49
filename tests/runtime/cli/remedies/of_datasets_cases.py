"""The table of `of_datasets.py`."""

from __future__ import annotations

import shutil
from typing import Any

from tests.runtime.cli.remedies.lab import Case, case, fetch_again, fixed
from tests.runtime.cli.remedies.of_datasets import (
    add_end,
    begin,
    begin_chat,
    begin_damaged,
    begin_empty_text,
    begin_file_in_the_way,
    begin_light,
    begin_locked,
    begin_neighbours,
    begin_newer,
    begin_other_alphabet,
    begin_other_place,
    begin_other_tokenizer,
    begin_prepared,
    begin_same_names,
    begin_same_text_twice,
    begin_slow_folder,
    change_tokenizer,
    convert_slow,
    edit,
    match_tokenizer,
    mix,
    name_template,
    name_tokenizer,
    open_dataset,
    prepare,
    prepare_chat,
    read_row,
    remake,
    row,
    template,
    train_one,
    with_tokenizer,
    without_end,
    write_template,
)
from tests.runtime.data import test_chat_templates as chats
from tests.support.chat import CHATML

D, V, P, M, K = (
    f"data/{name}.py: "
    for name in ("dataset", "vocabulary", "prepare", "dataset_match", "tokenizer_check")
)
R, S, G, T = (f"data/chat_{name}.py: " for name in ("rows", "documents", "gate", "templates"))
OTHER = r"name another data.folder, or remove this one"
REMAKE = r"remove the folder and run holdfast data prepare again"
GIVE_ONE = r"name a tokenizer.json, or leave it out to train one"
MEND_TEMPLATE = r"mend the template in a copy of the folder, or name another in data.chat"
FORM = r"mend the row, or set rows in data.sources to its form \(docs/guide/fine-tuning.md\)"
NAME_TEMPLATE = r"set data.chat.template to (chatml), llama3 or alpaca, or name a file of your own"
MARK = (
    r"mark replies with \{% generation %\} in a copy of the template, and name it in "
    r"data.chat.template_file"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GOOD_ROW = {"messages": chats.TALK}


def refused_template(
    text: str, site: str, remedy: str = MEND_TEMPLATE, messages: Any = chats.TALK
) -> Case:
    begin = row({"messages": messages}, template=text)
    return case(S + site, begin, read_row, remedy, fixed(template=MARKED))


def refused_row(site: str, value: Any, remedy: str, good: Any, **more: Any) -> Case:
    return case(R + site, row(value, **more), read_row, remedy, fixed(row=good))


def form(site: str, value: Any, good_form: str) -> Case:
    """A row of another form than the source's: the form is named."""
    return case(R + site, row(value), read_row, FORM, fixed(rows=good_form))


CASES: list[Case] = [
    case(V + "… does not exist", with_tokenizer(None), prepare, GIVE_ONE, name_tokenizer),
    case(V + "… does not exist", with_tokenizer(None), prepare, GIVE_ONE, train_one),
    case(V + "… is empty", with_tokenizer(b""), prepare, r"fetch it again", fetch_again),
    case(
        V + "… is not a tokenizer.json (it is not UTF-8)",
        with_tokenizer(b"\xff\xfe"),
        prepare,
        GIVE_ONE,
        name_tokenizer,
    ),
    case(V + "… is not a tokenizer.json (…)", with_tokenizer(b"{}"), prepare, GIVE_ONE, train_one),
    case(
        V + "… holds no tokenizer.json, only … | ",
        begin_slow_folder,
        prepare,
        r"write one with transformers: AutoTokenizer.from_pretrained\('.*'\)"
        r".save_pretrained\('(.*)'\)",
        convert_slow,
    ),
    case(
        V + "… is random: with model.dropout … the same text gives other tokens each time",
        change_tokenizer(lambda table: table["model"].update(dropout=0.5)),
        prepare,
        r"set model.dropout to null in a copy of the file",
        lambda lab, found: edit(lab, lambda table: table["model"].update(dropout=None)),
    ),
    case(
        V + "… has no end-of-text token",
        change_tokenizer(without_end),
        prepare,
        r"add one of (\S+), .* to its added tokens",
        add_end,
    ),
    case(
        V + "the files next to … name the end token …, which it does not have",
        begin_neighbours,
        prepare,
        r"fetch the folder again, or name a tokenizer.json that lies alone",
        name_tokenizer,
    ),
    case(
        K + "(check_tokenizer)",
        begin_other_alphabet,
        prepare,
        r"name a tokenizer of this language, or leave it out to train one",
        train_one,
    ),
    case(
        "data/read/containers.py: (pointer_error)",
        with_tokenizer(b"version https://git-lfs.github.com/spec/v1\nsize 1\n"),
        prepare,
        r"run git lfs pull where it was cloned",
        fetch_again,
    ),
    case(
        D + "the shard …, it was written with …",
        begin_damaged("shards/train-*.bin", lambda content: content[:-2]),
        open_dataset,
        REMAKE,
        remake,
    ),
    case(
        D + "the manifest is not what was written",
        begin_damaged("manifest.json", lambda content: content + b" "),
        open_dataset,
        REMAKE,
        remake,
    ),
    case(
        D + "the tokenizer is missing or is not the one the tokens were made with",
        begin_damaged("tokenizer.json", lambda content: content + b" "),
        open_dataset,
        REMAKE,
        remake,
    ),
    case(
        D + "there is no prepared dataset",
        begin,
        open_dataset,
        r"run holdfast data prepare",
        lambda lab, found: prepare(lab),
    ),
    case(
        D + "format … is newer than this program's (…)",
        begin_newer,
        open_dataset,
        r"use a newer holdfast",
        lambda lab, found: (lab.folder / "out/manifest.json").write_bytes(lab.settings["made"]),
    ),
    case(
        M + "the dataset there was prepared with another data.… (…, not …)",
        begin_prepared(validation_fraction=0.5),
        prepare,
        OTHER,
        fixed(folder="new"),
    ),
    case(
        M + "the dataset there was prepared with another data.… (…, not …)",
        begin_prepared(validation_fraction=0.5),
        prepare,
        OTHER,
        lambda lab, found: shutil.rmtree(lab.folder / "out"),
    ),
    case(
        M + "the dataset there was prepared with another data.sources (…, not …, which holds other "
        "text)",
        begin_other_place,
        prepare,
        OTHER,
        fixed(folder="new"),
    ),
    case(
        M + "… does not match the dataset in …: …",
        begin_other_tokenizer,
        match_tokenizer,
        r"use (\S+), or name another data.folder",
        lambda lab, found: lab.settings.update(path=found[1]),
    ),
    case(
        P + "… is a file, not a folder",
        begin_file_in_the_way,
        prepare,
        r"name another folder",
        fixed(folder="out"),
    ),
    case(
        P + "another process is preparing this dataset",
        begin_locked,
        prepare,
        r"wait for it, or name another data.folder",
        lambda lab, found: lab.settings.pop("lock").close(),
    ),
    case(
        "data/stages/dedup_split.py: nothing is left of … documents: … | ",
        begin_same_text_twice,
        prepare,
        r"set data.deduplicate: (within_source) to keep what other sources have too, or leave the "
        r"source out",
        lambda lab, found: lab.settings.update(deduplicate=found[1]),
    ),
    case(
        "data/stages/dedup_split.py: nothing is left of … documents: … | ",
        begin_empty_text,
        prepare,
        r"name files that hold text, or for chats .*",
        fixed(sources=["in"]),
    ),
    case(
        "data/read/sources.py: two sources are named …",
        begin_same_names,
        prepare,
        r"give each its own name",
        lambda lab, found: lab.settings.update(sources=["in"]),
    ),
    case(
        "core/data/sample_order.py: the weight … is less than a ten-thousandth of all weights",
        begin_light,
        mix,
        r"raise it, or leave the source out",
        fixed(weights=[1.0, 0.1]),
    ),
    refused_template(
        chats.HEADER_ONLY,
        "the text of message … begins with …, because the template does not begin a reply when "
        "add_generation_prompt is true",
    ),
    refused_template(chats.NO_REPLIES, "the reply in message … ends with …, which is not …: …"),
    refused_template(
        chats.NO_REPLIES.replace("else ''", "else message['content'][-40:]"),
        "the template leaves out a part of the reply in message …: of … it keeps …",
        messages=[chats.TALK[1], chats.TALK[2] | {"content": "One. " * 20}],
    ),
    refused_template(
        chats.CHATML.replace("messages %}", "messages if message['role'] != 'system' %}"),
        "the template leaves out message … of the role …, or a part of it: …",
    ),
    refused_template(
        chats.LOOKS_AHEAD,
        "the text … message …, rendered alone, is no beginning of the full text: from character … "
        "on it has …, not …",
        MARK,
    ),
    refused_template(
        chats.MARKS_NOTHING,
        "the row has … replies, and the template marks … parts with {% generation %}",
    ),
    case(
        S + "the template leaves out the tool … of the row",
        row(GOOD_ROW | {"tools": [chats.ADD]}),
        read_row,
        r"mend the template in a copy of the folder, or name another in data.chat",
        fixed(template=chats.WITH_TOOLS),
    ),
    case(
        S + "the template leaves out the call of … in message …",
        row({"messages": chats.CALLED}),
        read_row,
        r"mend the template in a copy of the folder, or name another in data.chat",
        fixed(template=chats.WITH_TOOLS),
    ),
    case(
        S + "the template writes the arguments of … in message … as a quoted text: …",
        row({"messages": [chats.TALK[1], chats.QUOTED]}, template=chats.WITH_TOOLS),
        read_row,
        r"write arguments as an object, not as a text of JSON",
        fixed(row={"messages": [chats.TALK[1], chats.CALL]}),
    ),
    refused_row("'tools' is a text, and no JSON", GOOD_ROW | {"tools": "add"}, FORM, GOOD_ROW),
    refused_row("'tools' is no list of objects", GOOD_ROW | {"tools": ["a"]}, FORM, GOOD_ROW),
    case(
        S + "the row is no object",
        row(["a"]),
        read_row,
        r"write one object a row",
        fixed(row=GOOD_ROW),
    ),
    case(
        S + "a message has a weight other than 0 and 1",
        row({"messages": [chats.TALK[1], chats.TALK[2] | {"weight": 0.5}]}),
        read_row,
        r"use 1, or 0 for one without loss, or set data.chat.weights=(true)",
        fixed(weights=True),
    ),
    case(
        S + "the row has messages, and the tokenizer's folder has no chat template",
        row(GOOD_ROW, template=""),
        read_row,
        NAME_TEMPLATE,
        lambda lab, found: lab.settings.update(template=chats.BY_KEY[found[1]]),
    ),
    case(
        S + "a message has U+FDD0 or U+FDD1, which are no characters",
        row({"messages": [chats.TALK[1], {"role": "assistant", "content": "a\ufdd0"}]}),
        read_row,
        r"remove them",
        fixed(row=GOOD_ROW),
    ),
    case(
        "data/read/chat_render.py: line … is not a template that jinja2 knows (…)",
        template("{% if true %}\n{% endfor %}"),
        read_row,
        r"mend it, or name another in data.chat",
        fixed(template=CHATML),
    ),
    case(
        "data/read/chat_render.py: the chat template fails in line …: …: …",
        template(chats.ALTERNATES),
        read_row,
        r".*leave it out.*|.*another.*",
        fixed(template=CHATML),
    ),
    form(
        "… is no list of messages; the row has …",
        {"text": "a", "prompt": "", "completion": "b"},
        "prompt",
    ),
    refused_row(
        "a message has no role; it has …", {"messages": [{"content": "a"}]}, FORM, GOOD_ROW
    ),
    refused_row(
        "a message's content is no text",
        {"messages": [{"role": "user", "content": [{"image": 1}]}]},
        r"leave out rows with other media",
        GOOD_ROW,
    ),
    refused_row(
        "a message has weight …",
        {"messages": [chats.TALK[1] | {"weight": 0.333}, chats.TALK[2]]},
        r"use 1, 0 for one without loss, or with data.chat.weights hundredths up to 2.54",
        {"messages": [chats.TALK[1] | {"weight": 1}, chats.TALK[2]]},
    ),
    refused_row(
        "… …; the row has …",
        {"instruction": "a"},
        FORM,
        {"instruction": "a", "output": "b"},
        rows="instruction",
    ),
    case(
        G
        + "no reply ends with a stop token (…), so the model would not learn to stop: the trained "
        "part ends with …",
        begin_chat(CHATML, "<|endoftext|>"),
        prepare_chat,
        r"mend the template, or name the right eos_token in tokenizer_config.json",
        fixed(eos="<|im_end|>"),
    ),
    case(
        G
        + "no reply ends with a stop token (…), so the model would not learn to stop: the trained "
        "part ends with …",
        begin_chat(chats.STOP_UNTRAINED),
        prepare_chat,
        r"mend the template, or name the right eos_token in tokenizer_config.json",
        fixed(template=CHATML),
    ),
    case(
        G + "each row begins with … twice",
        begin_chat(chats.TWICE),
        prepare_chat,
        r"mend the template",
        fixed(template=CHATML),
    ),
    case(
        G + "everything carries loss, prompts as well",
        begin_chat(CHATML, rows=[{"prompt": "", "completion": "a b"}], form="prompt"),
        prepare_chat,
        r"mend the template or the rows, or use rows: text to train on all text",
        fixed(rows=[{"prompt": "Say a and b.", "completion": "a b"}] * 6),
    ),
    case(
        T + "… has no chat template, neither … nor in tokenizer_config.json",
        begin_chat(None),
        prepare_chat,
        NAME_TEMPLATE,
        name_template,
    ),
    case(
        T + "… has no chat template, neither … nor in tokenizer_config.json",
        begin_chat(None),
        prepare_chat,
        NAME_TEMPLATE,
        write_template,
    ),
    case(
        T + "… cannot be read (…)",
        begin_chat(CHATML, chat={"template_file": "/none.jinja"}),
        prepare_chat,
        r"name a file with a chat template",
        write_template,
    ),
]
