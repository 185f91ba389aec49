"""A given tokenizer: where it may lie, which are refused, and that verify takes what was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.verify import find_problems
from holdfast.errors import DataError
from tests.support.corpus import data_config, make, text_folder, text_source

WORDS = ["ka", "lo", "mi", "ru", "te", "sho", "né", "日本", "ü", "🙂"]
SLY = "before </s> and <eos> after</s></s>\n"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = text_folder(tmp_path / "in", files=4, words=60)
    (folder / "sly.txt").write_text(SLY + (folder / "000.txt").read_text())
    return folder


def letters(folder: Path) -> list[str]:
    return sorted({c for path in folder.iterdir() for c in path.read_text()})


def prepared(tmp_path: Path, texts: Path, tokenizer: Path | str) -> tuple[Dataset, list[str]]:
    said: list[str] = []
    config = data_config(tmp_path / "out", text_source(texts), tokenizer={"path": str(tokenizer)})
    return prepare_dataset(config, said.append), said


def refusal(tmp_path: Path, texts: Path, tokenizer: Path) -> str:
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, texts, tokenizer)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    return str(caught.value)


def kinds(texts: Path) -> dict[str, Tokenizer]:
    """Tokenizers of each model, each with its end token in another way."""
    found = letters(texts)
    vocab = {c: i for i, c in enumerate(["<unk>", "</s>", *found])}
    unigram = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("</s>", -1.0), *((c, -2.0) for c in found)], unk_id=0)
    )
    level = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    level.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain = Tokenizer(models.BPE(dict(vocab), [], unk_token="<unk>"))
    plain.add_tokens([AddedToken("</s>", special=False)])
    piece = Tokenizer(
        models.WordPiece(
            vocab | {f"##{c}": len(vocab) + i for i, c in enumerate(found)},
            unk_token="<unk>",
            max_input_chars_per_word=10**6,
        )
    )
    piece.pre_tokenizer = pre_tokenizers.Whitespace()
    marked = Tokenizer(models.BPE({**vocab, "▁": len(vocab)}, [], unk_token="<unk>"))
    marked.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    same = Tokenizer(
        models.BPE({c: i for i, c in enumerate(["</s>", *found])}, [], unk_token="</s>")
    )
    return {
        "unigram": unigram,
        "level": level,
        "plain": plain,
        "piece": piece,
        "marked": marked,
        "same": same,
    }


@pytest.mark.parametrize("name", ["unigram", "level", "plain", "piece", "marked", "same"])
def test_verify_accepts_what_prepare_made(tmp_path: Path, texts: Path, name: str) -> None:
    path = tmp_path / "t.json"
    kinds(texts)[name].save(str(path))
    dataset, _ = prepared(tmp_path, texts, path)
    assert find_problems(dataset.folder) == []
    assert dataset.counts("train")["documents"] + dataset.counts("validation")["documents"] == 5


def test_the_end_token_in_the_text_is_left_out_and_said(tmp_path: Path, texts: Path) -> None:
    path = tmp_path / "t.json"
    kinds(texts)["unigram"].save(str(path))
    _, said = prepared(tmp_path, texts, path)
    assert any("spells the end token '</s>' 3 times" in line for line in said)


def test_a_tokenizer_s_folder_is_taken_for_its_file(tmp_path: Path, texts: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    kinds(texts)["plain"].save(str(folder / "tokenizer.json"))
    dataset, _ = prepared(tmp_path, texts, folder)
    assert dataset.version == prepared(tmp_path, texts, folder / "tokenizer.json")[0].version
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"x")
    sentence = refusal(tmp_path, texts, folder)
    assert f"{folder} holds no tokenizer.json, only tokenizer.model" in sentence
    assert "save_pretrained" in sentence


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "git-lfs pointer"),
        (b"\xff\xfe{", "is not UTF-8"),
        (b"[]", "is not a tokenizer.json"),
        (b"null", "is not a tokenizer.json"),
        (b'{"added_tokens": [3]}', "is not a tokenizer.json"),
    ],
)
def test_files_that_are_no_tokenizer(
    tmp_path: Path, texts: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    assert says in refusal(tmp_path, texts, path)


def test_a_random_tokenizer_is_refused(tmp_path: Path, texts: Path) -> None:
    path = tmp_path / "t.json"
    kinds(texts)["plain"].save(str(path))
    value = json.loads(path.read_text())
    value["model"]["dropout"] = 0.1
    path.write_text(json.dumps(value))
    assert "is random: with model.dropout 0.1" in refusal(tmp_path, texts, path)


def test_a_tokenizer_of_another_alphabet_is_refused_or_said(tmp_path: Path, texts: Path) -> None:
    path = tmp_path / "t.json"
    for unknown in ({"unk_token": "<unk>", "fuse_unk": True}, {}):
        few = {c: i for i, c in enumerate(["<unk>", "</s>", *"abc"])}
        Tokenizer(models.BPE(few, [], **unknown)).save(str(path))
        sentence = refusal(tmp_path, texts, path)
        assert "of the text: it has no tokens for it" in sentence
    most = {c: i for i, c in enumerate(["<unk>", "</s>", *letters(texts)]) if c != "🙂"}
    Tokenizer(models.BPE(most, [], unk_token="<unk>")).save(str(path))
    _, said = prepared(tmp_path, texts, path)
    assert any("of the text: it has no tokens for it" in line for line in said)


def test_a_byte_level_tokenizer_loses_nothing(tmp_path: Path, texts: Path) -> None:
    trained = make(data_config(tmp_path / "trained", text_source(texts)))
    _, said = prepared(tmp_path, texts, trained.tokenizer_path)
    assert not any("loses" in line for line in said)
