"""The recipe of a stage: all that decides its results. Its digest is the stage's key."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.loading.fields import leaves
from holdfast.config.loading.identity import DATASET_KEYS, decisive_values
from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.config.loading.paths import FREE_PATHS
from holdfast.core.json_parsing import JsonMessage
from holdfast_platform.pipeline.digests import Digests, text_digest
from holdfast_platform.pipeline.file import fill, references
from holdfast_platform.pipeline.stages import KINDS, OWN, Stage, overrides
from holdfast_platform.registry.gate import read_rules
from holdfast_platform.search.file import overrides_of, read_search

FORMAT = 1  # of recipes; another number makes each stage run again
KEY_DIGITS = 16
_FILES = ("data.chat.template_file", "model.weights", "lora.base", "lora.adapter")
_READ = (*_FILES, "objective.reference.model")
"""Paths of a run file whose bytes decide what is computed."""
_ENDS = ("train.steps", "train.stop")
"""Keys that change in place, and say where a run ends."""


@dataclass(frozen=True)
class Result(JsonMessage):
    """What a stage made."""

    path: str
    digest: str


Results = Mapping[tuple[str, str], Result]
"""By stage and name."""


def recipe_of(stage: Stage, results: Results, digests: Digests) -> dict[str, str]:
    """Return the entries of a recipe, each as a text. results: of what the stage refers to.
    Raises UserError for a run file that is wrong, OSError for a file that cannot be read."""

    def digest(other: str, result: str) -> str:
        return "${out}" if other == OWN else results[other, result].digest

    row, given = KINDS[stage.kind], stage.values.get("set", {})
    out = {"kind": stage.kind, "format": str(FORMAT)}
    values = {key: value for key, value in stage.values.items() if key not in (*row.files, "set")}
    values |= {key: value for key, value in given.items() if list(references(value))}
    out |= {key: repr(fill(value, digest)) for key, value in values.items()}
    paths = {key: stage.values.get(key, []) for key in row.files if key != "run"}
    if stage.kind == "gate":
        paths["rows"] = [task.path for task in read_rules(Path(stage.values["rules"])).tasks]
    for key, found in paths.items():
        for number, path in enumerate([found] if isinstance(found, str) else found):
            is_there = os.path.exists(path)  # else the name of a task
            name = f"{key} {number} {os.path.basename(path)}"
            out[name] = digests.of_path(Path(path)) if is_there else path
    if "search" in stage.values:
        search = read_search(Path(stage.values["search"]))
        loaded = load_config(Path(search.run), overrides_of(search.set))
        out |= _of_run_file(stage, loaded, lambda path: False, digests)
    if "run" in row.files:
        words = fill(overrides(stage), lambda other, result: results[other, result].path)
        loaded = load_config(Path(stage.values["run"]), words)
        made = tuple(result.path for result in results.values())
        out |= _of_run_file(stage, loaded, lambda path: path.startswith(made), digests)
    return out


def _of_run_file(
    stage: Stage, loaded: LoadedConfig, is_result: Callable[[str], bool], digests: Digests
) -> dict[str, str]:
    dumped = loaded.config.model_dump(mode="json")
    everything = dict(leaves(dumped))
    keys = decisive_values(dumped) | {
        key: value
        for key, value in everything.items()
        if key in DATASET_KEYS or any(key == end or key.startswith(f"{end}.") for end in _ENDS)
    }
    if stage.kind == "prepare":
        keys = {key: value for key, value in keys.items() if key.startswith("data.")}
    out = {
        f"key {key}": repr(value)
        for key, value in keys.items()
        if key not in FREE_PATHS and not is_result(str(value))
    }
    paths = {key: str(everything.get(key) or "") for key in _READ} | dict(loaded.places)
    if loaded.config.task.folder:
        files = Path(loaded.config.task.folder).glob("*.py")
        paths |= {f"task {each.name}": str(each) for each in files}
    for key, path in paths.items():
        if path and not is_result(path) and os.path.exists(path):
            out[f"bytes of {key}"] = digests.of_path(Path(path))
    return out


def key_of(recipe: Mapping[str, str]) -> str:
    return text_digest(recipe)[:KEY_DIGITS]


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs between two recipes, one clause for each entry."""
    out = []
    for entry in sorted(before.keys() | now.keys()):
        old, new = before.get(entry), now.get(entry)
        if old == new:
            continue
        name = entry.removeprefix("key ")
        if name != entry:
            out.append(f"{name}: {old or 'default'} -> {new or 'default'}")
        else:
            out.append(f"{name} changed")
    return out
