"""Checkpoints that the real libraries wrote (fixtures, with their versions in `losses.json`): a run
continues each as its own trainer did. A pickle with anything but tensors in it is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.checkpoint.interop.deepspeed import read_deepspeed, step_folder
from holdfast.checkpoint.interop.hf_trainer import ForeignState, is_hf_trainer, read_hf_trainer
from holdfast.checkpoint.interop.torch_files import load_tensors
from holdfast.config.huggingface.convert import from_their_config
from holdfast.config.loading.load import load_config
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.errors import CheckpointError
from tests.support import foreign_trainers as theirs
from tests.support.commands import apart, within, write_run_file
from tests.support.foreign_losses import FIXTURES, continues_as, losses_after, run_of
from tests.support.ranks import ROOT


def read(folder: Path, **options: bool) -> ForeignState:
    return (read_hf_trainer if is_hf_trainer(folder) else read_deepspeed)(folder, **options)


@pytest.mark.parametrize("name", ["trainer", "zero1", "zero2", "zero3", "universal"])
def test_the_next_twenty_losses_are_those_of_the_trainer(name: str) -> None:
    continues_as(name, FIXTURES / name / "checkpoint", read)


def test_settings_rate_and_position_are_told() -> None:
    found = read(FIXTURES / "trainer" / "checkpoint")
    assert found.step == theirs.SAVED
    assert found.settings["train.optimizer.betas"] == list(theirs.BETAS)
    assert found.settings["train.optimizer.weight_decay"] == theirs.DECAY
    assert found.settings["train.optimizer.learning_rate"] == theirs.RATE
    assert found.rate is not None
    assert 0 < found.rate < theirs.RATE
    assert "at step 10 of 30" in found.position
    assert "40 samples in 10 steps" in read(FIXTURES / "zero3" / "checkpoint").position


def test_init_writes_the_run_file_of_a_trainer_folder(tmp_path: Path) -> None:
    path = tmp_path / "moved.yaml"
    done = within("init", path, "--from", FIXTURES / "trainer" / "checkpoint").succeeds()
    train = load_config(path).config.train
    due = run_of("trainer").train
    assert train.schedule == due.schedule
    assert (train.steps, train.batch_size) == (due.steps, due.batch_size)
    for key in ("learning_rate", "betas", "weight_decay"):
        assert getattr(train.optimizer, key) == getattr(due.optimizer, key)
    assert "left out: max_grad_norm, precision" in done.err
    assert "holdfast checkpoint import" in done.err


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("trainer", "optimizer.pt"),
        ("trainer", "scheduler.pt"),
        ("zero1", "global_step10/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero3", "global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("universal", "zero/lm_head.weight/exp_avg.pt"),
    ],
)
def test_a_malicious_pickle_is_refused(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / file
    torch.save({"state": Evil()}, path)
    with pytest.raises(CheckpointError, match="which is no tensor") as refused:
        read(tmp_path / "checkpoint")
    assert str(path) == refused.value.where
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="it is not complete"):
        read(tmp_path / "checkpoint")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "trainer",
            lambda o: o["state"][0].update(max_exp_avg_sq=o["state"][0]["exp_avg"]),
            "max_exp_avg_sq, which AdamW of a run does not have",
        ),
        ("trainer", lambda o: o["param_groups"][0]["params"].pop(), "groups of"),
        (
            "trainer",
            lambda o: o["state"].pop(0),
            "the optimizer's state of model.embed_tokens.weight is missing",
        ),
    ],
)
def test_an_optimizer_of_another_kind_is_refused(
    name: str, change: Callable[[Any], object], said: str, tmp_path: Path
) -> None:
    shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "optimizer.pt"
    optimizer = load_tensors(path)
    change(optimizer)
    torch.save(optimizer, tmp_path / "new")
    (tmp_path / "new").replace(path)
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path / "checkpoint")


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero2" / "checkpoint", tmp_path / "checkpoint")
    where = step_folder(tmp_path / "checkpoint")
    assert where is not None
    (where / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="2 ranks saved, and 1 files are here"):
        read(tmp_path / "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_the_installed_libraries_write_today_is_continued(stage: int, tmp_path: Path) -> None:
    """stage 0: transformers' Trainer; DeepSpeed where HOLDFAST_DEEPSPEED names a Python with it."""
    python = os.environ.get("HOLDFAST_DEEPSPEED", "") if stage else sys.executable
    if not python:
        pytest.skip("HOLDFAST_DEEPSPEED names no Python that has DeepSpeed")
    words = ["deepspeed", str(tmp_path), str(stage)] if stage else ["trainer", str(tmp_path)]
    script = ROOT / "tests" / "support" / "foreign_trainers.py"
    subprocess.run([python, str(script), *words], check=True, capture_output=True)
    name = f"zero{stage}" if stage else "trainer"
    due = json.loads((tmp_path / "losses.json").read_text())["losses"][theirs.SAVED :]
    found = read(tmp_path / "checkpoint")
    here = losses_after(tmp_path / "checkpoint", name, replace(found), theirs.SAVED)
    assert np.abs(np.array(here) - np.array(due)).max() < 1e-6


