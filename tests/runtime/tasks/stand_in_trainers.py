"""Objects in the place of the trainers of other packages, which are slow to import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, make_dataclass
from types import SimpleNamespace
from typing import Any

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
from tests.support.borders import unknown_entries


class Trainer:
    """What Holdfast asks of a `transformers.Trainer`."""

    __module__ = "transformers.trainer"

    def __init__(self, label: int = 1, callbacks: tuple[object, ...] = (), **given: Any) -> None:
        self.eval_dataset, self.compute_metrics = (
            given.pop("evaluated", None),
            given.pop("metrics", None),
        )
        self.args = arguments(**given)
        self.model, self.label = nn.Linear(3, 1), label
        self.callback_handler = SimpleNamespace(callbacks=callbacks)
        self.data_collator: Any = dict
        self.train_dataset = [0] * 8
        self.state = SimpleNamespace(global_step=0)
        self.lr_scheduler = None

    def create_optimizer_and_scheduler(self, steps: int) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def compute_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(batch["x"]).mean()
        return found

    def _get_collator_with_removed_columns(self, collator: Any) -> Any:
        return collator


LISTED_METHODS = {*hf_trainer.TRAINER_METHODS.harmless, *hf_trainer._OF_VALIDATION}
OTHER_METHODS = unknown_entries(hf_trainer.TRAINER_METHODS)
for method in {*LISTED_METHODS, *OTHER_METHODS}:
    setattr(Trainer, method, lambda self: None)


def arguments(**given: Any) -> Any:
    """What Holdfast asks of `transformers.TrainingArguments`, and those of `given`."""
    fixed = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    usual = {"max_grad_norm": 1.0, "eval_strategy": "no", "seed": 42}
    others = dict.fromkeys(given, None)
    named = [(name, Any, field(default=value)) for name, value in (others | fixed | usual).items()]
    place = {"__module__": "transformers.training_args"}
    return make_dataclass("TrainingArguments", named, namespace=place)(**given)


class ProgressCallback:
    __module__ = "transformers.trainer_callback"


class EarlyStopping: ...


class OwnLoss(Trainer):
    __module__ = "a_user"


class Masking:
    mlm = True


class LightningModule(nn.Module):
    """What Holdfast asks of a `lightning.pytorch.LightningModule`."""

    __module__ = "lightning.pytorch"
    automatic_optimization = True
    device = "cpu"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(3, 1), given
        self.automatic_optimization = given.get("automatic", True)
        self._trainer = given.get("trainer")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return self.given.get("optimizers", lambda one: one)(optimizer)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.layer(batch["x"]).mean()
        self.given.get("reads", lambda one: None)(self)
        return self.given.get("answer", lambda one: one)(loss)


CALLED_HOOKS = ("prepare_data", "setup", "configure_model", "on_fit_start", "on_train_start")
CALLED_AFTERWARDS = ("on_train_end", "on_fit_end", "teardown")
LISTED = {*lightning.LIGHTNING_HOOKS.harmless, *lightning._OF_VALIDATION}
OTHER_HOOKS = unknown_entries(lightning.LIGHTNING_HOOKS)
for hook in {*LISTED, *OTHER_HOOKS, *CALLED_HOOKS, *CALLED_AFTERWARDS}:
    setattr(LightningModule, hook, lambda self, *stage: None)


def overriding(base: type, name: str, module: str = "a_user") -> type:
    """A class of a user that overrides one method of a framework's class."""
    return type("Own", (base,), {"__module__": module, name: lambda self, *rest: None})


def run_script(script: Callable[[], object]) -> list[str]:
    """Run a script as one rank does, with two microbatches in each step. Return its notes."""
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
    return current.notes


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


def fit_module(made: Any) -> list[str]:
    sizes = {"steps": 2, "batch_size": 4, "microbatch_size": 2}
    return run_script(lambda: lightning.fit(made, [0] * 8, version="1", **sizes))
