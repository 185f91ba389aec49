"""`model.from`: a folder in Hugging Face form gives shape and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config.loading.identity import config_hash
from holdfast.config.loading.load import resolve_config
from holdfast.config.loading.model_from import as_overrides, describe_differences
from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ConfigError, UserError

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    return tmp_path / "hf"


def test_folder_gives_shape_and_tokenizer(folder: Path) -> None:
    loaded = resolve_config(f"model: {{from: {folder}, vocab_multiple: 8}}\n", "run.yaml")
    model = loaded.config.model
    assert (model.family, model.dim, model.layers, model.vocab_size) == ("qwen2", 32, 3, 96)
    assert (model.attention_bias, model.vocab_multiple, model.preset) == ("qkv", 8, None)
    assert loaded.config.data.tokenizer.path == str(folder / "tokenizer.json")
    assert str(loaded.origins["model.dim"]) == f"model folder ({folder})"
    assert loaded.origins["model.vocab_multiple"].kind == "file"
    by_override = resolve_config(None, "x", [f"model.from={folder}", "model.vocab_multiple=8"])
    assert by_override.config == loaded.config
    named = resolve_config(None, "x", [f"model.from={folder}", "data.tokenizer.path=mine.json"])
    assert named.config.data.tokenizer.path == "mine.json"


def test_all_differences_come_at_once(folder: Path) -> None:
    text = f"model: {{from: {folder}, layers: 2, dim: 64, vocab_size: 0, norms: pre}}\n"
    with pytest.raises(ConfigError) as caught:
        resolve_config(text, "run.yaml")
    said = str(caught.value)
    assert said.startswith("run.yaml:1: the model of ")
    assert "model.layers is 2 here and 3 there" in said
    assert "model.dim is 64 here and 32 there" in said
    assert "vocab_size" not in said
    assert said.endswith("remove them from the run file, for model.from gives them")


def test_what_cannot_be_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    for text, message in (
        (f"model: {{from: {tmp_path}}}", "there is no config.json here"),
        (f"model: {{from: {folder}, preset: tiny}}", "both give the shape; use one of the two"),
        ("model: {from: 3}", "model.from 3 is not a path"),
    ):
        with pytest.raises(UserError, match=message):
            resolve_config(text, "run.yaml")


def test_differences_are_overrides_that_a_shell_takes() -> None:
    one = ModelConfig.model_validate({"preset": "tiny"})
    other = one.model_copy(update={"window": 8, "window_layers": (0, 2), "tied_embeddings": False})
    found = {"window_layers": ([], [0, 2]), "tied_embeddings": (True, False)}
    assert as_overrides(found) == "'model.window_layers=[0, 2]' model.tied_embeddings=false"
    assert "model.tied_embeddings is true here and false there" in describe_differences(found, "x")
    assert other.windowed == (0, 2)


def test_a_shape_of_no_architecture_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"norms both is in no architecture.*use norms"):
        resolve_config(None, "x", ["model.norms=both"])
    assert resolve_config(None, "x", ["model.qk_norm=true"]).config.model.qk_norm  # as Qwen 3


def test_later_keys_leave_the_identity_as_it_was() -> None:
    """Hashes of the version before them."""
    known = {
        (): "d574bf92fa772dae9159e57cceb7c135",
        ("model.preset=llama3.1-8b",): "557318aa806c40561f7d418d70f32025",
        ("model.rope_scaling={factor: 4.0}",): "03d3f251a5cbe887378f671e38e2218a",
    }
    for overrides, wanted in known.items():
        assert config_hash(resolve_config(None, "x", overrides).config) == wanted
    changed = RunConfig.model_validate({"model": {"attention_bias": "qkv"}})
    assert config_hash(changed) not in known.values()
