"""Files next to a tokenizer.json: what is used, counted or refused, and ids of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.read.tokenizer_border import TOKENIZER_KEYS, check_tokenizer_files, compare_ids
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.errors import DataError, ModelFolderError
from tests.support.borders import unknown_entries
from tests.support.chat import tokenizer_folder


def lines(root: Path, file: str = "", content: Any = None, **settings: Any) -> list[str]:
    folder = tokenizer_folder(root / "model", **settings)
    if file:
        (folder / file).write_text(json.dumps(content))
    path = folder / "tokenizer.json"
    return check_tokenizer_files(path, load_tokenizer(path))


def test_keys_of_no_list_are_counted_with_their_file(tmp_path: Path) -> None:
    drawn = unknown_entries(TOKENIZER_KEYS)
    assert lines(tmp_path, padding_side="left", add_prefix_space=False) == []
    (line,) = lines(tmp_path, **drawn)
    for name in drawn:
        assert f"{name} (1 times, first in {tmp_path}/model/tokenizer_config.json)" in line
    (line,) = lines(tmp_path, "special_tokens_map.json", {"abc": 1})
    assert f"abc (1 times, first in {tmp_path}/model/special_tokens_map.json)" in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"add_prefix_space": True}, "add_prefix_space is True, and not so in tokenizer.json"),
        ({"split_special_tokens": True}, "split_special_tokens true"),
        ({"do_lower_case": True}, "do_lower_case true"),
        ({"fast_tokenizer_files": ["tokenizer.9.json"]}, "fast_tokenizer_files"),
        ({"additional_special_tokens": ["<new>"]}, "the token '<new>' .* in tokenizer.json None"),
        ({"extra_special_tokens": [{"content": "<new>"}]}, "the token '<new>'"),
        ({"added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}, "has the id 9, .*json 2"),
    ],
)
def test_keys_that_would_give_other_ids_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=f"tokenizer_config.json: .*{words}.*a copy of the folder"):
        lines(tmp_path, **settings)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "normalized", "single_word", "special"])
def test_flags_of_tokens_that_differ_from_tokenizer_json_are_refused(
    tmp_path: Path, flag: str
) -> None:
    said = {"content": "<|im_end|>", "special": True, "normalized": False}
    assert lines(tmp_path / "same", added_tokens_decoder={"2": said}) == []
    other = said | {flag: not said.get(flag, False)}
    words = (
        rf"tokenizer_config.json: {flag} of the token '<\|im_end\|>' is .*save the tokenizer again"
    )
    with pytest.raises(DataError, match=words):
        lines(tmp_path / "other", added_tokens_decoder={"2": other})


def test_tokens_of_the_old_file_of_added_tokens_are_compared(tmp_path: Path) -> None:
    assert lines(tmp_path, "added_tokens.json", {"<|im_end|>": 2}) == []
    with pytest.raises(DataError, match="the token '<new>' has the id 400"):
        lines(tmp_path, "added_tokens.json", {"<new>": 400})


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"special_tokens_map.json: this is not"):
        lines(tmp_path, "special_tokens_map.json", [1])


def test_only_a_class_with_rules_of_its_own_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.run", refuse)
    path = tokenizer_folder(tmp_path / "model") / "tokenizer.json"
    (path.parent / "config.json").write_text('{"model_type": "qwen2"}')
    assert compare_ids(path, load_tokenizer(path), ["a b"]) == ""


@pytest.mark.slow
def test_ids_that_differ_from_those_of_transformers_are_said(tmp_path: Path) -> None:
    """Its class for Qwen2 has a pre-tokenizer of its own."""
    path = tokenizer_folder(tmp_path / "model", tokenizer_class="Qwen2Tokenizer") / "tokenizer.json"
    (path.parent / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = load_tokenizer(path)
    assert compare_ids(path, tokenizer, ["a", "é <|im_end|>"]) == ""
    line = compare_ids(path, tokenizer, ["number 1 2 33", "turn 1, number 22"])
    assert "other ids than AutoTokenizer (Qwen2Tokenizer)" in line
    assert "tokenizer_class: PreTrainedTokenizerFast" in line
    assert line.count("[") == 2
