"""Remedies of messages about the trainers of other packages, with objects in the place of theirs.

The packages themselves are slow to import. `tests/system/test_own_loop.py` trains with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.adapters import hf_trainer, lightning
from tests.runtime.cli.remedies.lab import Case, Lab, case
from tests.runtime.cli.remedies.of_others import values
from tests.runtime.cli.remedies.of_own_loops import train

Call = Callable[[Any], object]


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


def trainer(site: str, wrong: Call, remedy: str, right: Call) -> Case:
    """A trainer that is made by `wrong`, and after the remedy by `right`."""
    return _made(f"hf_trainer.py: {site}", wrong, train_trainer, remedy, right)


def _made(site: str, wrong: Call, attempt: Call, remedy: str, right: Call) -> Case:
    return case(
        f"adapters/{site}",
        values(make=wrong),
        attempt,
        remedy,
        lambda lab, found: lab.settings.update(make=lambda _: right(found)),
    )


def argument(site: str, name: str, wrong: Any, remedy: str, right: Any) -> Case:
    site = f"TrainingArguments.{site} is …"
    return trainer(
        site,
        lambda _: Trainer(**{name: wrong}),
        remedy,
        lambda found: Trainer(**{name: found[1] if right is None else right}),
    )


def train_trainer(lab: Lab) -> None:
    made = lab.settings["make"](None)

    def weigh(batch: Any) -> int:
        return int(made.label)

    lab.settings["text"] = "go()"
    train_script(lab, lambda: hf_trainer.train(made, version="1", weight=weigh))


def train_script(lab: Lab, go: Callable[[], None]) -> None:
    """Run it where a script would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.__globals__["NAMES"], "go", go)
        train(lab)


def masked() -> Trainer:
    made = Trainer()
    made.data_collator = Masking()
    return made


# --- Lightning ------------------------------------------------------------------------------
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


def module(site: str, wrong: Call, remedy: str, right: Call | None = None) -> Case:
    """A module that is made by `wrong`, and after the remedy by `right`."""
    plain: Call = lambda found: LightningModule()  # noqa: E731
    return _made(f"lightning.py: {site}", wrong, fit_module, remedy, right or plain)


def fit_module(lab: Lab) -> None:
    made = lab.settings["make"](None)
    sizes = {"steps": 2, "batch_size": 4, "microbatch_size": 2}
    lab.settings["text"] = "go()"
    with pytest.MonkeyPatch.context() as patch:
        package = SimpleNamespace(LightningModule=LightningModule)
        patch.setitem(sys.modules, "lightning.pytorch", package)
        train_script(lab, lambda: lightning.fit(made, [0] * 8, version="1", **sizes))


def scheduled(interval: str) -> Call:
    def make(found: Any) -> LightningModule:
        def both(optimizer: Any) -> Any:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [{"scheduler": scheduler, "interval": interval}]

        return LightningModule(optimizers=both)

    return make


OWN_LOOP = r"write the loop yourself with holdfast\.run\(\)"

CASES: list[Case] = [
    argument("…", "fp16", True, r"use --set train\.precision=fp16", False),
    argument("train_sampling_strategy", "train_sampling_strategy", "length", r"use '(\w+)'", None),
    trainer(
        "eval_dataset is …, and eval_strategy asks for validations",
        lambda _: Trainer(eval_strategy="epoch"),
        r"give the trainer one dataset, or use eval_strategy='no'",
        lambda _: Trainer(eval_strategy="epoch", evaluated=[0] * 4),
    ),
    trainer(
        "the validation computes the loss alone, and the trainer has compute_metrics",
        lambda _: Trainer(eval_strategy="steps", eval_steps=2, evaluated=[0] * 4, metrics=print),
        r"use eval_strategy='(\w+)', and call trainer\.evaluate\(\) after the training",
        lambda found: Trainer(eval_strategy=found[1], metrics=print),
    ),
    trainer(
        "a batch has no label that counts",
        lambda _: Trainer(label=0),
        r"leave such samples out",
        lambda _: Trainer(),
    ),
    trainer(
        "callback … is not called by Holdfast, and could change the curve",
        lambda _: Trainer(callbacks=(ProgressCallback(), EarlyStopping())),
        r"remove it; for a tracker use report_to='none' and --set logging\.trackers=\[\.\.\.\]",
        lambda _: Trainer(callbacks=(ProgressCallback(),)),
    ),
    trainer(
        "….… is not called by Holdfast",
        lambda _: OwnStep(),
        rf"override compute_loss, or {OWN_LOOP}",
        lambda _: OwnLoss(),
    ),
    trainer(
        "… masks at random where samples are read",
        lambda _: masked(),
        r"mask in the dataset, from a seed for each index",
        lambda _: Trainer(),
    ),
    module(
        "the module reads current_epoch, and steps are counted",
        lambda _: LightningModule(reads=lambda one: one.current_epoch),
        r"read (global_step)",
        lambda found: LightningModule(reads=lambda one: getattr(one, found[1])),
    ),
    module("… is no LightningModule", lambda _: nn.Linear(3, 1), r"derive it from that"),
    module(
        "the module sets automatic_optimization=False",
        lambda _: LightningModule(automatic=False),
        OWN_LOOP,
    ),
    module(
        "….… is not called by Holdfast, and could change the curve",
        lambda _: Hooked(),
        rf"remove it, or {OWN_LOOP}",
    ),
    module(
        "configure_optimizers() returned …",
        lambda _: LightningModule(optimizers=lambda one: None),
        r"return an optimizer",
    ),
    module(
        "configure_optimizers() returned … of …",
        lambda _: LightningModule(optimizers=lambda one: [one, one]),
        r"return one",
    ),
    module(
        "configure_optimizers() returned … of …",
        lambda _: LightningModule(optimizers=lambda one: (one, one)),
        r"return one",
    ),
    module(
        "configure_optimizers() returned … values",
        lambda _: LightningModule(optimizers=lambda one: (one, None, None)),
        r"return an optimizer, or \(\[optimizer\], \[scheduler\]\)",
        lambda _: LightningModule(optimizers=lambda one: ([one], [])),
    ),
    module(
        "the interval of the lr_scheduler is …",
        scheduled("epoch"),
        r'return \{"scheduler": \.\.\., "interval": "step"\}',
        scheduled("step"),
    ),
    module(
        "training_step() returned …",
        lambda _: LightningModule(answer=lambda loss: 1.0),
        r'return the loss, or \{"loss": \.\.\.\}',
        lambda _: LightningModule(answer=lambda loss: {"loss": loss}),
    ),
    case(
        "adapters/lightning.py: a collated batch is …, and not flat",
        values(batch={"x": [torch.ones(2)]}),
        lambda lab: lightning._as_named(lab.settings["batch"]),
        r"let collate return a tensor, or a list or a dict of tensors",
        lambda lab, found: lab.settings.update(batch={"x": torch.ones(2)}),
    ),
]
