"""What the adapters of other trainers ask of the run, with objects in the place of theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.adapters import hf_trainer, lightning
from holdfast.errors import TaskError
from holdfast.tasks.scripts.own_loop import NamedValidation, Run, enter_run
from tests.runtime.tasks.stand_in_trainers import (
    CALLED_AFTERWARDS,
    CALLED_HOOKS,
    LISTED,
    LISTED_METHODS,
    OTHER_HOOKS,
    OTHER_METHODS,
    EarlyStopping,
    LightningModule,
    Masking,
    OwnLoss,
    ProgressCallback,
    Trainer,
    fit_module,
    overriding,
    train_trainer,
)
from tests.support.borders import unknown_entries


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


class LlamaForCausalLM(nn.Linear): ...


class OfUser(LlamaForCausalLM): ...


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def get_base_model(self) -> nn.Module:
        return self.base


@pytest.mark.parametrize(
    ("model", "counted"),
    [
        (nn.Linear(3, 1), 3),
        (OfUser(3, 1), 2),
        (torch.compile(OfUser(3, 1)), 2),
        (Adapted(OfUser(3, 1)), 2),
        (torch.compile(Adapted(OfUser(3, 1))), 2),
    ],
)
def test_the_first_label_of_a_wrapped_causal_model_does_not_count(model: Any, counted: int) -> None:
    made = Trainer()
    made.model = model
    assert hf_trainer._counted_labels(made)({"labels": torch.tensor([[5, 6, 7]])}) == counted


def test_a_trainer_without_eval_strategy_names_no_validation() -> None:
    assert named_validation() is None


def test_a_lightning_module_reads_the_steps_before() -> None:
    seen: list[int] = []
    made = LightningModule(reads=lambda one: seen.append(one.global_step))
    fit_module(made)
    assert seen == [0, 0, 1, 1]  # two microbatches in each of two steps
    assert type(made) is LightningModule


@pytest.mark.parametrize("name", OTHER_HOOKS)
def test_a_hook_that_holdfast_does_not_call_is_refused_by_its_place(name: str) -> None:
    with pytest.raises(TaskError, match=rf"Own\.{name} \(\w+\.py:\d+\) is not called"):
        fit_module(overriding(LightningModule, name)())
    bound = LightningModule()
    setattr(bound, name, print)  # by its instance
    with pytest.raises(TaskError, match=rf"LightningModule\.{name} is not called"):
        fit_module(bound)


@pytest.mark.parametrize("name", OTHER_METHODS)
def test_a_method_of_a_trainer_that_is_not_called_is_refused_by_its_place(name: str) -> None:
    with pytest.raises(TaskError, match=rf"Own\.{name} \(\w+\.py:\d+\) is not called"):
        train_trainer(overriding(Trainer, name)())


@pytest.mark.parametrize("name", sorted(LISTED_METHODS))
def test_a_harmless_method_of_a_trainer_passes(name: str) -> None:
    train_trainer(overriding(Trainer, name)())


def test_arguments_of_a_trainer_are_listed_or_refused_by_name_and_value() -> None:
    for name, value in unknown_entries(hf_trainer.TRAINER_ARGUMENTS).items():
        with pytest.raises(TaskError, match=rf"TrainingArguments\.{name} is"):
            train_trainer(Trainer(**{name: value}))
    listed = {*hf_trainer.TRAINER_ARGUMENTS.harmless, "label_smoothing_factor", "warmup_steps"}
    train_trainer(Trainer(**dict.fromkeys(listed, "other"), seed=0, data_seed=0, use_cpu=True))


def test_hooks_are_called_in_lightnings_order() -> None:
    calls: list[str] = []
    for name in (*CALLED_HOOKS, *CALLED_AFTERWARDS):
        kind = overriding(LightningModule, name)
        setattr(kind, name, lambda self, *stage, name=name: calls.append(name))
        assert fit_module(kind()) == []
    assert calls == [*CALLED_HOOKS, *CALLED_AFTERWARDS]


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_harmless_hook_passes_and_one_of_a_validation_is_named(name: str) -> None:
    notes = fit_module(overriding(LightningModule, name)())
    assert bool(notes) == (name in lightning._OF_VALIDATION)
    assert not notes or f"Own.{name} (stand_in_trainers.py:" in notes[0]


def test_keys_of_optimizers_and_schedulers_are_known_or_refused() -> None:
    for name, value in unknown_entries(lightning.SCHEDULER_KEYS).items():
        with pytest.raises(TaskError, match=name):
            fit_module(scheduled("step", **{name: value}))
    for name, value in unknown_entries(lightning.OPTIMIZER_KEYS).items():
        with pytest.raises(TaskError, match=name):
            fit_module(
                LightningModule(optimizers=lambda one, k=name, v=value: {"optimizer": one, k: v})
            )
    fit_module(LightningModule(optimizers=lambda one: [{"optimizer": one, "monitor": "loss"}]))
    fit_module(scheduled("step", frequency=1, name="rate", strict=True, monitor="loss"))


def scheduled(interval: str, **keys: Any) -> LightningModule:
    def both(optimizer: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": interval, **keys}]

    return LightningModule(optimizers=both)


def with_loss_function() -> Trainer:
    made = Trainer()
    setattr(made, "compute_loss_func", print)  # noqa: B010
    return made


def masked() -> Trainer:
    made = Trainer()
    made.data_collator = Masking()
    return made


@pytest.mark.parametrize(
    ("made", "remedy"),
    [
        (Trainer(fp16=True), "train.precision=fp16"),
        (Trainer(train_sampling_strategy="length"), "'random'"),
        (Trainer(eval_strategy="epoch"), "eval_strategy='no'"),
        (
            Trainer(eval_strategy="steps", eval_steps=2, evaluated=[0] * 4, metrics=print),
            "trainer.evaluate()",
        ),
        (Trainer(label=0), "leave such samples out"),
        (Trainer(callbacks=(ProgressCallback(), EarlyStopping())), "logging.trackers=[...]"),
        (Trainer(callbacks=(overriding(ProgressCallback, "on_log")(),)), "remove it"),
        (overriding(Trainer, "evaluate")(eval_strategy="epoch"), "compute_loss"),
        (Trainer(seed=7), "--set seed=7"),
        (masked(), "in the dataset"),
        (with_loss_function(), "override compute_loss instead"),
        (LightningModule(reads=lambda one: one.current_epoch), "global_step"),
        (LightningModule(reads=lambda one: one.trainer), "number of steps"),
        (nn.Linear(3, 1), "derive it"),
        (LightningModule(automatic=False), "holdfast.run()"),
        (LightningModule(optimizers=lambda one: None), "return an optimizer"),
        (LightningModule(optimizers=lambda one: [one, one]), "return one"),
        (LightningModule(optimizers=lambda one: (one, one)), "return one"),
        (LightningModule(optimizers=lambda one: (one, None, None)), "([optimizer], [scheduler])"),
        (scheduled("epoch"), '"interval": "step"'),
        (scheduled("step", frequency=4), "StepLR(optimizer, 4)"),
        (scheduled("step", reduce_on_plateau=True), '"interval": "step"'),
        (LightningModule(trainer=object()), "to fit()"),
        (LightningModule(answer=lambda loss: 1.0), "return the loss"),
    ],
)
def test_what_a_run_cannot_do_is_refused_with_a_remedy(made: Any, remedy: str) -> None:
    attempt = train_trainer if isinstance(made, Trainer) else fit_module
    with pytest.raises(TaskError) as caught:
        attempt(made)
    assert remedy in str(caught.value.remedy)


@pytest.mark.parametrize(
    "made",
    [
        Trainer(eval_strategy="epoch", evaluated=[0] * 4),
        Trainer(callbacks=(ProgressCallback(),)),
        OwnLoss(),
        LightningModule(optimizers=lambda one: ([one], [])),
        scheduled("step"),
        LightningModule(answer=lambda loss: {"loss": loss}),
    ],
)
def test_what_a_run_can_do_is_accepted(made: Any) -> None:
    attempt = train_trainer if isinstance(made, Trainer) else fit_module
    attempt(made)
