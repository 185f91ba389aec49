"""Trains what a Hugging Face `Trainer` describes, by Holdfast's loop.

In a script that `holdfast run` starts, `train(trainer, version="...")` takes the place of
`trainer.train()`. Model, optimizer, schedule, collator and loss are the trainer's. Steps, recovery
and checkpoints are Holdfast's. What the trainer would do otherwise and changes the curve is refused
by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import TaskError
from holdfast.tasks.scripts.own_loop import run

_WHERE = "holdfast.adapters.hf_trainer"
_IGNORED_LABEL = -100  # of a position that no loss is computed of
_LABEL_COLUMNS = ("label", "label_ids", "labels")

_QUIET_CALLBACKS = ("DefaultFlowCallback", "ProgressCallback", "PrinterCallback")
"""Callbacks that only show progress, which Holdfast does itself."""

_REFUSED_ARGUMENTS: Mapping[str, tuple[Any, str]] = {
    "fp16": (False, "use --set train.precision=fp16"),
    "bf16": (False, "use --set train.precision=bf16"),
    "torch_compile": (False, "remove it"),
    "gradient_checkpointing": (False, "remove it"),
    "neftune_noise_alpha": (None, "remove it"),
    "auto_find_batch_size": (False, "remove it"),
    "deepspeed": (None, "remove it"),
    "load_best_model_at_end": (False, "choose a checkpoint after the run"),
}
"""Arguments that would change the curve: the value that may stay, and a remedy."""

_NO_SAMPLING = ("random", "random_sampler")
"""Values of `train_sampling_strategy` that leave the order of samples to Holdfast."""

Weight = Callable[[Mapping[str, Tensor]], int]
Collate = Callable[[Sequence[Any]], Mapping[str, Tensor]]


def train(trainer: Any, *, version: str, weight: Weight | None = None) -> None:
    """Train to the last step of `trainer.args`; afterwards `trainer.model` has the result.

    A step has `per_device_train_batch_size * gradient_accumulation_steps` samples, whatever the
    number of workers is. One logical microbatch has `per_device_train_batch_size`. The run has the
    loss of `eval_dataset` as often as `eval_strategy` says.

    Args:
        trainer: a `transformers.Trainer` that has not trained yet.
        version: names the content of its training data.
        weight: what a batch adds to the divisor of the step's loss: the number of things that the
            trainer's loss is the mean of. By default these are the labels that count. Without a
            label for each token, they are the samples.

    Raises TaskError.
    """
    current, args, model = run(), trainer.args, trainer.model
    for name, (allowed, remedy) in _REFUSED_ARGUMENTS.items():
        value = getattr(args, name, allowed)
        if value != allowed and value:
            raise _refused(f"TrainingArguments.{name} is {value!r}", remedy)
    strategy = getattr(args, "train_sampling_strategy", "random")
    if str(getattr(strategy, "value", strategy)) not in _NO_SAMPLING:
        raise _refused(f"TrainingArguments.train_sampling_strategy is {strategy!r}", "use 'random'")
    _refuse_callbacks(trainer)
    _refuse_methods(trainer)
    micro = int(args.per_device_train_batch_size)
    batch_size = micro * int(args.gradient_accumulation_steps)
    dataset = trainer.train_dataset
    steps = int(args.max_steps)
    if steps <= 0:
        steps = ceil(float(args.num_train_epochs) * len(dataset) / batch_size)
    trainer.create_optimizer_and_scheduler(steps)
    model.train()
    clip_norm = float(args.max_grad_norm or 0.0)
    current.keep(model, trainer.optimizer, trainer.lr_scheduler, clip_norm=clip_norm)
    collate, weigh = _collator(trainer), weight or _counted_labels(trainer)
    if (every := _steps_between_validations(trainer, steps, batch_size)) is not None:
        _validate(trainer, every, collate, weigh)
    for step in current.steps(steps, batch_size=batch_size, microbatch_size=micro):
        for batch in step.batches(dataset, version=version, collate=collate):
            mean, parts = trainer.compute_loss(model, dict(batch)), weigh(batch)
            if parts == 0:
                raise _refused("a batch has no label that counts", "leave such samples out")
            step.backward(mean * parts, parts)
        if step.apply():
            trainer.state.global_step = step.number
    model.eval()


def _steps_between_validations(trainer: Any, steps: int, batch_size: int) -> int | None:
    """By `eval_strategy`; None for no validation."""
    args = trainer.args
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if strategy == "no":
        return None
    if strategy == "epoch":
        return ceil(len(trainer.train_dataset) / batch_size)
    share = float(args.eval_steps)
    return ceil(steps * share if share < 1 else share)


def _validate(trainer: Any, every: int, collate: Collate, weigh: Weight) -> None:
    """Let the run measure the loss of `eval_dataset`. Raises TaskError."""
    dataset, model = trainer.eval_dataset, trainer.model
    if dataset is None or isinstance(dataset, Mapping):
        raise _refused(
            f"eval_dataset is {type(dataset).__name__}, and eval_strategy asks for validations",
            "give the trainer one dataset, or use eval_strategy='no'",
        )
    if trainer.compute_metrics is not None:
        raise _refused(
            "the validation computes the loss alone, and the trainer has compute_metrics",
            "use eval_strategy='no', and call trainer.evaluate() after the training",
        )

    def loss(batch: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        parts = weigh(batch)
        mean = trainer.compute_loss(model, dict(batch)) if parts else torch.zeros(())
        return mean * parts, parts

    run().validate(dataset, loss, every=every, samples=len(dataset), collate=collate)


def _collator(trainer: Any) -> Collate:
    """Return the trainer's collator, after the columns that the model does not take are removed."""
    collator = trainer.data_collator
    if getattr(collator, "mlm", False):
        raise _refused(
            f"{type(collator).__name__} masks at random where samples are read",
            "mask in the dataset, from a seed for each index",
        )
    known = inspect.signature(trainer.model.forward).parameters
    keeps_all = not trainer.args.remove_unused_columns
    wanted = (*known, *_LABEL_COLUMNS)

    def collate(items: Sequence[Any]) -> Mapping[str, Tensor]:
        kept = [
            {name: value for name, value in item.items() if keeps_all or name in wanted}
            for item in items
        ]
        return dict(collator(kept))

    return collate


