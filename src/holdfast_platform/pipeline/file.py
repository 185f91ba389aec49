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
from holdfast.config.loading.load import load_config
from holdfast.config.loading.paths import expand_path
from holdfast.config.loading.section_file import read_values
from holdfast.errors import ConfigError, use_one_of
from holdfast_platform.pipeline.stages import (
    COMMAND,
    KINDS,
    OWN,
    REFERENCE,
    Kind,
    Stage,
    is_holdfast,
    kinds_of_set_key,
    overrides,
)
from holdfast_platform.registry.gate import read_rules
from holdfast_platform.search.file import RESERVED, read_search

KEYS = Border("pipeline file", frozenset(("name", "folder", "max_hours", "stages")))
EXPANDED = ("model.from", "lora.from")  # keys that loading replaces
UNKNOWN = "/result-of-a-later-stage"  # stands for a path that a stage has yet to make
ROWS = (".jsonl", ".json", ".jsonl.gz", ".jsonl.zst")  # ends of tasks that are files
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")


@dataclass(frozen=True)
class Pipeline:
    """A pipeline file."""

    path: Path
    name: str
    folder: Path  # of all results
    max_hours: float | None  # of all commands together, every start counted; None: no limit
    stages: tuple[Stage, ...]  # each after those that it refers to

    def stage(self, name: str) -> Stage:
        """Raises ConfigError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        raise _refusal(f"there is no stage {name!r}", str(self.path), use_one_of(names, name))


def _refusal(what: str, where: str, remedy: str) -> ConfigError:
    return ConfigError(what, where=where, remedy=remedy)


def fill(value: Any, lookup: Callable[[str, str], str]) -> Any:
    """Return a value with each `${stage.result}` replaced by `lookup(stage, result)`."""
    if isinstance(value, str):
        return REFERENCE.sub(lambda found: lookup(*split(found[1])), value)
    if isinstance(value, list):
        return [fill(each, lookup) for each in value]
    if isinstance(value, dict):
        return {key: fill(each, lookup) for key, each in value.items()}
    return value


def split(reference: str) -> tuple[str, str]:
    stage, _, result = reference.partition(".")
    return stage, result


def references(value: Any, own: bool = False) -> Iterator[tuple[str, str]]:
    """Yield stage and result of each reference in a value; to the stage itself only with `own`."""
    if isinstance(value, str):
        found = (split(each) for each in REFERENCE.findall(value))
        yield from (each for each in found if own or each[0] != OWN)
    elif isinstance(value, list | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from references(inner, own)


def read_pipeline(path: Path) -> Pipeline:
    """Read a file and check all of it that can be known before the start. Raises ConfigError."""
    value, lines = read_values(path)
    if not isinstance(value, dict) or not isinstance(value.get("stages"), dict):
        remedy = "write 'stages:' and below it 'pretrain: {kind: train, run: run.yaml}'"
        raise _refusal("this names no stages", str(path), remedy)
    KEYS.check(value, str(path), ConfigError, "remove it, or correct its name")
    base = Path(os.path.abspath(path)).parent
    name = str(value.get("name") or path.stem)
    stages = {
        each: _read_stage(each, entry, f"{path}:{lines['stages', each]}", base)
        for each, entry in value["stages"].items()
    }
    for stage in stages.values():
        _check_references(stage, stages)
    text = str(value.get("folder") or "pipelines/{name}").replace("{name}", name)
    hours = value.get("max_hours")
    if hours is not None and (type(hours) not in (int, float) or hours <= 0):
        remedy = "write the hours that all stages together may take, or leave it out"
        raise _refusal(f"max_hours is {hours!r}, and no number above 0", str(path), remedy)
    folder = Path(os.path.normpath(base / expand_path(text)))
    pipeline = Pipeline(path, name, folder, hours, _in_order(stages))
    for stage in pipeline.stages:
        _check_options(stage)
        check_run_file(stage, dict.fromkeys(references(stage.values), UNKNOWN))
    return pipeline


def _read_stage(name: str, entry: Any, where: str, base: Path) -> Stage:
    if not _NAME.fullmatch(name) or name == OWN:
        remedy = "use small letters, digits, - and _, and another name than out"
        raise _refusal(f"a stage cannot be called {name!r}", where, remedy)
    kind = str(entry.get("kind")) if isinstance(entry, dict) else ""
    if kind not in KINDS:
        raise _refusal(f"the kind of stage {name} is {kind!r}", where, use_one_of(KINDS, kind))
    row = KINDS[kind]
    row.keys.check(entry, where, ConfigError, f"{kind} takes {', '.join(sorted(row.keys.used))}")
    values = {key: value for key, value in entry.items() if key != "kind" and value is not None}
    if missing := [key for key in row.needs if key not in values]:
        raise _refusal(f"stage {name} has no {missing[0]}", where, f"write {missing[0]}: ...")
    for key in row.files:
        if isinstance(values.get(key), list):
            values[key] = [_file_at(base, each, key, where) for each in values[key]]
        elif key in values:
            values[key] = _file_at(base, values[key], key, where)
    if "search" in values:
        read_search(Path(values["search"]))
    if "rules" in values:
        read_rules(Path(values["rules"]))
    if "registry" in values and ":" not in str(values["registry"]):
        values["registry"] = str(base / expand_path(str(values["registry"])))
    outputs = _check_command(name, values, where) if kind == COMMAND else row.makes
    if "run" in row.files:
        _check_set(name, values, where)
    return Stage(name, kind, where, values, outputs)


def _file_at(base: Path, value: Any, key: str, where: str) -> str:
    """Return the path of a file or folder that a stage reads. Raises ConfigError if it is missing.
    A task that is no file stays a name."""
    text = str(value)
    if key == "tasks" and not text.endswith(ROWS):
        return text
    path = base / expand_path(text)
    if key != "run" and not path.exists():  # reading a run file has its own sentences
        remedy = "name a file that is there, from the pipeline file's folder"
        raise _refusal(f"{key}: there is no {path}", where, remedy)
    return str(path)


def _check_command(name: str, values: dict[str, Any], where: str) -> dict[str, Kind]:
    """Check a stage of kind `command`; return its results by name. Raises ConfigError."""
    words, outputs = values["command"], values["outputs"]
    if not isinstance(words, list) or not words:
        remedy = "write command: [python, judge.py]"
        raise _refusal(f"the command of stage {name} is no list of words", where, remedy)
    values["command"] = [str(word) for word in words]
    kinds = [str(kind) for kind in Kind]
    if not isinstance(outputs, dict) or not outputs:
        remedy = "write outputs: {scores: report}"
        raise _refusal(f"stage {name} names no outputs", where, remedy)
    for result, kind in outputs.items():
        if kind not in kinds or not _NAME.fullmatch(result):
            what = f"output {result!r} of stage {name} has the kind {kind!r}"
            raise _refusal(what, where, use_one_of(kinds, str(kind)))
    return {result: Kind(kind) for result, kind in outputs.items()}


def _check_set(name: str, values: dict[str, Any], where: str) -> None:
    """Check what a stage sets in its run file. Raises ConfigError."""
    given = values.get("set", {})
    if not isinstance(given, dict):
        remedy = "write set: {train.steps: 100}"
        raise _refusal(f"set of stage {name} is no list of keys", where, remedy)
    for key in given:
        if key in RESERVED:
            remedy = "leave it out; 'holdfast pipeline show' names the places of results"
            raise _refusal(f"stage {name} sets {key}, which the pipeline chooses", where, remedy)
        if key not in EXPANDED and field_at(as_path(key)) is None:
            remedy = "see the keys with: holdfast config schema"
            raise _refusal(f"stage {name} sets {key}, and no run file has it", where, remedy)
    if "from" in values:
        text, _ = read_values(Path(values["run"]))
        has_adapters = isinstance(text, dict) and bool(text.get("lora"))
        values["from_key"] = "lora.from" if has_adapters else "model.from"


def _check_references(stage: Stage, stages: Mapping[str, Stage]) -> None:
    """Raises ConfigError for a reference to what is not there, or of another kind."""
    row = KINDS[stage.kind]
    for key, value in stage.values.items():
        for name, text in value.items() if key == "set" else [(key, value)]:
            wanted = kinds_of_set_key(name) if key == "set" else row.takes.get(key, ())
            is_free = stage.kind == COMMAND and key == "command"
            if key in row.takes and not REFERENCE.fullmatch(str(text)):
                what = f"{key} of stage {stage.name} is {text!r}, and no reference"
                raise _refusal(what, stage.where, f"write {key}: ${{STAGE.{wanted[0]}}}")
            for other, result in references(text, own=is_free):
                found = _kind_of(stage, other, result, stages)
                if not is_free and found not in wanted:
                    takes = f"takes a {' or '.join(wanted)}" if wanted else "takes no reference"
                    what = f"{name} of stage {stage.name} {takes}, and ${{{other}.{result}}} is a"
                    remedy = "name a stage that makes it" if wanted else "write a value"
                    raise _refusal(f"{what} {found}", stage.where, remedy)


def _kind_of(stage: Stage, other: str, result: str, stages: Mapping[str, Stage]) -> Kind:
    among = {**stages, OWN: stage}
    if other not in among:
        what = f"stage {stage.name} refers to {other!r}, and there is no such stage"
        raise _refusal(what, stage.where, use_one_of(stages, other))
    if result not in among[other].outputs:
        what = f"stage {stage.name} refers to {other}.{result}, which {other} does not make"
        names = [f"${{{other}.{each}}}" for each in among[other].outputs]
        raise _refusal(what, stage.where, use_one_of(names))
    return among[other].outputs[result]


def _in_order(stages: Mapping[str, Stage]) -> tuple[Stage, ...]:
    """Return the stages so that each follows what it refers to. Raises ConfigError for a circle."""
    out: dict[str, Stage] = {}
    while left := [stage for stage in stages.values() if stage.name not in out]:
        needed = ({other for other, _ in references(stage.values)} for stage in left)
        ready = (stage for stage, names in zip(left, needed, strict=True) if names <= out.keys())
        if (stage := next(ready, None)) is None:
            names = ", ".join(each.name for each in left)
            what = f"stages {names} refer to each other in a circle"
            raise _refusal(what, left[0].where, "remove one of the references")
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
        what = f"stage {stage.name}: {problem().strip().rstrip('.')}"
        raise _refusal(what, stage.where, f"see: holdfast {name} --help") from None


def check_run_file(stage: Stage, paths: Mapping[tuple[str, str], str]) -> None:
    """Check the run file of a stage with what it sets. paths: of what it refers to. A file that
    begins with the model of a later stage is read when that model is there. Raises ConfigError."""
    if "run" not in KINDS[stage.kind].files:
        return
    given = {**stage.values.get("set", {}), "model.from": stage.values.get("from")}
    models = (value for key, value in given.items() if Kind.MODEL in kinds_of_set_key(key))
    if not any(paths[each] == UNKNOWN for each in references(list(models))):
        words = fill(overrides(stage), lambda other, result: paths[other, result])
        load_config(Path(stage.values["run"]), words)
