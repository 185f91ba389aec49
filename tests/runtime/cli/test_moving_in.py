"""`holdfast init --from`: YAML of axolotl and LLaMA-Factory, and checkpoints of torchtitan and
Megatron, become run files that load. Each key is translated, without an effect, or named."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.loading.load import load_config
from holdfast.config.loading.yaml_tree import dump
from holdfast.config.other_trainers import axolotl, llama_factory
from holdfast.config.other_trainers.translation import Translation
from tests.support import foreign_trainers as theirs
from tests.support.commands import within
from tests.support.foreign_losses import FIXTURES, run_of

AXOLOTL: dict[str, Any] = {
    "base_model": "tiny",
    "model_type": "LlamaForCausalLM",
    "load_in_8bit": True,
    "chat_template": "llama3",
    "datasets": [{"path": "org/chats", "type": "chat_template", "field_messages": "talk"}],
    "val_set_size": 0.05,
    "output_dir": "out",
    "sequence_len": 128,
    "sample_packing": False,
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_modules": ["q_proj", "v_proj"],
    "wandb_project": "project",
    "wandb_name": None,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "max_steps": 200,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": "2e-4",
    "warmup_ratio": 0.1,
    "bf16": "auto",
    "gradient_checkpointing": True,
    "save_steps": 20,
    "deepspeed": "zero3.json",
    "weight_decay": 0.01,
    "noisy_embeddings": 5,
}
FACTORY: dict[str, Any] = {
    "model_name_or_path": "tiny",
    "stage": "dpo",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "all",
    "pref_beta": 0.2,
    "pref_loss": "simpo",
    "dataset": "pairs,others",
    "template": "qwen3",
    "cutoff_len": 128,
    "max_samples": 1000,
    "output_dir": "saves",
    "save_steps": 500,
    "load_best_model_at_end": True,
    "report_to": "wandb",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 5e-6,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model's folder as a run file needs it: its shape, and a file of weights by name."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **theirs.SHAPE}
    config["max_position_embeddings"] = 512
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def sorted_out(there: Translation) -> dict[str, str]:
    """What became of each key of the source: one thing."""
    out = {}
    for key in there.source:
        fates = [
            word
            for word, keys in (
                ("translated", there.translated),
                ("harmless", there.harmless),
                ("left out", there.left_out),
            )
            if key in keys
        ]
        assert len(fates) == 1, (key, fates)
        out[key] = fates[0]
    return out


def test_a_configuration_of_axolotl(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "axolotl.yaml").write_text(dump(AXOLOTL))
    path = tmp_path / "run.yaml"
    done = within("init", path, "--from", tmp_path / "axolotl.yaml").succeeds()
    config = load_config(path).config
    train = config.train
    assert (train.steps, train.batch_size, train.microbatch_size) == (200, 8, 2)
    assert (train.precision, train.recompute) == ("bf16", "full")
    assert (train.optimizer.learning_rate, train.optimizer.weight_decay) == (2e-4, 0.01)
    assert train.optimizer.betas == (0.9, 0.999)
    assert (train.schedule.kind, train.schedule.warmup_steps) == ("cosine", 20)
    assert (train.schedule.counts_from, train.schedule.final_ratio) == (0, 0.0)
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (4, 8.0, 0.1)
    assert config.lora.targets == ("q_proj", "v_proj")
    (source,) = config.data.sources
    assert (source.kind, source.path, source.rows) == ("huggingface", "org/chats", "messages")
    assert config.data.validation_fraction == 0.05
    assert config.checkpoint.every_steps == 20
    assert config.logging.trackers == ("wandb",)
    text = path.read_text()
    for key in ("load_in_8bit", "deepspeed", "noisy_embeddings (not known)"):
        assert f"# left out: {key}" in text
    assert "# left out: datasets.0.field_messages" in text
    assert "left out; the file names these" in done.err
    fates = sorted_out(axolotl.translate(AXOLOTL))
    assert fates["model_type"] == fates["wandb_name"] == "harmless"
    assert fates["noisy_embeddings"] == "left out"


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"max_steps": 1000}, 30),
        ({"max_steps": 9000}, 100),
        ({"max_steps": 60}, 2),
        ({"max_steps": 10}, 0),
        ({"max_steps": 1000, "warmup_steps": 0}, 0),
        ({"max_steps": 1000, "warmup_ratio": 0.0}, 0),
        ({"max_steps": 19, "warmup_ratio": 0.25}, 4),
    ],
)
def test_the_warm_up_is_that_of_axolotl(keys: dict[str, Any], steps: int) -> None:
    there = axolotl.translate({"base_model": "tiny", **keys})
    assert there.values["train.schedule.warmup_steps"] == steps


def test_a_warm_up_of_unknown_steps_is_told() -> None:
    there = axolotl.translate({"base_model": "tiny", "num_epochs": 2})
    assert any("3 % of the steps" in note for note in there.notes)


@pytest.mark.parametrize(
    ("types", "named", "template", "left"),
    [
        (("alpaca", "completion"), "chatml", "alpaca", {"chat_template"}),
        (("alpaca", "alpaca"), None, "alpaca", set()),
        (("alpaca", "chat_template"), "llama3", "llama3", {"datasets.0.type"}),
        (("sharegpt", "alpaca"), None, None, {"datasets.1.type"}),
        (("completion",), None, None, set()),
    ],
)
def test_a_template_of_one_source_is_not_that_of_all(
    types: tuple[str, ...], named: str | None, template: str | None, left: set[str]
) -> None:
    rows = [{"path": f"one/{number}", "type": kind} for number, kind in enumerate(types)]
    there = axolotl.translate({"base_model": "x", "datasets": rows, "chat_template": named})
    assert there.values.get("data.chat.template") == template
    assert set(there.left_out) == left


def test_a_configuration_of_llama_factory(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(dump(FACTORY))
    (tmp_path / "data").mkdir()
    tables = {"pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"prompt": "p"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(tables))
    path = tmp_path / "run.yaml"
    within("init", path, "--from", tmp_path / "job.yaml").succeeds()
    config = load_config(path).config
    assert config.objective.kind == "simpo"
    assert config.objective.beta == 0.2
    assert (config.lora.rank, config.lora.alpha) == (4, 8.0)
    assert [s.path for s in config.data.sources] == ["data/pairs.json", "data/others.json"]
    assert {s.rows for s in config.data.sources} == {"preference"}
    assert (config.train.epochs, config.train.batch_size) == (3.0, 8)
    assert (config.checkpoint.every_steps, config.checkpoint.keep_best) == (500, 1)
    by_another = llama_factory.translate({**FACTORY, "metric_for_best_model": "accuracy"})
    assert "load_best_model_at_end" in by_another.left_out
    text = path.read_text()
    for words in ("template (the folder's own", "max_samples", "pairs.columns", "warmup_ratio"):
        assert f"# left out: {words}" in text
    assert "# others: dataset_info.json says which file it is" in text
    assert sorted_out(llama_factory.translate(FACTORY))["do_train"] == "harmless"


@pytest.mark.parametrize("source", [AXOLOTL, FACTORY])
def test_each_single_key_has_one_fate(source: dict[str, Any]) -> None:
    translate = axolotl.translate if "base_model" in source else llama_factory.translate
    whole = sorted_out(translate(source))
    assert set(whole) == set(source)
    for key in source:
        rest = {name: value for name, value in source.items() if name != key}
        assert set(sorted_out(translate(rest))) == set(rest)
        strange = source | {f"x_{key}": source[key] or 1}
        assert translate(strange).left_out[f"x_{key}"] == "not known"


def test_yaml_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model: x\n")
    done = within("init", tmp_path / "run.yaml", "--from", tmp_path / "x.yaml")
    done.refuses("neither base_model, as axolotl's")


@pytest.mark.parametrize("name", ["torchtitan", "megatron"])
def test_a_checkpoint_becomes_the_run_that_continues_it(name: str, tmp_path: Path) -> None:
    """The run file has the settings with which the next losses are those of the trainer."""
    with tarfile.open(FIXTURES / name / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / "moved.yaml"
    done = within("init", path, "--from", tmp_path / "checkpoint").succeeds()
    assert "holdfast checkpoint import" in done.err
    config, due = load_config(path).config, run_of(name)
    for key in ("layers", "dim", "heads", "kv_heads", "head_size", "ffn_dim", "vocab_size"):
        assert getattr(config.model, key) == getattr(due.model, key), key
    for key in ("rope_theta", "norm_eps", "tied_embeddings"):
        assert getattr(config.model, key) == getattr(due.model, key), key
    for key in ("learning_rate", "betas", "eps", "weight_decay", "clip_norm", "groups"):
        assert getattr(config.train.optimizer, key) == getattr(due.train.optimizer, key), key
    schedule = due.train.schedule
    for key in ("kind", "warmup_steps", "counts_from", "decay_steps"):
        assert getattr(config.train.schedule, key) == getattr(schedule, key), key
    assert config.train.schedule.final_ratio == pytest.approx(schedule.final_ratio)
    assert config.train.schedule_steps == due.train.schedule_steps
    assert (config.train.steps, config.train.batch_size) == (theirs.STEPS, theirs.BATCH)
    assert config.train.precision == due.train.precision


def test_a_folder_that_does_not_say_its_shape_is_refused(tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / "torchtitan" / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "checkpoint" / "config.json").unlink()
    done = within("init", tmp_path / "run.yaml", "--from", tmp_path / "checkpoint")
    done.refuses("a DCP folder does not say the shape of its model")
