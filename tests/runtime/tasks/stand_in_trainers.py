"""Objects in the place of the trainers of other packages, which are slow to import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.adapters import hf_trainer, lightning
from holdfast.tasks.scripts.own_loop import (
    Answer,
    ComputeShare,
    DataNamed,
    EndLoop,
    LoopReached,
    OpenStep,
    Run,
    ScriptEnded,
    enter_run,
)
from holdfast.tasks.task.batches import TaskMicrobatch
from holdfast.training.engine.loss_scale import NOT_SCALED
from tests.runtime.tasks.test_own_loop_steps import Listener


class Trainer:
    """What Holdfast asks of a `transformers.Trainer`."""

    __module__ = "transformers.trainer"

    def __init__(self, label: int = 1, callbacks: tuple[object, ...] = (), **given: Any) -> None:
        fixed = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        usual = {"max_steps": 2, "max_grad_norm": 1.0, "remove_unused_columns": True}
        self.args = SimpleNamespace(**{"eval_strategy": "no", **fixed, **usual, **given})
        self.model, self.label = nn.Linear(3, 1), label
        self.callback_handler = SimpleNamespace(callbacks=callbacks)
        self.data_collator: Any = dict
        self.train_dataset = [0] * 8
        self.state = SimpleNamespace(global_step=0)
        self.lr_scheduler = None

        self.eval_dataset: Any = given.get("evaluated")
        self.compute_metrics = given.get("metrics")

    def create_optimizer_and_scheduler(self, steps: int) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def compute_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(batch["x"]).mean()
        return found


class ProgressCallback: ...


class EarlyStopping: ...


class OwnStep(Trainer):
    __module__ = "a_user"

    def training_step(self) -> None: ...


class OwnLoss(Trainer):
    __module__ = "a_user"


class Masking:
    mlm = True


class LightningModule(nn.Module):
    """What Holdfast asks of a `lightning.pytorch.LightningModule`."""

    automatic_optimization = True
    device = "cpu"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(3, 1), given
        self.automatic_optimization = given.get("automatic", True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return self.given.get("optimizers", lambda one: one)(optimizer)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.layer(batch["x"]).mean()
        self.given.get("reads", lambda one: None)(self)
        return self.given.get("answer", lambda one: one)(loss)


for hook in lightning._REFUSED_HOOKS:
    setattr(LightningModule, hook, lambda self: None)


class Hooked(LightningModule):
    def on_train_batch_end(self) -> None: ...


def run_script(script: Callable[[], object]) -> None:
    """Run a script as one rank does, with two microbatches in each step."""
    current = Run(torch.device("cpu"), torch.float32, 0, "")

    def enter() -> None:
        enter_run(current)
        script()

    answer, steps = current._turns.start(enter), 0
    while not isinstance(answer, ScriptEnded):
        steps += isinstance(answer, DataNamed)
        answer = _next(current, answer, steps)
    if answer.error is not None:
        raise answer.error


def _next(current: Run, answer: Answer, steps: int) -> Answer:
    """Give the order that follows the answer."""
    if isinstance(answer, LoopReached):
        return current._turns.give(OpenStep(1))
    if isinstance(answer, DataNamed):
        batches = [TaskMicrobatch({"x": torch.ones(2, 3)}, 7, [], 0) for _ in range(2)]
        return current._turns.give(ComputeShare((0, 1), batches, Listener(), [], NOT_SCALED))
    return current._turns.give(OpenStep(steps + 1) if steps < 2 else EndLoop())


def train_trainer(made: Any) -> None:
    run_script(lambda: hf_trainer.train(made, version="1", weight=lambda batch: int(made.label)))


def fit_module(made: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        package = SimpleNamespace(LightningModule=LightningModule)
        patch.setitem(sys.modules, "lightning.pytorch", package)
        sizes = {"steps": 2, "batch_size": 4, "microbatch_size": 2}
        run_script(lambda: lightning.fit(made, [0] * 8, version="1", **sizes))
