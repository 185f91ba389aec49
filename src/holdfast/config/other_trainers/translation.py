"""A configuration of another trainer as a run file: each key translated, harmless or left out.

A trainer's module has one function for each thing that a run file says. It takes keys from a
`Translation`, which remembers them. What no function took is looked up in the module's lists of
harmless keys and of known ones without a counterpart. Any other key is left out as not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.borders import says_nothing
from holdfast.config.loading.yaml_tree import dump
from holdfast.errors import ConfigError

SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
OPTIMIZERS = {
    "adamw": "adamw",
    "lion": "lion",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "muon": "muon",
    "paged_adamw": "adamw",
    "paged_lion": "lion",
}
_SUFFIXES = ("_32bit", "_8bit", "_4bit", "_bnb", "_torch", "_fused", "_hf", "_pytorch", "_apex")
LAYOUT = "the layout is planned; see holdfast plan"


@dataclass
class Translation:
    """What became of each key of `source`."""

    trainer: str
    source: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)  # key of a run file -> value
    translated: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)  # key -> reason
    harmless: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)  # what differs, or has to be done first

    def take(self, key: str, *targets: str, default: Any = None) -> Any:
        """Return a value, and write it under each of `targets` if it says something."""
        value = self.source.get(key)
        if says_nothing(value) and value is not False:
            value = default
        if key in self.source:
            self.translated.add(key)
        for target in targets if value is not None else ():
            self.values[target] = value
        return value

    def number(self, key: str, *targets: str, default: float | None = None) -> float | None:
        """As `take`; a text such as "2e-5" is a number. Raises ConfigError for no number."""
        value = self.take(key, default=default)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{value!r} is no number", where=key, remedy="write the number that it stands for"
            ) from None
        for target in targets:
            self.values[target] = number
        return number

    def leave(self, key: str, reason: str) -> None:
        if not says_nothing(self.source.get(key)):
            self.translated.discard(key)
            self.left_out[key] = reason

    def finish(self, harmless: frozenset[str], known: Mapping[str, str]) -> None:
        """Say what becomes of each key that was not taken."""
        for key, value in self.source.items():
            if key in self.translated or key in self.left_out:
                continue
            if key in harmless or says_nothing(value):
                self.harmless.add(key)
            else:
                self.left_out[key] = known.get(key, "not known")

    def run_file(self, name: str, where: str) -> str:
        """Return the text of a run file, with what is left out as comments."""
        tree: dict[str, Any] = {"name": name}
        for key, value in self.values.items():
            *sections, last = key.split(".")
            holder = tree
            for section in sections:
                holder = holder.setdefault(section, {})
            holder[last] = value
        lines = [f"# A Holdfast run, from {where} of {self.trainer}.", dump(tree).rstrip()]
        lines += [f"# {note}" for note in self.notes]
        lines += [f"# left out: {key} ({reason})" for key, reason in self.left_out.items()]
        return "\n".join(lines) + "\n"


def take_training(there: Translation, schedule: str, batch: str, ratio: str, default: str) -> None:
    """Take the keys that both trainers have from transformers.

    schedule, batch, ratio: what the trainer calls its schedule, samples of a pass, and final rate
    over peak rate. default: the schedule if none is named."""
    there.take("seed", "seed", default=42)
    there.number("learning_rate", "train.optimizer.learning_rate", default=5e-5)
    there.number("weight_decay", "train.optimizer.weight_decay", default=0.0)
    there.number("max_grad_norm", "train.optimizer.clip_norm", default=1.0)
    betas = [there.number("adam_beta1", default=0.9), there.number("adam_beta2", default=0.999)]
    there.values["train.optimizer.betas"] = betas
    there.number("adam_epsilon", "train.optimizer.eps", default=1e-8)
    kind = there.take(schedule, default=default)
    there.values["train.schedule.kind"] = SCHEDULES.get(kind, "cosine")
    there.values["train.schedule.counts_from"] = 0
    if SCHEDULES.get(kind) != "constant":
        there.number(ratio, "train.schedule.final_ratio", default=0.0)
    if kind not in SCHEDULES:
        there.leave(schedule, f"{kind} has no train.schedule.kind; cosine is written")
    passes = int(there.number("gradient_accumulation_steps", default=1) or 1)
    size = int(there.number(batch, default=1) or 1)
    there.values["train.batch_size"] = size * passes
    there.values["train.microbatch_size"] = size
    there.notes.append(
        f"train.batch_size {size * passes} is that of one process there; multiply it by those"
    )
    _take_length(there)
    _take_precision(there)
    if there.take("gradient_checkpointing"):
        there.values["train.recompute"] = "full"


def _take_length(there: Translation) -> None:
    steps = int(there.number("max_steps", default=-1) or -1)
    warmup = there.number("warmup_steps")
    ratio = there.number("warmup_ratio")
    if steps > 0:
        there.values["train.steps"] = steps
    if warmup is not None and 0 < warmup < 1:  # transformers 5 reads it as a share
        if steps <= 0:
            there.leave("warmup_steps", "say the number of steps in train.schedule.warmup_steps")
        warmup = -(-warmup * steps // 1) if steps > 0 else 0
    elif warmup is None and ratio and steps > 0:
        warmup = -(-ratio * steps // 1)
    elif warmup is None and ratio:
        there.leave("warmup_ratio", "say its steps in train.schedule.warmup_steps")
    there.values["train.schedule.warmup_steps"] = int(warmup or 0)


def _take_precision(there: Translation) -> None:
    bf16, fp16 = there.take("bf16"), there.take("fp16")
    pure = there.take("pure_bf16")
    there.values["train.precision"] = "bf16" if bf16 or pure else "fp16" if fp16 else "fp32"
    if pure:
        there.notes.append("pure_bf16: a run keeps its weights in fp32, and computes in bf16")


def take_optimizer(there: Translation, key: str) -> None:
    """Take the optimizer's name; bits of its state are named."""
    name = str(there.take(key, default="adamw_torch"))
    short = name
    for suffix in _SUFFIXES * 2:
        short = short.removesuffix(suffix)
    if short not in OPTIMIZERS:
        there.leave(key, f"{name} has no train.optimizer.name; adamw is written")
    elif "8bit" in name or "4bit" in name or "paged" in name:
        there.notes.append(f"{name}: the optimizer's state is in fp32 here, and on the device")
    kind = OPTIMIZERS.get(short, "adamw")
    there.values["train.optimizer.name"] = kind
    if kind not in ("adamw", "lion", "muon"):
        there.values.pop("train.optimizer.betas", None)
    if kind not in ("adamw", "muon"):
        there.values.pop("train.optimizer.eps", None)


def take_saves(there: Translation) -> None:
    """Take when a trainer by transformers saves and validates, and what it keeps."""
    there.take("save_steps", "checkpoint.every_steps")
    there.take("eval_steps", "train.evaluate.every")
    there.take("save_total_limit", "checkpoint.keep_last")
    if there.take("load_best_model_at_end"):
        if there.take("metric_for_best_model", default="loss") in ("loss", "eval_loss"):
            there.values["checkpoint.keep_best"] = 1
        else:
            there.leave("load_best_model_at_end", "checkpoint.keep_best is by the loss alone")


def take_lora(there: Translation, rank: Any, alpha: Any, dropout: Any, targets: Any) -> None:
    there.values["lora.rank"] = int(rank)
    there.values["lora.alpha"] = alpha
    there.values["lora.dropout"] = dropout
    there.values["lora.targets"] = targets


def source_name(path: str) -> str:
    """Return a name of a source: the last part of a path."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in path.rstrip("/").split("/")[-1])
