"""A search file: which keys of a run file are tried, over which values, and how many times."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.borders import Border
from holdfast.config.loading.fields import change_of
from holdfast.config.loading.load import load_config, read_text
from holdfast.config.loading.paths import expand_path
from holdfast.config.loading.yaml_tree import is_plain, parse_file
from holdfast.config.sections.base import Change
from holdfast.errors import ConfigError, use_one_of

KEYS = Border(
    "search file",
    frozenset(
        ("name", "run", "folder", "trials", "parallel", "seed", "sampler", "metric", "direction")
    )
    | {"set", "space", "prune", "branch_at"},
)
RANGE = Border("range of a search file", frozenset(("low", "high", "log", "step")))
PRUNE = Border("prune of a search file", frozenset(("startup_trials", "warmup_steps")))
SAMPLERS = ("tpe", "random")
DIRECTIONS = ("minimize", "maximize")
RESERVED = ("folder", "cluster.left_exit_code")
NOT_SEARCHED = (*RESERVED, "train.steps", "train.evaluate.every", "train.evaluate.samples")


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, both included. Whole numbers if the bounds are."""

    low: float
    high: float
    log: bool = False  # equal chances for equal ratios
    step: float | None = None  # distance of the values; None: all between


@dataclass(frozen=True)
class Prune:
    """Optuna's median rule: a trial ends if it is worse than the median at the same step."""

    startup_trials: int = 5  # that are not pruned
    warmup_steps: int = 0  # of each trial, before which it is not pruned


@dataclass(frozen=True)
class Search:
    """A search file."""

    path: Path
    run: Path
    folder: Path
    trials: int
    parallel: int  # trials side by side; a suggestion sees the trials before these
    seed: int
    sampler: str
    metric: str  # of evaluations: loss, bits_per_byte, or a name among their metrics
    direction: str
    fixed: Mapping[str, Any]  # key of the run file -> value for all trials
    space: Mapping[str, Range | tuple[Any, ...]]
    prune: Prune | None
    branch_at: int  # step until which all trials are one run; 0: they have nothing in common
    steps: int  # train.steps of a trial
    has_own_data: bool  # no dataset is prepared for the runs

    @property
    def has_datasets(self) -> bool:
        """Return True if trials differ in their data, and each needs a dataset of its own."""
        return any(key.startswith("data.") for key in self.space)

    @property
    def identity(self) -> str:
        """What must not change in a folder, as text. More trials may be asked for."""
        left_out = {"path", "folder", "trials"}
        return repr({key: value for key, value in vars(self).items() if key not in left_out})


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """Return `key=value` words for keys of a run file."""
    return [
        f"{key}={value if isinstance(value, str) and is_plain(value) else json.dumps(value)}"
        for key, value in values.items()
    ]


def read_search(path: Path, folder: Path | None = None) -> Search:
    """Read a search file, and check it with its run file. folder: in place of the file's. Raises
    ConfigError."""
    value, _ = parse_file(read_text(path), str(path))
    where = str(path)
    if not isinstance(value, dict) or not value.get("run") or not value.get("space"):
        raise ConfigError(
            "a search file needs the keys run and space",
            where=where,
            remedy="write 'run: run.yaml' and 'space: {train.optimizer.learning_rate: {low: 1e-4, "
            "high: 1e-2, log: true}}'",
        )
    KEYS.check(value, where, ConfigError, "remove it, or correct its name")
    base = Path(os.path.abspath(path)).parent
    name = str(value.get("name") or path.stem)
    run = base / expand_path(str(value["run"]))
    fixed = dict(value.get("set") or {})
    space = {key: _values(key, entry, where) for key, entry in value["space"].items()}
    config = load_config(run, overrides_of(fixed)).config
    place = base / expand_path(
        str(value.get("folder") or "searches/{name}").replace("{name}", name)
    )
    prune = value.get("prune")
    if prune is not None:
        PRUNE.check(prune, where, ConfigError, "write startup_trials and warmup_steps")
    search = Search(
        path,
        run,
        folder or Path(os.path.normpath(place)),
        _count(value, "trials", 20, 1, where),
        _count(value, "parallel", 1, 1, where),
        _count(value, "seed", 0, 0, where),
        _choice(value, "sampler", SAMPLERS, where),
        str(value.get("metric") or "loss"),
        _choice(value, "direction", DIRECTIONS, where),
        fixed,
        space,
        None if prune is None else Prune(**prune),
        _count(value, "branch_at", 0, 0, where),
        config.train.steps,
        config.has_own_data,
    )
    _check_keys(search, where)
    return search


def _count(value: Mapping[str, Any], key: str, default: int, least: int, where: str) -> int:
    number = value.get(key, default)
    if type(number) is not int or number < least:
        raise ConfigError(
            f"{key} is {number!r}", where=where, remedy=f"write a whole number of {least} or more"
        )
    return number


def _choice(value: Mapping[str, Any], key: str, choices: Sequence[str], where: str) -> str:
    chosen = value.get(key, choices[0])
    if chosen not in choices:
        raise ConfigError(f"{key} is {chosen!r}", where=where, remedy=use_one_of(choices))
    return str(chosen)


def _values(key: str, entry: Any, where: str) -> Range | tuple[Any, ...]:
    """Return the values of a key: a list, or a range. Raises ConfigError."""
    if isinstance(entry, list) and entry:
        return tuple(entry)
    problem = "it is neither a list nor a range"
    if isinstance(entry, dict):
        RANGE.check(entry, where, ConfigError, f"space.{key} takes low, high, log and step")
        low, high, step = (entry.get(each) for each in ("low", "high", "step"))
        log = entry.get("log", False)
        numbers = [each for each in (low, high, step) if each is not None]
        if low is None or high is None:
            problem = "it needs low and high"
        elif any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
            problem = "low, high and step are numbers"
        elif not low < high or (step is not None and not 0 < step <= high - low):
            problem = "low must be below high, and step must fit between them"
        elif not isinstance(log, bool) or (log and (low <= 0 or step is not None)):
            problem = "log is true or false, needs a low above 0, and goes with no step"
        else:
            return Range(low, high, log, step)
    raise ConfigError(
        f"space.{key}: {problem}",
        where=where,
        remedy="write [8, 16, 32], or {low: 1e-4, high: 1e-2, log: true}",
    )


def _check_keys(search: Search, where: str) -> None:
    """Try the ends of each range, and each value of a list, in the run file. Raises ConfigError."""
    for key, values in search.space.items():
        if key in search.fixed or key in NOT_SEARCHED:
            raise ConfigError(
                f"{key} cannot be searched: it is in set, or trials must have it in common",
                where=where,
                remedy="remove it from space",
            )
        ends = (values.low, values.high) if isinstance(values, Range) else values
        for value in ends:
            load_config(search.run, overrides_of({**search.fixed, key: value}))
        if search.branch_at and change_of(key) is Change.NEVER:
            raise ConfigError(
                f"{key} cannot change after step {search.branch_at}, where trials branch",
                where=where,
                remedy="remove branch_at, or take the key out of space; the table in "
                "docs/reference/run-file.md says which keys can change in a branch",
            )
    if taken := [key for key in RESERVED if key in search.fixed]:
        raise ConfigError(
            f"set has {taken[0]}, which the search sets", where=where, remedy="remove it"
        )
    if search.branch_at >= search.steps:
        raise ConfigError(
            f"branch_at is {search.branch_at}, and a trial has {search.steps} steps",
            where=where,
            remedy=f"use a step below {search.steps}",
        )
