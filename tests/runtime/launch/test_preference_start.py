"""Mistakes of a preference run are named before it starts: rows, reference, tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast.config.loading.load import load_config
from holdfast.data.read.weight_files import weights_checksum
from holdfast.errors import ConfigError
from holdfast.launch.run.lora_run import IMPORTED
from holdfast.launch.run.reference_run import check_reference_model, check_rollout_reference
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
    value: dict[str, Any] = {
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
    if objective == "grpo":
        del value["data"]["sources"], value["data"]["folder"]
        prompts, rewards = [{"path": source["path"]}], [{"kind": "exact_match"}]
        value["rollout"] = {"prompts": prompts, "rewards": rewards}
        value["objective"]["beta"] = 0.1
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


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_a_reference_of_another_vocabulary_or_shape_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "red", "answer": "blue"}]
    path = run_file(tmp_path, pairs(8) if kind == "dpo" else rows, "preference", kind)
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
    other_kind = "objective.kind=simpo" if kind == "dpo" else "objective.beta=0"
    here(capsys, "train", path, f"{key}={larger}", other_kind).refuses_last("needs no reference")
    assert not (tmp_path / "run").exists()
    fine = load_config(path, [f"{key}={tmp_path / 'model'}", "model.vocab_size=400"])
    version: Any = SimpleNamespace(version="12345678")
    found = (
        check_reference_model(fine, {}, version, tmp_path)
        if kind == "dpo"
        else check_rollout_reference(fine, {})
    )
    assert found["objective.reference.checksum"][0] == weights_checksum(tmp_path / "model")


def test_imported_weights_are_no_reference_of_completions(tmp_path: Path) -> None:
    path = run_file(tmp_path, [{"prompt": "red", "answer": "blue"}], "", "grpo")
    loaded = load_config(path, [])
    model = loaded.config.model.model_copy(update={"weights_checksum": IMPORTED})
    loaded = replace(loaded, config=loaded.config.model_copy(update={"model": model}))
    with pytest.raises(ConfigError, match=r"set objective\.reference\.model to a folder"):
        check_rollout_reference(loaded, {})
