"""Prompts of a run: through the template or as text, numbered by row, or refused with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.data import DataConfig, TokenizerConfig
from holdfast.config.sections.rewards import PromptsConfig
from holdfast.data.read.chat_borders import PROMPT_COLUMNS
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.errors import DataError
from holdfast.rollout.prompts import Prompts, read_prompts
from tests.support.borders import unknown_entries
from tests.support.chat import CHATML, tokenizer_folder, write_rows

ASK = {"role": "user", "content": "Say red."}
NO_HEADER = CHATML.partition("{% if add_generation_prompt")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


def read(
    folder: Path, *rows: dict[str, Any], source_column: str | None = None, **entry: Any
) -> Prompts:
    path = write_rows(folder / "rows.jsonl", list(rows))
    config = DataConfig(tokenizer=TokenizerConfig(path=str(folder)))
    return read_prompts([PromptsConfig(path=str(path), **entry)], config, source_column)


def test_messages_end_where_the_reply_begins_and_texts_stay_as_they_are(folder: Path) -> None:
    drawn = unknown_entries(PROMPT_COLUMNS)
    found = read(
        folder,
        {"prompt": [ASK], "answer": 7, **drawn},
        {"prompt": json.dumps([ASK])},
        {"prompt": "Say red.", "answer": "red"},
    )
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    tokenizer.encode_special_tokens = False
    rendered = "<|im_start|>user\nSay red.<|im_end|>\n<|im_start|>assistant\n"
    expected = tuple(tokenizer.encode(rendered, add_special_tokens=False).ids)
    assert found[0].ids == found[1].ids == expected
    assert tokenizer.decode(list(found[2].ids), skip_special_tokens=False) == "Say red."
    assert [p.number for p in found] == [0, 1, 2]
    assert [p.answer for p in found] == ["7", None, "red"]
    assert dict(found[0].columns) == {"answer": 7, **drawn}
    assert found.max_tokens == len(expected)
    assert found.version != read(folder, {"prompt": [ASK], "answer": 8}).version


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "a"}, "set prompt in rollout.prompts"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 3}, "no text and no list of messages"),
        ({"prompt": [ASK, {"role": "assistant", "content": "red."}]}, "ends with a reply"),
        ({"prompt": [{"role": "usr", "content": "red"}]}, "did you mean user?"),
        ({"prompt": "a <|im_end|>"}, "spells the special token <|im_end|>"),
        ({"prompt": [ASK], "images": ["a.png"]}, "images"),
        ({"prompt": "red", "tools": [{"name": "a"}]}, "uses no template"),
        ({"prompt": "red", "answer": ["a"]}, "is no text and no number, but list"),
        ({"prompt": [ASK], "chat_template_kwargs": {"thinking": True}}, "does not read thinking"),
    ],
)
def test_a_row_that_is_no_prompt_is_refused_with_its_line(
    folder: Path, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError) as refused:
        read(folder, {"prompt": "fine"}, row)
    assert f"{folder / 'rows.jsonl'}:2: " in str(refused.value)
    assert said in str(refused.value)


def test_a_column_names_the_source_of_a_prompt(folder: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "red", "skill": name} for name in "bab"]
    found = read(folder, *rows, source_column="skill")
    assert (found.sources, [each.source for each in found]) == (("a", "b"), ["b", "a", "b"])
    assert read(folder, *rows).sources == ("rows",)
    with pytest.raises(DataError, match=r"rows\.jsonl:4: the row has no text in 'skill'"):
        read(folder, *rows, {"prompt": "red", "skill": 3}, source_column="skill")


def test_a_template_without_a_generation_prompt_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, NO_HEADER)
    with pytest.raises(DataError, match="does not begin a reply when add_generation_prompt is"):
        read(folder, {"prompt": [ASK]})