def _counted_labels(trainer: Any) -> Weight:
    """Return the default weight. A causal model shifts its labels, so the first never counts."""
    shift = "CausalLM" in type(trainer.model).__name__ or "LMHead" in type(trainer.model).__name__

    def weigh(batch: Mapping[str, Tensor]) -> int:
        labels = batch.get("labels")
        if labels is None or labels.dim() < 2 or labels.is_floating_point():
            return len(next(iter(batch.values())))
        counted = labels[..., 1:] if shift else labels
        return int((counted != _IGNORED_LABEL).sum())

    return weigh


def _refuse_callbacks(trainer: Any) -> None:
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__
        if name not in _QUIET_CALLBACKS:
            raise _refused(
                f"callback {name} is not called by Holdfast, and could change the curve",
                "remove it; for a tracker use report_to='none' and --set logging.trackers=[...]",
            )


def _refuse_methods(trainer: Any) -> None:
    """Refuse a subclass that overrides the parts of the trainer's loop, which is not run."""
    for kind in type(trainer).__mro__:
        if kind.__module__.partition(".")[0] == "transformers":
            return
        for name in ("training_step", "get_train_dataloader", "_inner_training_loop", "train"):
            if name in vars(kind):
                raise _refused(
                    f"{kind.__name__}.{name} is not called by Holdfast",
                    "override compute_loss, or write the loop yourself with holdfast.run()",
                )


def _refused(what: str, remedy: str) -> TaskError:
    return TaskError(what, where=_WHERE, remedy=remedy)
