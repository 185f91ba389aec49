"""What the adapters of other trainers ask of the run, with objects in the place of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.adapters import hf_trainer
from holdfast.tasks.scripts.own_loop import NamedValidation, Run, enter_run
from tests.runtime.cli.remedies.lab import Lab
from tests.runtime.cli.remedies.of_trainers import LightningModule, Trainer, fit_module


def named_validation(**given: Any) -> NamedValidation | None:
    """What a trainer with these arguments names, before the loop."""
    current = Run(torch.device("cpu"), torch.float32, 0, "")
    found: list[NamedValidation | None] = []

    def script() -> None:
        enter_run(current)
        hf_trainer.train(Trainer(evaluated=[0] * 5, **given), version="1", weight=_weigh)

    current._turns.start(script)
    found.append(current.named_validation)
    return found[0]


def _weigh(batch: Any) -> int:
    return int(batch["x"].sum())


@pytest.mark.parametrize(
    ("given", "every"),
    [
        ({"eval_strategy": "steps", "eval_steps": 3}, 3),
        ({"eval_strategy": "steps", "eval_steps": 0.25, "max_steps": 10}, 3),
        ({"eval_strategy": "epoch"}, 2),  # 8 samples, 4 in a step
    ],
)
def test_validations_come_as_often_as_the_trainer_says(given: Any, every: int) -> None:
    named = named_validation(**given)
    assert named is not None
    assert (named.every, named.samples) == (every, 5)
    mean_times_weight, weight = named.loss({"x": torch.ones(2, 3)})
    assert weight == 6
    assert mean_times_weight.shape == ()
    assert named.loss({"x": torch.zeros(2, 3)}) == (torch.tensor(0.0), 0)  # no label that counts


def test_a_trainer_without_eval_strategy_names_no_validation() -> None:
    assert named_validation() is None


def test_a_lightning_module_reads_the_steps_before(tmp_path: Path) -> None:
    seen: list[int] = []
    made = LightningModule(reads=lambda one: seen.append(one.global_step))
    fit_module(Lab(tmp_path, tmp_path, {"make": lambda _: made}))
    assert seen == [0, 0, 1, 1]  # two microbatches in each of two steps
    assert type(made) is LightningModule
