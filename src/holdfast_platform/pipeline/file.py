"""A pipeline file: read, and checked before the first stage starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from holdfast.borders import Border
from holdfast.cli.table import all_commands
from holdfast.config.loading.fields import as_path, field_at
from holdfast.config.loading.load import load_config, read_text
from holdfast.config.loading.paths import expand_path
from holdfast.config.loading.yaml_tree import parse_file
from holdfast.errors import ConfigError, use_one_of
from holdfast_platform.pipeline.stages import (
    COMMAND,
    KINDS,
    OWN,
    REFERENCE,
    RESERVED,
    Kind,
    Stage,
    is_holdfast,
    kind_of_set_key,
    overrides,
)
from holdfast_platform.search.file import read_search

KEYS = Border("pipeline file", frozenset(("name", "folder", "max_hours", "stages")))
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")
EXPANDED = ("model.from", "lora.from")
UNKNOWN = "/result-of-a-later-stage"
"""Stands for a path that a stage has yet to make."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline file. stages: each after those that it refers to."""

    path: Path
    name: str
    folder: Path  # of all results
    max_hours: float | None  # of all commands together, every start counted; None: no limit
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        """Raises ConfigError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        raise ConfigError(
            f"there is no stage {name!r}", where=str(self.path), remedy=use_one_of(names, name)
        )


def fill(value: Any, lookup: Callable[[str, str], str]) -> Any:
    """Return a value with each `${stage.result}` replaced by `lookup(stage, result)`."""
    if isinstance(value, str):
        return REFERENCE.sub(lambda found: lookup(*split(found[1])), value)
    if isinstance(value, list | tuple):
        return [fill(each, lookup) for each in value]
    if isinstance(value, dict):
        return {key: fill(each, lookup) for key, each in value.items()}
    return value


def split(reference: str) -> tuple[str, str]:
    stage, _, result = reference.partition(".")
    return stage, result


def references(value: Any, own: bool = False) -> Iterator[tuple[str, str]]:
    """Yield stage and result of each reference in a value; to the stage itself only with `own`."""
    for text in _texts(value):
        for found in REFERENCE.finditer(text):
            stage, result = split(found[1])
            if own or stage != OWN:
                yield stage, result


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def read_pipeline(path: Path) -> Pipeline:
    """Read a file and check all of it that can be known before the start. Raises ConfigError."""
    value, lines = parse_file(read_text(path), str(path))
    if not isinstance(value, dict) or not isinstance(value.get("stages"), dict):
        raise ConfigError(
            "this names no stages",
            where=str(path),
            remedy="write 'stages:' and below it a stage such as 'pretrain: {kind: train, "
            "run: run.yaml}'",
        )
    KEYS.check(value, str(path), ConfigError, "remove it, or correct its name")
    base = Path(os.path.abspath(path)).parent
    name = str(value.get("name") or path.stem)
    places = {each: f"{path}:{lines['stages', each]}" for each in value["stages"]}
    stages = {
        each: _read_stage(each, entry, places[each], base)
        for each, entry in value["stages"].items()
    }
    for stage in stages.values():
        _check_references(stage, stages)
    folder = base / expand_path(
        str(value.get("folder") or "pipelines/{name}").replace("{name}", name)
    )
    hours = _max_hours(value.get("max_hours"), str(path))
    pipeline = Pipeline(
        path, name, Path(os.path.normpath(folder)), hours, _in_order(stages, places)
    )
    for stage in pipeline.stages:
        _check_options(stage)
        check_run_file(stage, dict.fromkeys(references(stage.values), UNKNOWN))
    return pipeline


def _max_hours(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(
            f"max_hours is {value!r}, and no number above 0",
            where=where,
            remedy="write the hours that all stages together may take, or leave it out",
        )
    return float(value)


def _read_stage(name: str, entry: Any, where: str, base: Path) -> Stage:
    if not _NAME.fullmatch(name) or name == OWN:
        raise ConfigError(
            f"a stage cannot be called {name!r}",
            where=where,
            remedy="use small letters, digits, - and _, and another name than out",
        )
    kind = str(entry.get("kind")) if isinstance(entry, dict) else ""
    if kind not in KINDS:
        raise ConfigError(
            f"the kind of stage {name} is {kind!r}",
            where=where,
            remedy=use_one_of(KINDS, str(kind)),
        )
    row = KINDS[kind]
    row.keys.check(
        entry, where, ConfigError, f"stage {name} takes {', '.join(sorted(row.keys.used))}"
    )
    values = {key: value for key, value in entry.items() if key != "kind" and value is not None}
    if missing := [key for key in row.needs if key not in values]:
        raise ConfigError(
            f"stage {name} has no {missing[0]}", where=where, remedy=f"write {missing[0]}: ..."
        )
    outputs = dict(row.makes)
    if "search" in values:
        values["search"] = str(base / expand_path(str(values["search"])))
        read_search(Path(values["search"]))
    if kind == COMMAND:
        outputs = _check_command(name, values, where, base)
    elif "run" in values and "run" not in row.takes:
        values["run"] = str(base / expand_path(str(values["run"])))
        _check_set(name, values, where)
    return Stage(name, kind, where, values, outputs)


def _check_command(name: str, values: dict[str, Any], where: str, base: Path) -> dict[str, Kind]:
    """Check a stage of kind `command`; return its results by name. Raises ConfigError."""
    words = values["command"]
    if not isinstance(words, list) or not words:
        raise ConfigError(
            f"the command of stage {name} is no list of words",
            where=where,
            remedy='write command: [python, judge.py, "${out.scores}"]',
        )
    values["command"] = [str(word) for word in words]
    files = values.get("inputs", [])
    values["inputs"] = [str(base / expand_path(str(each))) for each in files]
    if missing := [each for each in values["inputs"] if not os.path.exists(each)]:
        raise ConfigError(
            f"inputs of stage {name}: there is no {missing[0]}",
            where=where,
            remedy="name files that are there, from the pipeline file's folder",
        )
    outputs = values["outputs"]
    kinds = [str(kind) for kind in Kind]
    if not isinstance(outputs, dict) or not outputs:
        raise ConfigError(
            f"stage {name} names no outputs", where=where, remedy="write outputs: {scores: report}"
        )
    for result, kind in outputs.items():
        if kind not in kinds or not _NAME.fullmatch(result):
            raise ConfigError(
                f"output {result!r} of stage {name} has the kind {kind!r}",
                where=where,
                remedy=use_one_of(kinds, str(kind)),
            )
    return {result: Kind(kind) for result, kind in outputs.items()}


def _check_set(name: str, values: dict[str, Any], where: str) -> None:
    """Check what a stage sets in its run file. Raises ConfigError."""
    given = values.get("set", {})
    if not isinstance(given, dict):
        raise ConfigError(
            f"set of stage {name} is no list of keys",
            where=where,
            remedy="write set: {train.steps: 100}",
        )
    for key in given:
        if key in RESERVED:
            raise ConfigError(
                f"stage {name} sets {key}, which the pipeline chooses",
                where=where,
                remedy="leave it out; 'holdfast pipeline show' names the places of results",
            )
        if key not in EXPANDED and field_at(as_path(key)) is None:
            raise ConfigError(
                f"stage {name} sets {key}, and a run file has no such key",
                where=where,
                remedy="see the keys with: holdfast config schema",
            )
    if "from" in values:
        text, _ = parse_file(read_text(Path(values["run"])), values["run"])
        has_adapters = isinstance(text, dict) and bool(text.get("lora"))
        values["from_key"] = "lora.from" if has_adapters else "model.from"


def _check_references(stage: Stage, stages: Mapping[str, Stage]) -> None:
    """Raises ConfigError for a reference to what is not there, or of another kind."""
    row = KINDS[stage.kind]
    for key, value in stage.values.items():
        inner = value.items() if key == "set" else [(key, value)]
        for name, text in inner:
            wanted = kind_of_set_key(name) if key == "set" else row.takes.get(key)
            is_free = not is_holdfast(stage) and key == "command"
            if isinstance(wanted, Kind) and key in row.takes and not list(references(text)):
                raise ConfigError(
                    f"{key} of stage {stage.name} is {text!r}, and no reference",
                    where=stage.where,
                    remedy=f"write {key}: ${{STAGE.{wanted}}}",
                )
            for other, result in references(text, own=is_free):
                found = _kind_of(stage, other, result, stages)
                if not is_free and found is not wanted:
                    takes = f"takes a {wanted}" if wanted else "takes no reference"
                    raise ConfigError(
                        f"{name} of stage {stage.name} {takes}, and ${{{other}.{result}}} is a "
                        f"{found}",
                        where=stage.where,
                        remedy=f"name a stage that makes a {wanted}" if wanted else "write a value",
                    )


def _kind_of(stage: Stage, other: str, result: str, stages: Mapping[str, Stage]) -> Kind:
    where = stage.where
    stages = {**stages, OWN: stage}
    if other not in stages:
        raise ConfigError(
            f"stage {stage.name} refers to {other!r}, and there is no such stage",
            where=where,
            remedy=use_one_of([name for name in stages if name != OWN], other),
        )
    if result not in stages[other].outputs:
        raise ConfigError(
            f"stage {stage.name} refers to {other}.{result}, which {other} does not make",
            where=where,
            remedy=use_one_of([f"${{{other}.{each}}}" for each in stages[other].outputs]),
        )
    return stages[other].outputs[result]


def _in_order(stages: Mapping[str, Stage], places: Mapping[str, str]) -> tuple[Stage, ...]:
    """Return the stages so that each follows what it refers to. Raises ConfigError for a circle."""
    out: dict[str, Stage] = {}
    while len(out) < len(stages):
        ready = (
            stage
            for stage in stages.values()
            if stage.name not in out and all(other in out for other, _ in references(stage.values))
        )
        stage = next(ready, None)
        if stage is None:
            left = [name for name in stages if name not in out]
            raise ConfigError(
                f"stages {', '.join(left)} refer to each other in a circle",
                where=places[left[0]],
                remedy="remove one of the references",
            )
        out[stage.name] = stage
    return tuple(out.values())


def _check_options(stage: Stage) -> None:
    """Parse the options that a stage gives a command of `holdfast`. Raises ConfigError."""
    if not is_holdfast(stage):
        return
    name, *words = fill(KINDS[stage.kind].words(stage), lambda other, result: UNKNOWN)
    command: Any = typer.main.get_command(import_module(all_commands()[name].module).app)
    while inner := getattr(command, "commands", None):
        command, words = inner[words[0]], words[1:]
    try:
        command.make_context(name, words)
    except Exception as error:
        problem = getattr(error, "format_message", None)
        if problem is None:
            raise
        raise ConfigError(
            f"stage {stage.name}: {problem().strip().rstrip('.')}",
            where=stage.where,
            remedy=f"see: holdfast {name} --help",
        ) from None


def check_run_file(stage: Stage, paths: Mapping[tuple[str, str], str]) -> None:
    """Check the run file of a stage with what it sets. paths: of what it refers to. A file that
    begins with the model of a later stage is read when that model is there. Raises ConfigError."""
    if "run" not in stage.values or "run" in KINDS[stage.kind].takes:
        return
    waits = any(
        found == UNKNOWN and kind_of_set_key(key) is Kind.MODEL
        for key, value in {
            **stage.values.get("set", {}),
            "model.from": stage.values.get("from"),
        }.items()
        for found in (paths.get(each) for each in references(value))
    )
    if not waits:
        words = fill(overrides(stage), lambda other, result: paths[other, result])
        load_config(Path(stage.values["run"]), words)
