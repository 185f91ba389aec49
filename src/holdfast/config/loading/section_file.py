"""YAML files other than the run file: read by the same rules, and checked as a section."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from holdfast.config.loading.load import read_text
from holdfast.config.loading.yaml_tree import parse_file
from holdfast.config.sections.base import Section
from holdfast.errors import ConfigError

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
        first = error.errors()[0]
        key = first["loc"]
        what = f"{'.'.join(map(str, key)) or path.name}: "
        what += first["msg"].removeprefix("Value error, ")
        if not isinstance(first["input"], dict):
            what += f", and not {first['input']!r}"
        line = next((lines[key[:n]] for n in range(len(key), -1, -1) if key[:n] in lines), 1)
        remedy = f"the keys are in {page}"
        raise ConfigError(what, where=f"{path}:{line}", remedy=remedy) from None
