"""`lora.from` and `model.from`: what is taken from folders, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.huggingface.architectures import BORDERS
from holdfast.config.huggingface.convert import from_their_config
from holdfast.config.loading.identity import config_hash
from holdfast.config.loading.load import LoadedConfig, resolve_config
from holdfast.config.loading.lora_from import KEYS, read_adapter_config
from holdfast.config.loading.model_from import as_overrides, describe_differences
from holdfast.config.loading.no_effect import find_without_effect
from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ConfigError, ModelFolderError, UserError
from tests.support.borders import unknown_entries

ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["v_proj", "q_proj"],
    "lora_dropout": 0.1,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
}
BASE = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(BASE))
    _write_adapter(tmp_path, ADAPTER)
    return tmp_path


def _write_adapter(root: Path, config: dict[str, Any]) -> Path:
    folder = root / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _loaded(root: Path, text: str, *overrides: str) -> LoadedConfig:
    return resolve_config(text, str(root / "run.yaml"), overrides, str(root))


def test_from_gives_rank_alpha_targets_and_the_base_is_the_model_s(root: Path) -> None:
    loaded = _loaded(root, "model: {from: base}\nlora: {from: adapter, dropout: 0.2}\n")
    lora = loaded.config.lora
    assert (lora.rank, lora.alpha, lora.targets) == (4, 8.0, ("q_proj", "v_proj"))
    assert (lora.dropout, lora.scale) == (0.2, 2.0)
    assert (lora.base, lora.adapter) == (str(root / "base"), str(root / "adapter"))
    assert loaded.origins["lora.rank"].kind == "model folder"
    assert loaded.origins["lora.dropout"].kind == "file"
    by_command = _loaded(root, "model: {from: base}\n", f"lora.from={root / 'adapter'}")
    assert by_command.config.lora == lora.model_copy(update={"dropout": 0.0})


def test_values_that_differ_from_the_folder_s_are_one_message(root: Path) -> None:
    text = "model: {from: base}\nlora:\n  from: adapter\n  rank: 8\n  targets: all-linear\n"
    with pytest.raises(ConfigError) as refused:
        _loaded(root, text)
    sentence = str(refused.value)
    assert sentence.count("\n") == 0
    assert f"{root / 'run.yaml'}:4: the adapter of {root / 'adapter'} is another one" in sentence
    assert "lora.rank is 8 here and 4 there" in sentence
    assert "lora.targets is [all-linear] here and [q_proj, v_proj] there" in sentence
    assert "remove them from the run file" in sentence
    same = "model: {from: base}\nlora: {from: adapter, rank: 4, targets: [v_proj, q_proj]}\n"
    assert _loaded(root, same).config.lora.targets == ("v_proj", "q_proj")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True, "bias": "all"}, ("bias all", "use_dora true")),
        ({"use_rslora": True}, ("use_rslora true",)),
        ({"modules_to_save": ["lm_head"]}, ("modules_to_save ['lm_head']",)),
        ({"rank_pattern": {"q_proj": 2}}, ("rank_pattern {'q_proj': 2}",)),
        ({"peft_type": "ADALORA"}, ("peft_type ADALORA",)),
        ({"target_modules": ".*q_proj"}, ("target_modules",)),
        ({"init_lora_weights": "pissa_niter_4"}, ("path_initial_model_for_weight_conversion",)),
        ({"layers_to_transform": 0}, ("layers_to_transform 0",)),
    ],
)
def test_an_adapter_that_is_no_plain_one_is_refused_with_all_keys(
    root: Path, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    folder = _write_adapter(root, ADAPTER | changes)
    with pytest.raises(ModelFolderError, match="which Holdfast does not compute") as refused:
        read_adapter_config(folder)
    assert all(words in str(refused.value) for words in named), str(refused.value)


def test_each_plain_value_is_taken(root: Path) -> None:
    for key, plain in KEYS.plain.items():
        for value in (*plain, None, False, []):
            read_adapter_config(_write_adapter(root, ADAPTER | {key: value}))


def test_a_key_that_no_list_has_is_refused(root: Path) -> None:
    for name, value in unknown_entries(KEYS).items():
        with pytest.raises(ModelFolderError, match=name):
            read_adapter_config(_write_adapter(root, ADAPTER | {name: value}))
    for kind, border in BORDERS.items():
        for name, value in unknown_entries(border).items():
            with pytest.raises(ModelFolderError, match=rf"key {name} is not understood.* {kind} "):
                from_their_config(BASE | {"model_type": kind, name: value}, "config.json")


@pytest.mark.parametrize(
    ("config", "words"), [({}, "has no r, lora_alpha and target_modules"), ({"r": "4"}, "has no r")]
)
def test_a_folder_without_the_numbers_is_refused(
    root: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelFolderError, match=words):
        read_adapter_config(_write_adapter(root, config))


def test_a_folder_without_an_adapter_is_refused(root: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"there is no adapter_config\.json here"):
        _loaded(root, "model: {from: base}\nlora: {from: base}\n")


def test_runs_without_adapters_keep_their_identity() -> None:
    """Keys at their defaults do not enter it, nor do names and places."""
    plain = config_hash(RunConfig())
    named = RunConfig.model_validate({"lora": {"name": "other", "base": "/elsewhere"}})
    assert config_hash(named) == plain
    assert config_hash(RunConfig.model_validate({"lora": {"rank": 2}})) != plain


def test_keys_of_adapters_without_a_rank_have_no_effect() -> None:
    loaded = resolve_config("lora:\n  alpha: 4\n  dropout: 0.1\n", "run.yaml")
    found = [line for line in find_without_effect(loaded) if "lora" in line]
    assert len(found) == 2
    assert "run.yaml:2: lora.alpha has no effect with lora.rank 0" in found[0]


def test_a_model_of_transformers_gives_its_own_base(root: Path) -> None:
    loaded = _loaded(root, "model: {from: base, code: transformers}\nlora: {rank: 4}\n")
    assert (loaded.config.lora.rank, loaded.config.lora.base) == (4, "")


# --- `model.from` ---------------------------------------------------------------------------------
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
