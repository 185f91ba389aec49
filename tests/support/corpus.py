"""Small corpora and run-file sections for the tests of `data`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset import Dataset

SYLLABLES = ["ka", "lo", "mi", "ru", "te", "sho", "né", "日本", "ü", "🙂"]


def text(seed: int, words: int) -> str:
    """Repeatable text with a skewed vocabulary, newlines and characters of 1 to 4 bytes."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(60)]
    weights = [1.0 / (i + 1) for i in range(60)]
    chosen = rng.choices(vocabulary, weights, k=words)
    return " ".join(w + ("\n" if i % 11 == 10 else "") for i, w in enumerate(chosen)) + "\n"


def text_folder(folder: Path, files: int, words: int, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        (folder / f"{i:03d}.txt").write_text(text(seed * 1000 + i, words), encoding="utf-8")
    return folder


def jsonl_file(path: Path, lines: int, words: int, seed: int = 0) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for i in range(lines):
            body = text(seed * 1000 + i, 1 + i * 37 % words)
            file.write(json.dumps({"id": i, "body": body}, ensure_ascii=i % 2 == 0) + "\n")
    return path


def data_config(folder: Path, *sources: dict[str, Any], **more: Any) -> DataConfig:
    defaults: dict[str, Any] = {
        "folder": str(folder),
        "sources": sources,
        "tokenizer": {"vocab_size": 300, "sample_bytes": 20_000},
        "sequence_length": 16,
        "validation_fraction": 0.2,
        "processes": 1,
        "shard_tokens": 2000,
    }
    return DataConfig.model_validate(defaults | more)


def text_source(path: Path, name: str | None = None, **more: Any) -> dict[str, Any]:
    return {"kind": "text", "path": str(path), "name": name, **more}


def make(config: DataConfig) -> Dataset:
    return prepare_dataset(config, say=lambda _: None)


def train_config(batch_size: int = 8, microbatch_size: int = 2, **more: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"batch_size": batch_size, "microbatch_size": microbatch_size, **more}
    )


def batches(dataset: Dataset, config: DataConfig, seed: int = 1, **train: Any) -> Batches:
    return Batches(dataset, config, train_config(**train), seed)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
