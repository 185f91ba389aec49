"""Remedies of messages about tokenizers, prepared datasets, chat templates and rows of chats."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from re import Match
from typing import Any

from holdfast.core.data.sample_order import Mixture
from holdfast.data.prepare.dataset_match import check_tokenizer_match
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stream.dataset import Dataset
from tests.runtime.cli.remedies.lab import Lab
from tests.runtime.data import test_chat_templates as chats
from tests.support.chat import CHATML, message_rows, tokenizer_folder, write_rows
from tests.support.corpus import batches, data_config, make, text_folder, text_source
from tests.support.models import train_tokenizer


# --- preparing ------------------------------------------------------------------------------
def begin(lab: Lab, **more: Any) -> None:
    text_folder(lab.folder / "in", files=6, words=60)
    lab.settings = {"folder": "out", "sources": ["in"], **more}


def prepare(lab: Lab) -> Dataset:
    """Prepare the dataset that the settings describe."""
    given = {key: value for key, value in lab.settings.items() if key not in ("lock", "made")}
    sources = [
        text_source(lab.folder / one, one) if isinstance(one, str) else one
        for one in given.pop("sources")
    ]
    folder = lab.folder / given.pop("folder")
    config = data_config(folder, *sources, **given)
    dataset = prepare_dataset(config, say=lambda _: None)
    batches(dataset, config)
    return dataset


def with_tokenizer(content: bytes | None, name: str = "tokenizer.json") -> Callable[[Lab], None]:
    """Begin with a tokenizer that is wrong; a good one lies in `good`."""

    def start(lab: Lab) -> None:
        begin(lab)
        good = lab.folder / "good" / "tokenizer.json"
        good.parent.mkdir()
        train_tokenizer(good)
        path = lab.folder / name
        if content is not None:
            shutil.copy(good, path)
            lab.spoil(path, content)
        lab.settings["tokenizer"] = {"path": str(path)}

    return start


def name_tokenizer(lab: Lab, found: Match[str]) -> None:
    lab.settings["tokenizer"] = {"path": lab.path("good/tokenizer.json")}


def train_one(lab: Lab, found: Match[str]) -> None:
    lab.settings["tokenizer"] = {"vocab_size": 300, "sample_bytes": 20_000}


def change_tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Lab], None]:
    def start(lab: Lab) -> None:
        with_tokenizer(b"")(lab)
        edit(lab, change)

    return start


def edit(lab: Lab, change: Callable[[dict[str, Any]], object]) -> None:
    fetch_again_text = (lab.folder / "good/tokenizer.json").read_text()
    path = lab.folder / "tokenizer.json"
    table = json.loads(path.read_text() or fetch_again_text)
    change(table)
    path.write_text(json.dumps(table))


def without_end(table: dict[str, Any]) -> None:
    ends = [token["content"] for token in table["added_tokens"]]
    table["added_tokens"] = []
    for end in ends:
        table["model"]["vocab"].pop(end, None)


def add_end(lab: Lab, found: Match[str]) -> None:
    def change(table: dict[str, Any]) -> None:
        token = {"id": 300, "content": found[1], "special": True, "single_word": False}
        table["added_tokens"] = [{**token, "lstrip": False, "rstrip": False, "normalized": False}]

    edit(lab, change)


def begin_slow_folder(lab: Lab) -> None:
    with_tokenizer(None)(lab)
    lab.write("slow/vocab.txt", "a\nb\n")
    lab.settings["tokenizer"] = {"path": lab.path("slow")}


def convert_slow(lab: Lab, found: Match[str]) -> None:
    """What transformers does, which may not be installed: a tokenizer.json lies there after it."""
    shutil.copy(lab.folder / "good/tokenizer.json", Path(found[1]))


def begin_other_alphabet(lab: Lab) -> None:
    with_tokenizer(None)(lab)
    vocabulary = {"<unk>": 0, "</s>": 1, "a": 2}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    edit_new = {"version": "1.0", "added_tokens": [], "model": model}
    lab.write("tokenizer.json", json.dumps({**edit_new, "pre_tokenizer": {"type": "Whitespace"}}))


def begin_neighbours(lab: Lab) -> None:
    with_tokenizer(None)(lab)
    shutil.copytree(lab.folder / "good", lab.folder / "set")
    lab.write("set/tokenizer_config.json", json.dumps({"eos_token": "<|none|>"}))
    lab.settings["tokenizer"] = {"path": lab.path("set/tokenizer.json")}


# --- a dataset that is there ----------------------------------------------------------------
def begin_damaged(name: str, damage: Callable[[bytes], bytes]) -> Callable[[Lab], None]:
    def start(lab: Lab) -> None:
        begin(lab)
        dataset = prepare(lab)
        path = next(dataset.folder.glob(name))
        path.write_bytes(damage(path.read_bytes()))

    return start


def open_dataset(lab: Lab) -> None:
    Dataset.open(lab.folder / lab.settings["folder"])


def remake(lab: Lab, found: Match[str]) -> None:
    """Remove the folder and run `holdfast data prepare` again."""
    shutil.rmtree(lab.folder / lab.settings["folder"])
    prepare(lab)


def begin_prepared(**changes: Any) -> Callable[[Lab], None]:
    def start(lab: Lab) -> None:
        begin(lab)
        prepare(lab)
        text_folder(lab.folder / "other", files=5, words=50, seed=9)
        lab.settings.update(changes)

    return start


def begin_other_place(lab: Lab) -> None:
    begin_prepared()(lab)
    lab.settings["sources"] = [text_source(lab.folder / "other", "in")]


def begin_newer(lab: Lab) -> None:
    begin(lab)
    path = prepare(lab).folder / "manifest.json"
    lab.settings["made"] = path.read_bytes()
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


def match_tokenizer(lab: Lab) -> None:
    dataset = Dataset.open(lab.folder / "out")
    check_tokenizer_match(dataset, Path(lab.settings["path"]))


def begin_other_tokenizer(lab: Lab) -> None:
    begin(lab)
    prepare(lab)
    train_tokenizer(lab.folder / "other.json")
    lab.settings["path"] = lab.path("other.json")


def begin_locked(lab: Lab) -> None:
    begin(lab)
    lab.settings["lock"] = lab.write("out/.prepare/lock", "").open("w")
    fcntl.flock(lab.settings["lock"], fcntl.LOCK_EX)


def begin_file_in_the_way(lab: Lab) -> None:
    begin(lab, folder="file/out")
    lab.write("file", "x")


def begin_same_text_twice(lab: Lab) -> None:
    begin(lab, sources=["in", "copy"])
    shutil.copytree(lab.folder / "in", lab.folder / "copy")


def begin_empty_text(lab: Lab) -> None:
    begin(lab, sources=["empty"])
    lab.write("empty/a.txt", "")


def begin_same_names(lab: Lab) -> None:
    begin(lab)
    lab.settings["sources"] = [text_source(lab.folder / "in", "a") for _ in "ab"]


def begin_light(lab: Lab) -> None:
    lab.settings["weights"] = [1.0, 1e-9]


def mix(lab: Lab) -> None:
    Mixture(lab.settings["weights"])


# --- chats ----------------------------------------------------------------------------------
def read_row(lab: Lab) -> None:
    given = {"template": CHATML, **lab.settings}
    row = given.pop("row")
    assert chats.read(row, **given)


def row(value: Any, **more: Any) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(row=value, **more)


def template(text: str) -> Callable[[Lab], None]:
    return row({"messages": chats.TALK}, template=text)


def begin_chat(template: str | None, eos: str = "<|im_end|>", **more: Any) -> Callable[[Lab], None]:
    def start(lab: Lab) -> None:
        lab.settings.update(eos=eos, template=template, **more)

    return start


def prepare_chat(lab: Lab) -> None:
    given = {"sequence_length": 128, "form": "messages", "rows": message_rows(12), **lab.settings}
    folder = tokenizer_folder(lab.folder / "tokenizer", given["template"], given["eos"])
    path = write_rows(lab.folder / "rows.jsonl", given["rows"])
    source = {"kind": "jsonl", "path": str(path), "rows": given["form"], "name": "chat"}
    shutil.rmtree(lab.folder / "dataset", ignore_errors=True)
    make(
        data_config(
            lab.folder / "dataset",
            source,
            tokenizer={"path": str(folder)},
            attention="document",
            sequence_length=given["sequence_length"],
            chat=given.get("chat", {}),
        )
    )


def name_template(lab: Lab, found: Match[str]) -> None:
    lab.settings["chat"] = {"template": found[1]}


def write_template(lab: Lab, found: Match[str]) -> None:
    path = lab.write("mine.jinja", CHATML)
    lab.settings["chat"] = {"template_file": str(path)}
