"""Remedies of messages about prepared sets, rows of chats, drawn faults and commands of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from re import Match
from types import SimpleNamespace
from typing import cast

from tokenizers import Tokenizer

from holdfast.data.read.sources import encode_document
from holdfast.data.read.tokenizer_check import check_tokenizer
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.data.stream.dataset import Dataset
from holdfast_lab.chaos.catalog import FAULTS
from holdfast_lab.chaos.layouts import CHAOS_LAYOUTS, parse_layout
from holdfast_lab.chaos.schedule import check_faults_possible, parse_faults_option, read_trace
from holdfast_lab.commands import chaos
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.runtime.cli.remedies.of_commands import schedule, word
from tests.runtime.cli.remedies.of_datasets import (
    begin,
    begin_chat,
    prepare,
    prepare_chat,
    remake,
)
from tests.runtime.cli.remedies.of_datasets_cases import REMAKE
from tests.runtime.cli.remedies.of_others import faults, values
from tests.support.chat import CHATML
from tests.support.corpus import batches, data_config
from tests.support.models import train_tokenizer

ONE_NODE = parse_layout("tp=2,workers=2", 1)
NODES = next(shape for shape in CHAOS_LAYOUTS.values() if shape.nodes > 2)


# --- faults ---------------------------------------------------------------------------------
def drawn(target: str) -> Callable[[Lab], None]:
    row = {"step": 3, "fault": "agent", "target": target}
    return values(text=json.dumps(row))


def check_target(lab: Lab) -> None:
    draws = read_trace(lab.settings["text"], "trace", "seed")
    check_faults_possible((), draws, NODES, None)


def name_node(lab: Lab, found: Match[str]) -> None:
    drawn(found[1])(lab)


def check_faults(lab: Lab) -> None:
    _, named = parse_faults_option(lab.settings["faults"])
    check_faults_possible([FAULTS[name] for name in named], [], ONE_NODE, None)


def part(lab: Lab) -> None:
    chaos._part_of([lab.settings["run"]] * 2, *lab.settings["part"])


# --- prepared sets --------------------------------------------------------------------------
def begin_lost_template(lab: Lab) -> None:
    begin_chat(CHATML)(lab)
    prepare_chat(lab)
    next((lab.folder / "dataset").glob("*.jinja")).unlink()
    lab.settings["folder"] = "dataset"


def begin_spoilt_paths(lab: Lab) -> None:
    begin(lab)
    (prepare(lab).folder / "sources.json").write_text("{}")


def open_set(lab: Lab) -> None:
    Dataset.open(lab.folder / lab.settings["folder"])


def remake_chat(lab: Lab, found: Match[str]) -> None:
    prepare_chat(lab)


def feed_chat(lab: Lab) -> None:
    prepare_chat(lab)
    source = {"kind": "jsonl", "path": lab.path("rows.jsonl"), "rows": "messages", "name": "chat"}
    config = data_config(
        lab.folder / "dataset",
        source,
        tokenizer={"path": lab.path("tokenizer")},
        attention="document",
        sequence_length=lab.settings["sequence_length"],
    )
    batches(Dataset.open(config.folder), config)


class Sampling:
    """A tokenizer that gives other tokens each time."""

    def __init__(self) -> None:
        self._calls = count()

    def encode(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(ids=[next(self._calls)], offsets=[(0, 1)])


def look_at_tokenizer(lab: Lab) -> None:
    path = lab.folder / "tokenizer.json"
    if not path.exists():
        train_tokenizer(path)
    found = load_tokenizer(path) if lab.settings["steady"] else Sampling()
    check_tokenizer(cast(Tokenizer, found), path, ["the cat sat on the mat " * 50], "it")


CHAOS = "holdfast_lab/chaos/schedule.py: "

CASES: list[Case] = [
    case(
        CHAOS + "there is no node … in …",
        drawn("z"),
        check_target,
        r"use one of (\w), .*",
        name_node,
    ),
    case(
        CHAOS + "… cannot be aimed at a node",
        values(text='{"step": 3, "fault": "kill", "target": "a"}'),
        faults,
        r"leave out its target, or use one of .*",
        fixed(text='{"step": 3, "fault": "kill"}'),
    ),
    case(
        CHAOS + "none of these faults can happen in …: …",
        values(faults="two-agents"),
        check_faults,
        r"name others, or another --layout",
        fixed(faults="kill"),
    ),
    case(
        "holdfast_lab/commands/chaos.py: there is nothing in part …: of … runs in all",
        values(run=None, part=(3, 3)),
        part,
        r"use (\d+) parts at most",
        lambda lab, found: lab.settings.update(part=(1, int(found[1]))),
    ),
    schedule(
        "… stages by … microbatches are too many to draw",
        "--stages 1000 --microbatches 300",
        r"use 200 or fewer, or fewer --stages",
        word("1000", "4"),
    ),
    case(
        "data/stream/dataset.py: the chat template is missing or is not the one the rows were "
        "made with",
        begin_lost_template,
        open_set,
        REMAKE,
        remake_chat,
    ),
    case(
        "data/stream/dataset.py: the file is not what was written",
        begin_spoilt_paths,
        open_set,
        REMAKE,
        remake,
    ),
    case(
        "data/stream/batch.py: source … …",
        begin_chat(CHATML, sequence_length=8),
        feed_chat,
        r"raise data\.sequence_length, or set data\.chat\.long_rows: cut",
        fixed(sequence_length=128),
    ),
    case(
        "data/read/tokenizer_check.py: … is random: the same text gives other tokens each time",
        values(steady=False),
        look_at_tokenizer,
        r"turn sampling and dropout off in a copy of the file",
        fixed(steady=True),
    ),
    case(
        "data/read/sources.py: a document holds half of a surrogate pair, which is not text",
        values(text="\ud83d"),
        lambda lab: encode_document(lab.settings["text"], "a.jsonl:1"),
        r"mend or remove it",
        fixed(text="\U0001f600"),
    ),
]
