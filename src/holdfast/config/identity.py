"""The identity of a run: the part of a configuration that decides what it computes.

A resume may use other workers, another machine, other checkpoint intervals or a moved folder:
the state after step N does not depend on them. Everything else makes another run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.config.explain import format_value
from holdfast.config.fields import field_at, is_index, leaves
from holdfast.config.run import RunConfig
from holdfast.errors import RunFolderError

# Free to change between two starts of one run. `model.vocab_size` is the dataset's, and the
# dataset has a version of its own, which `data.deduplicate` is a part of.
FREE_KEYS = (
    "name",
    "folder",
    "device",
    "tensorboard",
    "layout",
    "cluster",
    "checkpoint",
    "data.deduplicate",
    "data.folder",
    "data.processes",
    "model.vocab_size",
    "task.folder",
    "train.evaluate",
)

# Keys that did not exist when the first runs were trained. At its default such a key does not enter
# the hash, so those runs keep theirs.
LATER_KEYS = (
    "model.activation",
    "model.attention_bias",
    "model.attention_scale",
    "model.attention_softcap",
    "model.embedding_multiplier",
    "model.logit_divisor",
    "model.logit_softcap",
    "model.no_rope_layers",
    "model.norm_plus_one",
    "model.norms",
    "model.qk_norm_width",
    "model.residual_multiplier",
    "model.rope_fraction",
    "model.rope_scaling.attention_factor",
    "model.rope_scaling.beta_fast",
    "model.rope_scaling.beta_slow",
    "model.rope_scaling.truncate",
    "model.rope_scaling.type",
    "model.window",
    "model.window_layers",
    "model.window_rope_theta",
    "task.args",
    "task.data",
    "task.name",
    "task.parameters",
    "task.samples",
    "task.source",
)
OPEN_SECTION = "task.args."
"""Its keys are the user's own: one that is missing has no default."""


# Alike on all nodes of a run: all that decides the computation, and these. With another value on
# one node its workers would take part in other collectives than the rest.
SHARED_KEYS = (
    "layout",
    "train.evaluate",
    "checkpoint.every_steps",
    "checkpoint.every_seconds",
    "checkpoint.interval",
    "checkpoint.memory_every_steps",
    "checkpoint.hidden",
    "checkpoint.extent_mb",
    "cluster.check_every_steps",
    "cluster.loss_jumps",
    "cluster.recovery",
)
# Of those, free for each node: the first is planned, the second only writes a file.
NODE_KEYS = ("layout.workers", "layout.trace_step")


@dataclass(frozen=True)
class ConfigDifference:
    key: str
    there: Any  # in the run folder
    here: Any  # in the run file at hand


def decisive_values(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of every leaf that decides the computation. A later key at its default
    is left out."""
    return {
        key: value
        for key, value in leaves(dict(dumped))
        if not any(key == free or key.startswith(free + ".") for free in FREE_KEYS)
        and not (key in LATER_KEYS and value == _later_default(key))
    }


def values_alike_on_all_nodes(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of every leaf that has to be alike on all nodes of a run."""
    return decisive_values(dumped) | {
        key: value
        for key, value in leaves(dict(dumped))
        if key not in NODE_KEYS
        and any(key == shared or key.startswith(shared + ".") for shared in SHARED_KEYS)
    }


def _later_default(key: str) -> Any:
    """The default of one of LATER_KEYS, as a dump has it."""
    field = field_at(key.split("."))
    assert field is not None
    default = field.get_default(call_default_factory=True, validated_data={})
    return list(default) if isinstance(default, tuple) else default


def config_hash(config: RunConfig) -> str:
    """32 hex digits, the same for every start of one run."""
    values = decisive_values(config.model_dump(mode="json"))
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
        in_list = key.startswith(OPEN_SECTION) or any(is_index(part) for part in key.split("."))
        if key not in here and not in_list and key not in default and key not in LATER_KEYS:
            continue
        missing = None if in_list else default.get(key)
        if key in LATER_KEYS:
            missing = _later_default(key)
        old, new = there.get(key, missing), here.get(key, missing if key in LATER_KEYS else None)
        if old != new:
            found.append(ConfigDifference(key, old, new))
    return found


def is_place(key: str) -> bool:
    """Return True for a path of the data. The dataset's version says what lies there."""
    section, _, name = key.rpartition(".")
    return name == "path" and section.startswith(("data.sources.", "data.tokenizer"))


def _stored_task(stored: Mapping[str, Any]) -> str:
    return str(stored.get("task", {}).get("name", ""))


def refuse_other_run(stored: Mapping[str, Any], config: RunConfig, folder: str) -> None:
    """Raises RunFolderError, naming the first keys that differ, when `folder` belongs to a run
    that computes something else. The caller compares the datasets' versions."""
    found = [d for d in config_differences(stored, config) if not is_place(d.key)]
    if not found:
        return
    if any(d.key == "task.source" for d in found) and config.task.name == _stored_task(stored):
        raise RunFolderError(
            f"this run was started with another source of task {config.task.name}",
            where=folder,
            remedy="put the task's files back, or start over with --fresh",
        )
    named = ", ".join(
        f"{d.key} was {format_value(d.there)} and is now {format_value(d.here)}" for d in found[:3]
    )
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    raise RunFolderError(
        f"this run folder belongs to another configuration ({named}{more})",
        where=folder,
        remedy="put the values back, choose another name or folder, or start over with --fresh",
    )
