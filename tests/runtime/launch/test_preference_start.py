"""Mistakes of a preference run are named before it starts: rows, reference, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.runtime.data.test_preferences import pairs, ratings
from tests.support.chat import message_rows, tokenizer_folder, write_rows
from tests.support.commands import here

SHAPE: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": None,
}


def model_folder(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(3)
    tokenizer_folder(folder)
    LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).save_pretrained(folder)
    return folder


def run_file(root: Path, rows: list[dict[str, Any]], form: str, objective: str) -> Path:
    write_rows(root / "rows.jsonl", rows)
    model_folder(root / "model")
    source = {"kind": "jsonl", "path": str(root / "rows.jsonl"), "rows": form}
    value = {
        "folder": str(root / "run"),
        "device": "cpu",
        "data": {
            "folder": str(root / "dataset"),
            "sources": [source],
            "attention": "document",
            "sequence_length": 200,
            "processes": 1,
        },
        "model": {"from": str(root / "model")},
        "objective": {"kind": objective},
        "layout": {"workers": 1},
        "train": {"steps": 2, "batch_size": 4, "microbatch_size": 1},
    }
    path = root / "run.yaml"
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("form", "objective", "says"),
    [
        ("messages", "dpo", "dpo learns from rows: preference, and a source has "),
        ("preference", "kto", "kto learns from rows: unpaired_preference"),
        ("unpaired_preference", "reward", "reward learns from rows: preference"),
        ("preference", "next_token", "rows: preference are for preference losses"),
    ],
)
def test_rows_that_the_objective_does_not_learn_from_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, objective: str, says: str
) -> None:
    rows = {"messages": message_rows(4), "preference": pairs(4), "unpaired_preference": ratings(4)}
    path = run_file(tmp_path, rows[form], form, objective)
    here(capsys, "train", path).refuses_last(says)
    assert not (tmp_path / "dataset").exists()
    assert not (tmp_path / "run").exists()


def test_a_pair_without_a_rejected_answer_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pairs(4)
    del rows[2]["rejected"]
    path = run_file(tmp_path, rows, "preference", "dpo")
    here(capsys, "train", path).refuses_last("rows.jsonl:3: 'rejected' is missing")
    assert not (tmp_path / "run").exists()


def test_a_reference_of_another_vocabulary_or_shape_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, pairs(8), "preference", "dpo")
    key = "objective.reference.model"
    larger = model_folder(tmp_path / "larger", vocab_size=480)
    here(capsys, "train", path, f"{key}={larger}").refuses_last("vocab_size", key)
    other = model_folder(tmp_path / "other")
    file = other / "tokenizer.json"
    value = json.loads(file.read_text())
    vocabulary = value["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(value))
    here(capsys, "train", path, f"{key}={other}").refuses_last("another tokenizer")
    here(capsys, "train", path, f"{key}={tmp_path / 'none'}").refuses_last("none")
    here(capsys, "train", path, f"{key}={larger}", "lora.rank=2").refuses_last(
        "the base is the reference"
    )
    here(capsys, "train", path, f"{key}={larger}", "objective.kind=simpo").refuses_last(
        "needs no reference"
    )
    assert not (tmp_path / "run").exists()
