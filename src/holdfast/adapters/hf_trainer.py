"""Trains what a Hugging Face `Trainer` describes, by Holdfast's loop.

In a script that `holdfast run` starts, `train(trainer, version="...")` takes the place of
`trainer.train()`. Model, optimizer, schedule, collator and loss are the trainer's. Steps, recovery
and checkpoints are Holdfast's. What the trainer would do otherwise and changes the curve is refused
by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from holdfast.adapters.overrides import names, refuse_overridden
from holdfast.api.alone import run
from holdfast.borders import Border
from holdfast.errors import TaskError
from holdfast.tasks.scripts.own_loop import Run

_WHERE = "holdfast.adapters.hf_trainer"
_IGNORED_LABEL = -100  # of a position that no loss is computed of

_QUIET_CALLBACKS = ("DefaultFlowCallback", "ProgressCallback", "PrinterCallback")
"""Callbacks that only show progress, which Holdfast does itself."""

_PACKAGES = ("transformers",)

TRAINER_METHODS = Border(
    "methods of a Trainer",
    used=names(
        "compute_loss create_optimizer create_optimizer_and_scheduler create_scheduler "
        "get_decay_parameter_names get_optimizer_cls_and_kwargs "
        "_get_collator_with_removed_columns _set_signature_columns_if_needed"
    ),
    # What `__init__` or the author calls, and what saves, loads, logs and predicts.
    harmless=names(
        "_build_accelerator_args _finish_current_push _get_output_dir _load_best_model "
        "_load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state "
        "_load_scaler _move_model_to_device _push_from_checkpoint _save _save_checkpoint "
        "_save_optimizer_and_scheduler _save_rng_state _save_scaler _validate_args add_callback "
        "call_model_init create_accelerator_and_postprocess create_model_card end "
        "floating_point_ops get_learning_rates get_num_trainable_parameters get_optimizer_group "
        "get_test_dataloader init_hf_repo is_local_process_zero is_world_process_zero log "
        "log_metrics metrics_format num_examples pop_callback predict push_to_hub remove_callback "
        "save_metrics save_model save_state store_flos"
    ),
    entry="method",
)
_OF_VALIDATION = names(
    "_evaluate _get_eval_sampler evaluate evaluation_loop get_eval_dataloader prediction_step"
)
"""Methods that the run's validation does not call: harmless without one."""

TRAINER_ARGUMENTS = Border(
    "TrainingArguments",
    used=names(
        "per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type "
        "lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1 "
        "adam_beta2 adam_epsilon optim_target_modules gradient_accumulation_steps max_grad_norm "
        "label_smoothing_factor eval_strategy eval_steps remove_unused_columns label_names"
    ),
    # Of saving, logging, places, data loading and several processes, which are Holdfast's.
    harmless=names(
        "output_dir average_tokens_across_devices use_cache torch_empty_cache_steps "
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name "
        "project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "per_device_eval_batch_size prediction_loss_only eval_do_concat_batches "
        "eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
        "save_only_model save_strategy save_steps save_on_each_node save_total_limit "
        "enable_jit_checkpoint hub_token hub_private_repo hub_model_id hub_strategy "
        "hub_always_push hub_revision metric_for_best_model greater_is_better ignore_data_skip "
        "restore_callback_states_from_checkpoint full_determinism dataloader_num_workers "
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order length_column_name "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout fsdp_config gradient_checkpointing_kwargs "
        "activation_checkpointing_kwargs liger_kernel_config skip_memory_metrics do_train do_eval "
        "do_predict local_rank"
    ),
    plain={"train_sampling_strategy": ("random", "random_sampler")},
    entry="argument",
)
_IN_THE_SCRIPT = "call model.gradient_checkpointing_enable() in the script instead"
_REMEDIES = {
    "fp16": "use --set train.precision=fp16",
    "bf16": "use --set train.precision=bf16",
    "gradient_checkpointing": _IN_THE_SCRIPT,
    "activation_checkpointing": _IN_THE_SCRIPT,
    "load_best_model_at_end": "choose a checkpoint after the run",
    "train_sampling_strategy": "use 'random'",
    "push_to_hub": "call trainer.push_to_hub() after the training",
    "resume_from_checkpoint": "remove it: the same command resumes the run",
    "use_cpu": "use --set device=cpu",
}

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
    _refuse_arguments(args, current)
    _refuse_callbacks(trainer)
    _refuse_loss_function(trainer)
    is_validated = _strategy(args) != "no"
    harmless = TRAINER_METHODS.harmless | (frozenset() if is_validated else _OF_VALIDATION)
    methods = replace(TRAINER_METHODS, harmless=harmless)
    remedy = "override compute_loss, or write the loop yourself with holdfast.run()"
    refuse_overridden(trainer, _PACKAGES, methods, _WHERE, remedy)
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
    strategy = _strategy(args)
    if strategy == "no":
        return None
    if strategy == "epoch":
        return ceil(len(trainer.train_dataset) / batch_size)
    share = float(args.eval_steps)
    return ceil(steps * share if share < 1 else share)


