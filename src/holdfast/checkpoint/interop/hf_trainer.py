"""A checkpoint folder of transformers' Trainer: weights, AdamW's moments, step and schedule.

    model.safetensors      the weights, by Hugging Face's names
    optimizer.pt           moments by number, in the order of the optimizer's groups
    scheduler.pt           the rate, and the number of steps that it counted
    trainer_state.json     the step, and the position in epochs
    training_args.bin      a pickle of any class: never read

Trainer puts decayed parameters into its first group and the rest into its second. So the numbers
follow from the model's order of parameters, which transformers itself tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from holdfast.checkpoint.interop.dcp_import import FlatState
from holdfast.checkpoint.interop.torch_files import TorchState, load_tensors, refuse_unknown
from holdfast.config.huggingface.folder import read_json_object
from holdfast.config.huggingface.weight_files import read_weights
from holdfast.config.sections.train import ScheduleConfig
from holdfast.core.lr_schedule import schedule_factor
from holdfast.errors import CheckpointError, DataError

STATE_FILE, OPTIMIZER_FILE, SCHEDULER_FILE = "trainer_state.json", "optimizer.pt", "scheduler.pt"
KINDS = ("linear", "cosine", "constant")
MAX_WARMUP = 2000  # steps of a warm-up that are tried
MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq"})


@dataclass
class ForeignState:
    """Another trainer's state, in the form that a run continues."""

    trainer: str  # its name, for people
    state: FlatState
    step: int  # updates that were made
    settings: dict[str, Any] = field(default_factory=dict)  # key of a run file -> value there
    rate: float | None = None  # of the update that comes next
    position: str = ""  # what the folder says of the data's position
    left_out: tuple[str, ...] = ()  # files that are not read, with the reason
    differences: tuple[str, ...] = ()  # of the optimizer from the run file, as sentences


def is_hf_trainer(folder: Path) -> bool:
    return (folder / STATE_FILE).is_file()


def parameter_groups(folder: Path) -> list[list[str]]:
    """Return the names of Trainer's groups: decayed parameters, and the rest. Raises DataError if
    transformers is not installed."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, Trainer
    except ImportError:
        raise DataError(
            "the order of Trainer's parameters needs transformers, which is not installed",
            where=str(folder),
            remedy="pip install 'holdfast[hf]', or import the weights alone with --weights-only",
        ) from None
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    names = [name for name, _ in model.named_parameters()]
    return [[n for n in names if n in decayed], [n for n in names if n not in decayed]]


def read_hf_trainer(folder: Path, *, weights_only: bool = False) -> ForeignState:
    """Read a checkpoint folder of Trainer. Raises CheckpointError and ModelFolderError."""
    from safetensors import safe_open

    about = read_json_object(folder / STATE_FILE)
    state = TorchState()
    opened: dict[Path, Any] = {}
    for name, stored in read_weights(folder).items():
        if stored.file not in opened:
            opened[stored.file] = safe_open(stored.file, framework="pt", device="cpu")
        state.add({name: opened[stored.file].get_tensor(name)})
    step = int(about.get("global_step", 0))
    found = ForeignState("transformers' Trainer", state, step, position=_position(about))
    found.left_out = tuple(_left_out(folder))
    if weights_only or not (folder / OPTIMIZER_FILE).is_file():
        return found
    path = folder / OPTIMIZER_FILE
    stored_optimizer = load_tensors(path)
    groups = parameter_groups(folder)
    rows = named_rows(stored_optimizer, groups, path)
    for name, moments in rows.items():
        refuse_unknown(tuple(moments), MOMENTS, f"the optimizer's state of {name}", path)
        state.add_moments(name, moments)
    first = stored_optimizer["param_groups"][0]
    found.settings = optimizer_settings(first)
    if (folder / SCHEDULER_FILE).is_file():
        scheduler = load_tensors(folder / SCHEDULER_FILE)
        found.rate = float(scheduler["_last_lr"][0])
        base = scheduler.get("base_lrs") or [first.get("initial_lr", first["lr"])]
        found.settings["train.optimizer.learning_rate"] = float(base[0])
    return found


def named_rows(
    optimizer: Mapping[str, Any], groups: Sequence[Sequence[str]], path: Path
) -> dict[str, Mapping[str, Any]]:
    """Return the state of each parameter by name. groups: names in the optimizer's order.

    Raises CheckpointError if the optimizer has other groups, or a moment another shape."""
    found: dict[str, Mapping[str, Any]] = {}
    there = [group["params"] for group in optimizer["param_groups"]]
    names = [list(group) for group in groups if group]
    if [len(group) for group in there] != [len(group) for group in names]:
        raise CheckpointError(
            f"the optimizer has groups of {[len(g) for g in there]} parameters, and Trainer makes "
            f"groups of {[len(g) for g in names]} for this model",
            where=str(path),
            remedy="import the weights alone, with --weights-only",
        )
    for numbers, named in zip(there, names, strict=True):
        for number, name in zip(numbers, named, strict=True):
            if number not in optimizer["state"]:
                raise CheckpointError(
                    f"the optimizer's state of {name} is missing",
                    where=str(path),
                    remedy="import the weights alone, with --weights-only",
                )
            found[name] = optimizer["state"][number]
    return found


def optimizer_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of torch's AdamW as keys of a run file."""
    found: dict[str, Any] = {"train.optimizer.name": "adamw"}
    rate = group.get("initial_lr", group.get("lr"))
    if rate is not None:
        found["train.optimizer.learning_rate"] = float(rate)
    if "betas" in group:
        found["train.optimizer.betas"] = [float(beta) for beta in group["betas"]]
    for key in ("eps", "weight_decay"):
        if key in group:
            found[f"train.optimizer.{key}"] = float(group[key])
    return found


