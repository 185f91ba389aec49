"""YAML files other than the run file: read by the same rules, and checked as a section."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from holdfast.config.loading.load import read_text
from holdfast.config.loading.yaml_tree import parse_file
from holdfast.config.run import RunConfig
from holdfast.config.sections.base import Section
from holdfast.errors import ConfigError, nearest_of

SectionT = TypeVar("SectionT", bound=Section)
Lines = Mapping[tuple[str | int, ...], int]


def read_values(path: Path) -> tuple[Any, Lines]:
    """Return the values of a file, and the line of each key. Raises ConfigError."""
    if not path.is_file():
        what, remedy = "there is no such file", "name the YAML file"
        raise ConfigError(what, where=str(path), remedy=remedy)
    return parse_file(read_text(path), str(path))


def read_section(path: Path, section: type[SectionT], page: str) -> SectionT:
    """Return a file as a section. Raises ConfigError with file and line for a key that is wrong.

    page: of the docs, which has the keys.
    """
    values, lines = read_values(path)
    try:
        return section.model_validate(values or {})
    except ValidationError as error:
        refusals = error.errors()
        unknown = [each["loc"] for each in refusals if each["type"] == "extra_forbidden"]
        first, remedy = refusals[0], f"the keys are in {page}"
        if unknown and all(key[0] in RunConfig.model_fields for key in unknown):
            what = "this is a run file, and the command takes a file of its own"
            raise ConfigError(what, where=str(path), remedy=remedy) from None
        key = first["loc"]
        name = ".".join(map(str, key)) or path.name
        if key in unknown:
            what = f"unknown key {name}"
            near = nearest_of(str(key[-1]), section.model_fields) if len(key) == 1 else ""
            remedy = f"did you mean {near}?" if near else remedy
        elif first["type"] == "missing":
            what = f"{name} is missing"
        else:
            what = f"{name}: {first['msg'].removeprefix('Value error, ')}"
            if not isinstance(first["input"], dict):
                what += f", and not {first['input']!r}"
        line = next((lines[key[:n]] for n in range(len(key), -1, -1) if key[:n] in lines), 1)
        raise ConfigError(what, where=f"{path}:{line}", remedy=remedy) from None