def _strategy(args: Any) -> str:
    return str(getattr(args.eval_strategy, "value", args.eval_strategy))


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
    collate = trainer._get_collator_with_removed_columns(collator)
    return lambda items: dict(collate(list(items)))


def _counted_labels(trainer: Any) -> Weight:
    """Return the default weight. A causal model shifts its labels, so the first never counts."""
    names_of_kinds = " ".join(kind.__name__ for kind in type(_unwrapped(trainer.model)).__mro__)
    shift = "CausalLM" in names_of_kinds or "LMHead" in names_of_kinds

    def weigh(batch: Mapping[str, Tensor]) -> int:
        labels = batch.get("labels")
        if labels is None or labels.dim() < 2 or labels.is_floating_point():
            return len(next(iter(batch.values())))
        counted = labels[..., 1:] if shift else labels
        return int((counted != _IGNORED_LABEL).sum())

    return weigh


def _refuse_loss_function(trainer: Any) -> None:
    """Raises TaskError for `compute_loss_func`.

    Of the other arguments of a Trainer, `model`, `train_dataset`, `data_collator`, `optimizers` and
    `optimizer_cls_and_kwargs` are used. `callbacks` are refused, and `compute_metrics` with a
    validation. Without one it has no effect, as `preprocess_logits_for_metrics`."""
    if (function := getattr(trainer, "compute_loss_func", None)) is not None:
        name = getattr(function, "__name__", type(function).__name__)
        raise TaskError(
            f"compute_loss_func is {name}, and Holdfast has no num_items_in_batch to give it",
            where="the script's Trainer",
            remedy="override compute_loss instead, and return the mean of one batch",
        )


def _unwrapped(model: Any) -> Any:
    """Return the model that torch.compile and PEFT wrap."""
    while True:
        if (compiled := getattr(model, "_orig_mod", None)) is not None:
            model = compiled
        elif (base := getattr(model, "get_base_model", None)) is not None:
            model = base()
        else:
            return model


def _refuse_callbacks(trainer: Any) -> None:
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        name, package = kind.__name__, kind.__module__.partition(".")[0]
        if name not in _QUIET_CALLBACKS or package not in _PACKAGES:
            raise _refused(
                f"callback {name} is not called by Holdfast, and could change the curve",
                "remove it; for a tracker use report_to='none' and --set logging.trackers=[...]",
            )


def _refuse_arguments(args: Any, current: Run) -> None:
    """Refuse an argument that would change the curve, by its name and value."""
    kinds = type(args).__mro__
    base = next(kind for kind in kinds if kind.__module__.partition(".")[0] in _PACKAGES)
    as_the_run = {"seed": current.seed, "data_seed": current.seed}
    as_the_run |= {"use_cpu": True} if current.device.type == "cpu" else {}
    said = {}
    for one in fields(base):
        value = getattr(args, one.name)
        if not (_is_default(value, one) or as_the_run.get(one.name) == value):
            said[one.name] = getattr(value, "value", value)
    for name in (*TRAINER_ARGUMENTS.unread(said), *TRAINER_ARGUMENTS.plain.keys() & said.keys()):
        if TRAINER_ARGUMENTS.problems({name: said[name]}):
            seed = f"use --set seed={said[name]}" if name in ("seed", "data_seed") else "remove it"
            what = f"TrainingArguments.{name} is {said[name]!r}"
            raise _refused(what, _REMEDIES.get(name, seed))


def _is_default(value: Any, one: Field[Any]) -> bool:
    """Return True for the default of a field, or of the class of an object in it."""
    if is_dataclass(value) and not isinstance(value, type):
        return bool(value == type(value)())
    return bool(value == one.default)


def _refused(what: str, remedy: str) -> TaskError:
    return TaskError(what, where=_WHERE, remedy=remedy)