def first_group(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the optimizer's first group. Raises CheckpointError."""
    found: Mapping[str, Any] = load_tensors(folder / OPTIMIZER_FILE)["param_groups"][0]
    return found


def _position(about: Mapping[str, Any]) -> str:
    epoch, steps = about.get("epoch"), about.get("max_steps")
    size = about.get("train_batch_size")
    said = f"it was in epoch {epoch:.4g}" if isinstance(epoch, int | float) else ""
    if isinstance(steps, int) and steps > 0:
        said += f"{', ' if said else 'it was '}at step {about.get('global_step')} of {steps}"
    if size:
        said += f", with {size} samples a process and step"
    return said


def _left_out(folder: Path) -> list[str]:
    reasons = {
        "training_args.bin": "a pickle of any class",
        "rng_state.pth": "a run's random numbers follow from its seed",
        "scaler.pt": "a run begins with a loss scale of its own",
    }
    return [f"{name} ({why})" for name, why in reasons.items() if (folder / name).is_file()]


def schedule_settings(folder: Path) -> dict[str, Any] | None:
    """Return keys of `train.schedule` that give all rates of Trainer's log and its scheduler's next
    one; None if there are none. Raises CheckpointError."""
    about = read_json_object(folder / STATE_FILE)
    steps = int(about.get("max_steps") or 0)
    if steps < 1 or not (folder / SCHEDULER_FILE).is_file():
        return None
    scheduler = load_tensors(folder / SCHEDULER_FILE)
    peak = float((scheduler.get("base_lrs") or [0.0])[0])
    rows = [row for row in about.get("log_history", ()) if "learning_rate" in row]
    last = int(scheduler["last_epoch"]), float(scheduler["_last_lr"][0])
    for back, kind, warmup in product((1, 0), KINDS, range(min(steps, MAX_WARMUP) + 1)):
        # The rate of a logged step is that before or after the scheduler counted it.
        rates = [(int(row["step"]) - back, float(row["learning_rate"])) for row in rows]
        schedule = ScheduleConfig(kind=kind, warmup_steps=warmup, final_ratio=0.0, counts_from=0)
        found = all(
            abs(peak * schedule_factor(schedule, at, steps) - rate) <= 1e-6 * peak
            for at, rate in (last, *rates)
        )
        if found and peak:
            ratio = {} if kind == "constant" else {"final_ratio": 0.0}
            return {"kind": kind, "warmup_steps": warmup, "counts_from": 0, **ratio}
    return None
