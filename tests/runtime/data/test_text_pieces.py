"""A long document: cut where the tokens stay the same, and prepared in little memory."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from holdfast.data.read import vocabulary
from holdfast.data.stages import text_pieces
from holdfast.data.stages.text_pieces import cut_text
from tests.support.corpus import text

LONG = text(5, 3000) + "x" * 200 + text(6, 500) + "a1 b2\n\n  c" * 50
CORPUS = [text(i, 200) for i in range(4)]


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pieces, "PIECE_CHARACTERS", 300)


def tokenizers(tmp_path: Path) -> dict[str, Tokenizer]:
    path = tmp_path / "t.json"
    path.write_text(vocabulary.train_tokenizer(CORPUS, 400))
    letters = {c: i for i, c in enumerate(sorted(set(LONG) | {"▁", "<unk>", "</s>"}))}
    marked = Tokenizer(models.BPE(letters, [("k", "a")] if "ka" in letters else []))
    marked.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    meta = Tokenizer(models.BPE(letters, []))
    meta.pre_tokenizer = pre_tokenizers.Metaspace()
    white = Tokenizer(models.WordLevel({w: i for i, w in enumerate({*LONG.split(), "?"})}, "?"))
    white.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return {
        "bytes": vocabulary.load_tokenizer(path),
        "marked": marked,
        "metaspace": meta,
        "words": white,
    }


@pytest.mark.parametrize("name", ["bytes", "marked", "metaspace", "words"])
def test_pieces_give_the_tokens_of_the_uncut_text(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizers(tmp_path)[name]

    def encode(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False).ids)

    pieces = list(cut_text(LONG, encode))
    assert len(pieces) > 20
    assert [i for piece in pieces for i in encode(piece)] == encode(LONG)


def test_pieces_without_a_tokenizer_are_the_text() -> None:
    assert "".join(cut_text(LONG)) == LONG
    assert list(cut_text("short")) == ["short"]
    assert list(cut_text("")) == [""]
    solid = "日" * 2000
    assert "".join(cut_text(solid, lambda piece: [len(piece)])) == solid


MEASURE = """
import resource, sys
from pathlib import Path
from holdfast.config.sections.data import DataConfig
from holdfast.data.prepare.prepare import prepare_dataset
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024
def make(folder, source):
    sources = [{"kind": "text", "path": source}]
    tokenizer = {"vocab_size": 300, "sample_bytes": 100_000}
    config = {"folder": folder, "sources": sources, "tokenizer": tokenizer, "processes": 1,
              "max_document_bytes": 1 << 30}
    prepare_dataset(DataConfig.model_validate(config), say=lambda _: None)
make(sys.argv[1] + "/small", sys.argv[1] + "/small.txt")
before = peak()
make(sys.argv[1] + "/large", sys.argv[1] + "/large.txt")
print(peak() - before)
"""


def measured(tmp_path: Path, size: int) -> float:
    """Peak memory of preparing one document of `size` bytes, over what a small one needs, as a
    multiple of the document."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(5000)]
    part = " ".join(rng.choices(words, k=20_000))
    (tmp_path / "small.txt").write_text(part[:2000])
    (tmp_path / "large.txt").write_text((part + "\n") * (size // len(part)))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    return int(done.stdout) / size


@pytest.mark.slow
def test_a_document_of_32_mb_takes_at_most_ten_times_its_size(tmp_path: Path) -> None:
    assert measured(tmp_path, 32 << 20) < 10
