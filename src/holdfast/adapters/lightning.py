"""Trains a `LightningModule` by Holdfast's loop.

In a script that `holdfast run` starts, `fit(module, dataset, steps=...)` takes the place of
`Trainer(...).fit(module)`. `training_step` and `configure_optimizers` are the module's. Steps,
recovery and checkpoints are Holdfast's. A hook that could change the curve is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import default_collate

from holdfast.adapters.overrides import names, refuse_overridden
from holdfast.api.alone import run
from holdfast.borders import Border
from holdfast.errors import TaskError
from holdfast.tasks.scripts.own_loop import MapDataset

_WHERE = "holdfast.adapters.lightning"

_PACKAGES = ("lightning", "pytorch_lightning")
_LOOP_OF_ONES_OWN = "remove it, or write the loop yourself with holdfast.run()"

LIGHTNING_HOOKS = Border(
    "methods of a LightningModule",
    used=names(
        "cpu cuda double dtype float forward half to type configure_optimizers training_step "
        "automatic_optimization prepare_data setup configure_model on_fit_start on_train_start "
        "on_train_end on_fit_end teardown"
    ),
    # What its author calls; what belongs to tests and predictions; to files, names and its data.
    harmless=names(
        "CHECKPOINT_HYPER_PARAMS_KEY CHECKPOINT_HYPER_PARAMS_NAME CHECKPOINT_HYPER_PARAMS_TYPE "
        "_set_hparams _to_hparams_dict all_gather example_input_array freeze hparams "
        "hparams_initial load_from_checkpoint log log_dict logger loggers lr_schedulers "
        "manual_backward on_predict_batch_end on_predict_batch_start on_predict_end "
        "on_predict_epoch_end on_predict_epoch_start on_predict_model_eval on_predict_start "
    )
    | names(
        "on_test_batch_end on_test_batch_start on_test_end on_test_epoch_end on_test_epoch_start "
        "on_test_model_eval on_test_model_train on_test_start optimizers predict_dataloader "
        "predict_step print remove_ignored_hparams save_hyperparameters strict_loading "
        "test_dataloader test_step to_onnx to_tensorrt to_torchscript toggle_optimizer "
        "toggled_optimizer train_dataloader unfreeze untoggle_optimizer"
    ),
    entry="method",
)
_OF_VALIDATION = names(
    "on_validation_batch_end on_validation_batch_start on_validation_end on_validation_epoch_end "
    "on_validation_epoch_start on_validation_model_eval on_validation_model_train "
    "on_validation_model_zero_grad on_validation_start val_dataloader validation_step"
)
"""Hooks of a validation by Lightning: the run says that it calls none."""

SCHEDULER_KEYS = Border(
    "lr_scheduler of a LightningModule",
    used=frozenset({"scheduler"}),
    harmless=frozenset({"name", "monitor", "strict"}),  # monitor: of ReduceLROnPlateau alone
    plain={"interval": ("step",), "frequency": (1,), "reduce_on_plateau": ()},
)
OPTIMIZER_KEYS = Border(
    "configure_optimizers of a LightningModule",
    used=frozenset({"optimizer", "lr_scheduler"}),
    harmless=frozenset({"monitor"}),
)

Weight = Callable[[Any], int]
Collate = Callable[[Any], Any]


def fit(
    module: Any,
    dataset: MapDataset,
    *,
    steps: int,
    batch_size: int,
    microbatch_size: int,
    version: str | None = None,
    collate: Collate = default_collate,
    weight: Weight | None = None,
    clip_norm: float = 0.0,
) -> None:
    """Train `module` for `steps` steps; afterwards it has the result. Raises TaskError.

    Args:
        module: a LightningModule with `training_step` and `configure_optimizers`. `training_step`
            gets a batch and the number of steps before.
        dataset: map-style. Its items are what `collate` takes.
        batch_size: samples of a step, over all workers. microbatch_size: of one batch.
        version: names the dataset's content, if it has no attribute `version`.
        weight: the number of things that the loss of a batch is the mean of; by default its
            samples.
        clip_norm: largest global norm of the gradient; 0: no clipping.
    """
    current = run()
    _check_module(module)
    kind, done = type(module), [0]
    given = {"global_step": property(lambda _: done[0]), "current_epoch": property(_no_epoch)}
    given["trainer"] = property(_no_trainer)
    module.__class__ = type(kind.__name__, (kind,), given)
    module.to(current.device)
    module.train()
    module.prepare_data()
    module.setup("fit")
    module.configure_model()
    optimizer, scheduler = _chosen_optimizer(module.configure_optimizers())
    module.on_fit_start()
    module.on_train_start()
    takes_index = _takes_index(module)
    current.keep(module, optimizer, scheduler, clip_norm=clip_norm)
    for step in current.steps(steps, batch_size=batch_size, microbatch_size=microbatch_size):
        done[0] = step.number - 1
        named = step.batches(
            dataset, version=version, collate=lambda items: _as_named(collate(items))
        )
        for tensors in named:
            batch = _as_collated(tensors)
            parts = len(next(iter(tensors.values()))) if weight is None else weight(batch)
            index = (step.number - 1,) if takes_index else ()
            step.backward(_loss(module.training_step(batch, *index)) * parts, parts)
        step.apply()
    module.on_train_end()
    module.on_fit_end()
    module.teardown("fit")
    module.__class__ = kind
    module.eval()


def _check_module(module: Any) -> None:
    """Raises TaskError for a module that this loop would train otherwise than Lightning does."""
    kinds = type(module).__mro__
    if not any(k.__name__ == "LightningModule" and _is_lightnings(k) for k in kinds):
        raise _refused(f"{type(module).__name__} is no LightningModule", "derive it from that")
    if not module.automatic_optimization:
        raise _refused(
            "the module sets automatic_optimization=False",
            "write the loop yourself with holdfast.run()",
        )
    if getattr(module, "_trainer", None) is not None:
        raise _refused(
            "the module has a Trainer, whose arguments and callbacks Holdfast does not use",
            "remove it, and give steps, batch_size and clip_norm to fit()",
        )
    hooks = replace(LIGHTNING_HOOKS, harmless=LIGHTNING_HOOKS.harmless | _OF_VALIDATION)
    found = refuse_overridden(module, _PACKAGES, hooks, _WHERE, _LOOP_OF_ONES_OWN)
    if unread := [found[name] for name in sorted(_OF_VALIDATION & found.keys())]:
        run().note(
            f"not called: {', '.join(unread)}; name a validation with holdfast.run().validate()"
        )


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


def _takes_index(module: Any) -> bool:
    """Return True if `training_step` takes the number of steps before, too. Raises TaskError for
    other arguments."""
    arguments = signature(module.training_step).parameters.values()
    listed = [one for one in arguments if one.kind is Parameter.VAR_POSITIONAL]
    named = [one for one in arguments if one.kind in _POSITIONAL]
    required = [one.name for one in named if one.default is Parameter.empty]
    if len(required) > 2 or any(one.name == "dataloader_iter" for one in named):
        raise _refused(
            f"training_step() takes {', '.join(required)}",
            "let it take a batch and the number of steps before",
        )
    return bool(listed) or len(named) > 1


_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_POSITION, _SINGLE = "item ", "batch"
"""Names of the tensors of a batch that is a sequence of tensors, or one tensor."""


def _no_epoch(module: Any) -> int:
    raise _refused("the module reads current_epoch, and steps are counted", "read global_step")


def _no_trainer(module: Any) -> Any:
    raise _refused(
        "the module reads self.trainer, which there is none of",
        "pass the number of steps to the module",
    )


def _as_named(batch: Any) -> Mapping[str, Tensor]:
    """Return the batch as a dict. Raises TaskError for one that is not flat."""
    if isinstance(batch, Tensor):
        return {_SINGLE: batch}
    if isinstance(batch, Mapping):
        named = dict(batch)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        named = {f"{_POSITION}{number}": value for number, value in enumerate(batch)}
    else:
        named = {}
    if not named or not all(isinstance(value, Tensor) for value in named.values()):
        raise _refused(
            f"a collated batch is {type(batch).__name__}, and not flat",
            "let collate return a tensor, or a list or a dict of tensors",
        )
    return named


def _as_collated(tensors: Mapping[str, Tensor]) -> Any:
    """Return the batch as `collate` made it: the inverse of `_as_named`."""
    first = next(iter(tensors))
    if first == _SINGLE and len(tensors) == 1:
        return tensors[_SINGLE]
    return list(tensors.values()) if first.startswith(_POSITION) else dict(tensors)


def _chosen_optimizer(answer: Any) -> tuple[Optimizer, Any]:
    """Return the optimizer and the scheduler, or None, of `configure_optimizers`. Raises
    TaskError for more than one, and for a scheduler that does not count steps."""
    if isinstance(answer, list | tuple) and len(answer) == 1 and isinstance(answer[0], Mapping):
        answer = answer[0]
    optimizers, schedulers = answer, None
    if isinstance(answer, Mapping):
        remedy = 'return {"optimizer": ..., "lr_scheduler": ...}'
        OPTIMIZER_KEYS.check(answer, _WHERE, TaskError, remedy)
        optimizers, schedulers = answer.get("optimizer"), answer.get("lr_scheduler")
    elif isinstance(answer, tuple) and not all(isinstance(one, Optimizer) for one in answer):
        if len(answer) != 2:
            raise _refused(
                f"configure_optimizers() returned {len(answer)} values",
                "return an optimizer, or ([optimizer], [scheduler])",
            )
        optimizers, schedulers = answer
    optimizer, scheduler = _single(optimizers, "optimizer"), _single(schedulers, "lr_scheduler")
    if not isinstance(optimizer, Optimizer):
        raise _refused(
            f"configure_optimizers() returned {type(answer).__name__}", "return an optimizer"
        )
    if scheduler is None:
        return optimizer, None
    keys = dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
    remedy = (
        'return {"scheduler": ..., "interval": "step"}; the scheduler itself can count several '
        "steps as one, as StepLR(optimizer, 4) does"
    )
    SCHEDULER_KEYS.check({"interval": "epoch", **keys}, _WHERE, TaskError, remedy)
    return optimizer, keys["scheduler"]


def _single(found: Any, what: str) -> Any:
    if isinstance(found, list | tuple):
        if len(found) > 1:
            raise _refused(f"configure_optimizers() returned {len(found)} of {what}", "return one")
        return found[0] if found else None
    return found


def _loss(answer: Any) -> Tensor:
    loss = answer.get("loss") if isinstance(answer, Mapping) else answer
    if not isinstance(loss, Tensor):
        raise _refused(
            f"training_step() returned {type(answer).__name__}", 'return the loss, or {"loss": ...}'
        )
    return loss


def _refused(what: str, remedy: str) -> TaskError:
    return TaskError(what, where=_WHERE, remedy=remedy)
