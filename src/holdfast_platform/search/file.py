"""A search file: which keys of a run file are tried, over which values, and how many times."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast.config.loading.fields import change_of
from holdfast.config.loading.identity import config_hash
from holdfast.config.loading.load import load_config
from holdfast.config.loading.paths import expand_path
from holdfast.config.loading.section_file import read_section
from holdfast.config.loading.yaml_tree import is_plain
from holdfast.config.run import RunConfig
from holdfast.config.sections.base import Change, Section
from holdfast.errors import ConfigError

RESERVED = ("folder", "cluster.left_exit_code")
IN_COMMON = (*RESERVED, "train.steps", "train.evaluate.every", "train.evaluate.samples")
"""Keys that cannot be searched: all trials have the same value."""


class Range(Section):
    """Numbers between two bounds, both included. Whole numbers if the bounds are."""

    low: int | float
    high: int | float
    log: bool = False
    """equal chances for equal ratios"""
    step: int | float | None = Field(None, gt=0)
    """distance of the values; none: all between"""

    def broken_rules(self) -> Iterator[str]:
        if not self.low < self.high:
            yield "low must be below high"
        if self.log and (self.low <= 0 or self.step is not None):
            yield "log needs a low above 0, and goes with no step"


class Prune(Section):
    """Optuna's median rule: a trial ends if it is worse than the median at the same step."""

    startup_trials: int = Field(5, ge=0, description="that are not pruned")
    warmup_steps: int = Field(0, ge=0, description="of a trial, before which it is not pruned")


class Search(Section):
    """A search file. `read_search` makes its paths absolute."""

    name: str = ""
    run: str
    folder: str = "searches/{name}"
    trials: int = Field(20, ge=1)
    parallel: int = Field(1, ge=1)
    """trials side by side; a suggestion sees the trials before these"""
    seed: int = Field(0, ge=0)
    sampler: Literal["tpe", "random"] = "tpe"
    metric: str = "loss"
    """of validations: loss, bits_per_byte, or a name among their metrics"""
    direction: Literal["minimize", "maximize"] = "minimize"
    set: dict[str, Any] = Field(default_factory=dict)
    """values that all trials have"""
    space: dict[str, Range | Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(min_length=1)
    prune: Prune | None = None
    branch_at: int = Field(0, ge=0)
    """step until which all trials are one run; 0: they have nothing in common"""

    @cached_property
    def config(self) -> RunConfig:
        """The run file with the values that all trials have. Raises ConfigError."""
        return load_config(Path(self.run), overrides_of(self.set)).config

    @cached_property
    def steps(self) -> int:
        return self.config.train.steps

    @property
    def place(self) -> Path:
        return Path(self.folder)

    @property
    def has_datasets(self) -> bool:
        """Return True if trials differ in their data, and each needs a dataset of its own."""
        return any(key.startswith("data.") for key in self.space)

    @property
    def identity(self) -> str:
        return self.search_identity

    @property
    def search_identity(self) -> str:
        """What must not change in a folder, as text. More trials may be asked for."""
        keys = self.model_dump_json(exclude={"name", "folder", "trials", "run"})
        return f"{keys}\n{config_hash(self.config)} {self.steps}\n"


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """Return `key=value` words for keys of a run file."""
    return [
        f"{key}={value if isinstance(value, str) and is_plain(value) else json.dumps(value)}"
        for key, value in values.items()
    ]


def read_search(path: Path, folder: Path | None = None) -> Search:
    """Read a search file, and check it with its run file. folder: in place of the file's. Raises
    ConfigError."""
    given = read_section(path, Search, "docs/guide/search.md")
    base = Path(os.path.abspath(path)).parent
    text = expand_path(given.folder.replace("{name}", given.name or path.stem))
    places = {
        "run": str(base / expand_path(given.run)),
        "folder": str(folder or Path(os.path.normpath(base / text))),
    }
    search = given.model_copy(update=places)
    check_keys(search, str(path))
    return search


def check_keys(search: Search, where: str) -> None:
    """Try the ends of each range, and each value of a list, in the run file. Raises ConfigError."""
    if taken := [key for key in RESERVED if key in search.set]:
        what = f"set has {taken[0]}, which the search sets"
        raise ConfigError(what, where=where, remedy="remove it")
    if search.config.train.stop:
        what = "train.stop of the run file may end a trial before its last validation"
        raise ConfigError(what, where=where, remedy="write set: {train.stop: []}, and use prune")
    data = search.config.data
    if not search.config.has_own_data and not data.validation_fraction:
        what = "data.validation_fraction is 0, and the value of a trial is that of a validation"
        raise ConfigError(what, where=where, remedy="write set: {data.validation_fraction: 0.05}")
    if search.branch_at >= search.steps:
        what = f"branch_at is {search.branch_at}, and a trial has {search.steps} steps"
        raise ConfigError(what, where=where, remedy=f"use a step below {search.steps}")
    for key, values in search.space.items():
        if key in search.set or key in IN_COMMON:
            what = f"{key} cannot be searched: it is in set, or trials must have it in common"
            raise ConfigError(what, where=where, remedy="remove it from space")
        for value in (values.low, values.high) if isinstance(values, Range) else values:
            load_config(Path(search.run), overrides_of({**search.set, key: value}))
        if search.branch_at and change_of(key) is Change.NEVER:
            raise ConfigError(
                f"{key} cannot change after step {search.branch_at}, where trials branch",
                where=where,
                remedy="remove branch_at, or take the key out of space; the table in "
                "docs/reference/run-file.md says which keys can change in a branch",
            )