@pytest.mark.slow
def test_a_run_goes_on_where_trainer_stopped(tmp_path: Path) -> None:
    """By commands alone: Trainer and the run are fed the same samples, from the run's dataset."""
    path = write_run_file(tmp_path, 40)
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **theirs.SHAPE}
    model["vocab_size"] = 320
    keys = (
        "train.steps=30",
        "train.precision=float64",
        f"train.optimizer={{learning_rate: {theirs.RATE}, betas: [0.9, 0.98], "
        f"weight_decay: {theirs.DECAY}, clip_norm: 1.0}}",
        "train.schedule={kind: cosine, warmup_steps: 4, final_ratio: 0, counts_from: 0}",
        f"model={json.dumps(from_their_config(model, where='x').model_dump())}",
    )
    within("data", "prepare", path, *keys).succeeds()
    config = load_config(path, keys).config
    batches = Batches(
        open_dataset(config.data.folder, config.data), config.data, config.train, config.seed
    )
    rows, labels = [], []
    for step in range(1, theirs.STEPS + 1):
        for index in range(theirs.BATCH):
            fed = batches.microbatch(step, index)
            ends = np.zeros((1, 1), np.int64)  # an input that no target follows
            rows.append(np.concatenate([fed.inputs, ends], 1))
            labels.append(np.concatenate([ends - 100, fed.targets], 1))
    out = tmp_path / "trainer"
    out.mkdir()
    tokens = np.stack(rows).reshape(theirs.STEPS, theirs.BATCH, -1)
    np.savez(out / "batches.npz", tokens=tokens, labels=np.stack(labels), vocabulary=320)
    script = ROOT / "tests" / "support" / "foreign_trainers.py"
    subprocess.run([sys.executable, str(script), "trainer", out], check=True, capture_output=True)
    command = ("checkpoint", "import", path, "--from", out / "checkpoint", *keys)
    done = apart(*command, "--tokenizer-unchecked").succeeds()
    assert "AdamW's moments of transformers' Trainer after step 10" in done.err
    assert "the run continues at sample 40 of its order" in done.err
    assert "not used: training_args.bin (a pickle of any class)" in done.err
    assert "in the run file, and" not in done.err  # all settings agree, the rate too
    assert "has the rate" not in done.err
    apart("train", path, *keys).succeeds()
    due = json.loads((out / "losses.json").read_text())["losses"][theirs.SAVED :]
    rows = [row for row in holdfast.journal(tmp_path / "run") if row["kind"] == "step_done"]
    assert [row["step"] for row in rows] == list(range(11, 31))
    assert np.abs(np.array([row["loss"] for row in rows]) - np.array(due)).max() < 1e-6
