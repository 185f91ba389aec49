"""The identity of a run: the part of a configuration that decides what it computes.

Each key of the run file declares what a change of it does to a run that has begun
(`sections/base.py`). A resume may change the keys of class "in place": the state after step N does
not depend on them. A change of any other key makes another run.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.config.loading.explain import format_value
from holdfast.config.loading.fields import change_of, field_at, is_index, leaves
from holdfast.config.loading.model_from import yaml_word
from holdfast.config.run import RunConfig
from holdfast.config.sections.base import Change
from holdfast.errors import START_OVER, RunFolderError

# The dataset's version stands for these: they are a part of it, or its vocabulary. A checksum
# stands for the last.
DATASET_KEYS = (
    "data.chat.template",
    "data.chat.template_file",
    "data.chat.template_name",
    "data.deduplicate",
    "data.stages",
    "model.vocab_size",
    "model.weights",
)

TASK_SOURCE = "task.source"
"""A branch finds it out from the task's files; it is not typed."""

SCHEDULE_STEPS = "train.schedule.steps"
"""Stands for the schedule's length, wherever it is from. `train.steps` itself decides nothing."""

# Keys that did not exist when the first runs were trained. At its default such a key does not enter
# the hash, so those runs keep theirs.
LATER_KEYS = frozenset(
    f"{section}.{name}".lstrip(".")
    for section, names in {
        "": ("branch_of",),
        "data": ("mix",),
        "data.curriculum": ("by", "descending", "passes", "window"),
        "data.chat": ("long_rows", "template_kwargs", "train_on", "weights"),
        "lora": (
            *("adapter_checksum", "alpha", "base_checksum", "base_dtype", "dropout", "rank"),
            "targets",
        ),
        "objective": (
            *("kind", "beta", "loss_type", "label_smoothing", "discopop_tau", "simpo_gamma"),
            *("cpo_alpha", "desirable_weight", "undesirable_weight"),
            *("center_rewards_coefficient", "epsilon", "epsilon_high", "importance_sampling_level"),
            *("scale_rewards", "max_completion_length", "gamma", "lam", "cliprange_value"),
            *("vf_coef", "entropy_coef", "whiten_advantages"),
            *("top_k", "temperature", "alpha"),
        ),
        "model": (
            *("activation", "attention_bias", "attention_scale", "attention_softcap"),
            *("embedding_multiplier", "experts", "logit_divisor", "logit_softcap"),
            *("no_rope_layers", "norm_plus_one", "norms", "qk_norm_width"),
            *("residual_multiplier", "rope_fraction", "window", "window_layers"),
            *("score_head", "weights_checksum", "window_rope_theta"),
        ),
        "model.rope_scaling": ("attention_factor", "beta_fast", "beta_slow", "truncate", "type"),
        "outer": (
            *("average", "every_steps", "faulty", "fragments", "learners", "mode"),
            *("overlap_alpha", "overlap_steps"),
        ),
        "outer.codec": ("error_feedback", "name", "rank", "share"),
        "outer.free": ("discount", "grace_seconds", "late", "quorum"),
        "outer.trust": ("checks", "direction", "held_out", "limit", "norm"),
        "outer.optimizer": ("learning_rate", "momentum", "name"),
        "server": (
            *("max_update_microbatches", "mode", "noise_decay", "rate_scaling", "staleness"),
            *("straggling", "update_microbatches"),
        ),
        "rollout": (
            *("count", "filter", "lag", "max_tokens", "prompts", "redraws", "rewards"),
            *("samples", "source_column", "temperature", "top_p", "version"),
        ),
        "task": ("args", "data", "name", "parameters", "samples", "source"),
        "train": ("deterministic", "keep_zeros", "loss_chunk", "qat"),
        "train.optimizer": (
            *("adamw_for", "adjust_rate", "args", "beta2_decay", "clip_threshold"),
            *("groups", "layouts", "momentum", "name", "nesterov"),
            *("newton_schulz_steps", "slots", "smallest_scale", "source"),
            "state_dtype",
        ),
        "train.schedule": ("args", "counts_from", "source"),
    }.items()
    for name in names
)
SOURCE_KEYS = {
    "train.optimizer.source": "train.optimizer.name",
    "train.schedule.source": "train.schedule.kind",
}
"""Digest -> the key that names what it is of."""
OPEN_SECTIONS = (
    "data.chat.template_kwargs.",
    "task.args.",
    "train.optimizer.args.",
    "train.schedule.args.",
)
"""Their keys are the user's own: one that is missing has no default."""

EXPERTS = "model.experts."
"""A model without experts has none of these keys."""


# Alike on all nodes of a run: all that decides the computation, and these. With another value on
# one node its workers would take part in other collectives than the rest.
SHARED_KEYS = (
    "layout",
    "train.steps",
    "train.evaluate",
    "train.recompute",
    "train.recompute_keep",
    "train.partition_activations",
    "checkpoint.every_steps",
    "checkpoint.every_seconds",
    "checkpoint.interval",
    "checkpoint.memory_every_steps",
    "checkpoint.hidden",
    "checkpoint.extent_mb",
    "cluster.check_every_steps",
    "cluster.loss_jumps",
    "cluster.recovery",
    "cluster.sites",
)
# Of those, free for each node: the first is planned, the rest only writes a file.
NODE_KEYS = ("layout.workers", "layout.trace_step", "layout.trace_every")


@dataclass(frozen=True)
class ConfigDifference:
    key: str
    there: Any  # in the run folder
    here: Any  # in the run file at hand


def decisive_values(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of every leaf that decides the computation. A later key at its default
    is left out. `train.schedule.steps` is the length of a schedule that has one."""
    everything = dict(leaves(dict(dumped)))
    values = {
        key: value
        for key, value in everything.items()
        if key not in DATASET_KEYS
        and not key.startswith(("data.stages.", "data.features."))
        and change_of(key) is not Change.IN_PLACE
        and not (_is_later(key) and value == _later_default(key))
    }
    length = values.pop(SCHEDULE_STEPS, 0) or everything.get("train.steps")
    if length and values.get("train.schedule.kind") != "constant":
        values[SCHEDULE_STEPS] = length
    return values


def values_alike_on_all_nodes(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of every leaf that has to be alike on all nodes of a run."""
    return decisive_values(dumped) | {
        key: value
        for key, value in leaves(dict(dumped))
        if key not in NODE_KEYS
        and any(key == shared or key.startswith(shared + ".") for shared in SHARED_KEYS)
    }


def _is_later(key: str) -> bool:
    return key in LATER_KEYS or (
        key.startswith("data.sources.")
        and key.endswith((".rows", ".bad_rows", ".at_end", ".passes", ".media"))
    )


def _later_default(key: str) -> Any:
    """The default of one of LATER_KEYS, as a dump has it."""
    field = field_at(key.split("."))
    assert field is not None
    default = field.get_default(call_default_factory=True, validated_data={})
    return list(default) if isinstance(default, tuple) else default


def config_hash(config: RunConfig) -> str:
    """32 hex digits, the same for every start of one run."""
    values = decisive_values(config.model_dump(mode="json"))
    if SCHEDULE_STEPS in values:  # under the key that it had when the first runs were trained
        values["train.steps"] = values.pop(SCHEDULE_STEPS)
    return _digest(values)


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def earlier_hash(config: RunConfig) -> str | None:
    """Return the hash that an older version gave a run without a schedule: `train.steps` was a part
    of it. None for a run with a schedule, whose length is in both."""
    values = decisive_values(config.model_dump(mode="json"))
    if SCHEDULE_STEPS in values:
        return None
    return _digest(values | {"train.steps": config.train.steps})


def config_differences(stored: Mapping[str, Any], config: RunConfig) -> list[ConfigDifference]:
    """Return the differing keys that decide the computation; `stored` is the dump in the run
    folder.

    A key that the folder's older format did not have counts as its default; one that this
    version no longer knows is left out.
    """
    here = decisive_values(config.model_dump(mode="json"))
    there = decisive_values(stored)
    default = decisive_values(RunConfig().model_dump(mode="json"))
    found: list[ConfigDifference] = []
    for key in sorted(here.keys() | there.keys()):
        in_list = key.startswith((*OPEN_SECTIONS, EXPERTS)) or any(
            is_index(part) for part in key.split(".")
        )
        if key not in here and not in_list and key not in default and key not in LATER_KEYS:
            continue
        if key == SCHEDULE_STEPS and not (key in here and key in there):
            continue  # train.schedule.kind differs, and says it
        missing = None if in_list else default.get(key)
        if key in LATER_KEYS:
            missing = _later_default(key)
        old, new = there.get(key, missing), here.get(key, missing if key in LATER_KEYS else None)
        if old != new:
            found.append(ConfigDifference(key, old, new))
    vocabulary = dict(leaves(dict(stored))).get("model.vocab_size", 0), config.model.vocab_size
    if all(vocabulary) and vocabulary[0] != vocabulary[1]:
        found.append(ConfigDifference("model.vocab_size", *vocabulary))
    return found


def is_place(key: str) -> bool:
    """Return True for a path of the data. The dataset's version says what lies there."""
    section, _, name = key.rpartition(".")
    return name == "path" and section.startswith(("data.sources.", "data.tokenizer"))


def _stored_task(stored: Mapping[str, Any]) -> str:
    return str(stored.get("task", {}).get("name", ""))


def refuse_other_run(
    stored: Mapping[str, Any],
    config: RunConfig,
    folder: str,
    branch_command: str = "",
    rates: str = "",
) -> None:
    """Raises RunFolderError, naming the first keys that differ, when `folder` belongs to a run
    that computes something else. The caller compares the datasets' versions.

    branch_command: begins a run with the changed keys from a checkpoint of this one; "" if there is
    no checkpoint. rates: what it does to the learning rate, in parentheses.
    """
    found = [d for d in config_differences(stored, config) if not is_place(d.key)]
    if not found:
        return
    same_task = config.task.name == _stored_task(stored)
    sources = SOURCE_KEYS | ({TASK_SOURCE: config.task.label} if same_task else {})
    if changed := [d.key for d in found if d.key in sources]:
        files = "the task's files" if TASK_SOURCE in changed and same_task else "the files"
        remedy = f"put {files} back, or {START_OVER}"
        if branch_command and all(change_of(d.key) is Change.BRANCH for d in found):
            remedy = (
                f"put {files} back, {START_OVER}, or continue with the new source in a run of its "
                f"own: {branch_command}"
            )
        label = sources[TASK_SOURCE if files != "the files" else changed[0]]
        raise RunFolderError(
            f"this run was started with another source of {label}", where=folder, remedy=remedy
        )
    named = ", ".join(_describe(d, config) for d in found[:3])
    named += f" and {len(found) - 3} more" if len(found) > 3 else ""
    fits = ""
    never = [d.key for d in found if change_of(d.key) is not Change.BRANCH]
    remedy = f"put the values back, choose another name or folder, or {START_OVER}"
    if never:
        fits = f"; no checkpoint of the run fits another {never[0]}"
    elif branch_command:
        if [d.key for d in found] == [SCHEDULE_STEPS]:
            there, here = found[0].there, found[0].here
            raise RunFolderError(
                f"{SCHEDULE_STEPS} was {there} and would be {here}, which changes the rates",
                where=folder,
                remedy=f"keep them with {SCHEDULE_STEPS}={there}, or branch{rates}: "
                f"{branch_command}",
            )
        remedy = (
            f"put the values back, {START_OVER}, or continue in a run of its own: {branch_command}"
        )
    raise RunFolderError(
        f"this run folder belongs to another configuration ({named}){fits}",
        where=folder,
        remedy=remedy,
    )


def _describe(difference: ConfigDifference, config: RunConfig) -> str:
    d = difference
    text = f"{d.key} was {format_value(d.there)} and is now {format_value(d.here)}"
    follows = d.key == SCHEDULE_STEPS and not config.train.schedule.steps
    return f"{text}, as train.steps is" if follows else text


def changed_keys(differences: Sequence[ConfigDifference], config: RunConfig) -> list[str]:
    """Return the differing keys with the values of `config`, as they are typed on a command line.
    A list is given as one value."""
    found: dict[str, Any] = {}
    for d in differences:
        path = d.key.split(".")
        cut = next((i for i, part in enumerate(path) if is_index(part)), len(path))
        key = ".".join(path[:cut])
        if key == SCHEDULE_STEPS and not config.train.schedule.steps:
            key = "train.steps"
        value: Any = config.model_dump(mode="json")
        for part in key.split("."):
            value = value[part]
        found[key] = value
    return [shlex.quote(f"{key}={yaml_word(value)}") for key, value in found.items()]
