"""The run file's reference: a JSON schema for editors, a page for people."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from holdfast.config.loading import lora_from, model_from
from holdfast.config.loading.explain import format_value
from holdfast.config.loading.fields import ITEM, all_keys, change_of, is_list, section_of
from holdfast.config.run import RunConfig
from holdfast.config.sections.base import Change
from holdfast.config.sections.model import PRESETS

_HEAD = """\
# The run file

<!-- written by: holdfast config schema --markdown -->

A run file is YAML (1.2's core schema: `3e-3` is a number, `no` is a word). Every key has a
default, so an empty section is valid. A key that is not listed here is refused, and the refusal
names the nearest valid key. Any key can also be given on the command line, where it overrides
the file: `holdfast train run.yaml train.steps=200 data.sources.0.path=corpus.txt`.

A relative path in the file starts at the folder of the file; one on the command line starts at the
current folder. `~` is your home. A `$` in a path is refused.

## Changing a run

Each key has a class, which says what a change of it does to a run that has begun. The column
"change" below names it; all keys of a section that is named here with `.*` have one class.

| class | what a change does | keys |
|---|---|---|
{rows}

`train.steps` makes a run longer in place. A learning rate schedule that is not `constant` has a
length: that of `train.schedule.steps`, or of the run. A longer schedule would change the rate of
steps that are done, so it takes a branch. If you set `train.schedule.steps` to the old length, the
run gets longer in place, and the rate stays at its last value.

A batch of another size takes a branch, too. The steps of the past keep theirs: give the new size
in `train.batch_warmup`, from the branch's first step on.
"""

_MEANING = {
    Change.IN_PLACE: "`holdfast train` continues the run with the new value",
    Change.BRANCH: "`holdfast train` refuses it. `holdfast branch RUN --at STEP --to NEW "
    "key=value` makes a new run from a checkpoint. Weights, optimizer state and data position stay",
    Change.NEVER: "both refuse it: no checkpoint of the run fits another value",
}

_EXPANDED = {
    "model.preset": (model_from.KEY, model_from.MEANING),
    "lora.rank": (lora_from.KEY, lora_from.MEANING),
}
"""Keys that are no fields, by the field that they come after."""

_KEYS_IN_ROW = 25  # of the table of classes; the longest sentence of tools/prose.py


def json_schema() -> dict[str, Any]:
    """For editors. The shape of a model is not required, as a preset may give it."""
    schema = RunConfig.model_json_schema()
    for section, _ in _with_inner(RunConfig):
        keys = (schema if section is RunConfig else schema["$defs"][section.__name__])["properties"]
        for name, text in _descriptions(section).items():
            if text:
                keys[name] = dict(sorted((keys[name] | {"description": text}).items()))
    schema["$defs"]["ModelConfig"].pop("required", None)
    schema["$defs"]["ModelConfig"]["properties"] |= {
        "from": {"type": "string", "description": model_from.MEANING},
        "code": {"enum": [model_from.TRANSFORMERS], "description": model_from.CODE_MEANING},
    }
    schema["$defs"]["LoraConfig"]["properties"]["from"] = {
        "type": "string",
        "description": lora_from.MEANING,
    }
    schema["title"] = "Holdfast run file"
    return schema


def markdown() -> str:
    """docs/reference/run-file.md: one table per section, then the presets."""
    parts = [_HEAD.format(rows=_changes()), "## Top level\n", _table(RunConfig, "")]
    for section, key in [*_with_inner(RunConfig)][1:]:
        about = " ".join((section.__doc__ or "").split())
        level = "###" if "." in key else "##"
        parts += [f"{level} `{key.replace(ITEM, '<n>')}`\n", *([f"{about}\n"] if about else [])]
        parts.append(_table(section, key))
    columns = ("layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab_size")
    rows = ["| preset | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, shape in PRESETS.items():
        cells = (str(shape.get(column, "the dataset's")) for column in columns)
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    parts += ["## Presets of `model.preset`\n", ("\n".join(rows) + "\n")]
    return "\n".join(parts).rstrip() + "\n"


def _changes() -> str:
    """The rows of the table of classes: each key, or the section around it if all of its keys are
    of the class."""
    classes = {key: change_of(key) for key, _ in all_keys()}
    names: dict[Change, list[str]] = {change: [] for change in Change}
    for key, change in classes.items():
        parts = key.split(".")
        name = key
        for length in range(1, len(parts)):
            prefix = ".".join(parts[:length]) + "."
            if {c for k, c in classes.items() if k.startswith(prefix)} == {change}:
                name = f"{prefix}*"
                break
        assert change is not None, f"{key} does not say what a change of it does"
        if name not in names[change]:
            names[change].append(name)
    rows = []
    for change, found in names.items():
        quoted = [f"`{name}`" for name in found]
        for start in range(0, len(quoted), _KEYS_IN_ROW):
            cells = f"{change} | {_MEANING[change]}" if start == 0 else "|"
            rows.append(f"| {cells} | {', '.join(quoted[start : start + _KEYS_IN_ROW])} |")
    return "\n".join(rows)


def _with_inner(section: type[BaseModel], key: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """A section and all below it, each with its key."""
    yield section, key
    for name, info in section.model_fields.items():
        if inner := section_of(info.annotation):
            item = f".{ITEM}" if is_list(info.annotation) else ""
            yield from _with_inner(inner, f"{key}.{name}{item}".lstrip("."))


def _descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Name of a key -> its description. (Pydantic's own reading of docstrings would make the import
    of the sections, and so each command, a tenth of a second slower.)"""
    found = {name: info.description or "" for name, info in section.model_fields.items()}
    for kind in section.__mro__[: section.__mro__.index(BaseModel)]:
        (definition,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(definition, ast.ClassDef)
        for key, below in pairwise(definition.body):
            if isinstance(key, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = " ".join(ast.literal_eval(below.value).split())
                found[ast.unparse(key.target)] = found[ast.unparse(key.target)] or text
    return found


def _table(section: type[BaseModel], prefix: str) -> str:
    rows = ["| key | type | default | change | meaning |", "|---|---|---|---|---|"]
    descriptions = _descriptions(section)
    for name, info in section.model_fields.items():
        if section_of(info.annotation) is not None:
            continue
        change = change_of(f"{prefix}.{name}".lstrip("."))
        key = f"{prefix}.{name}".lstrip(".").replace(ITEM, "<n>")
        meaning = descriptions[name].replace("|", "\\|")
        cells = f"{_type(info)} | {_default(info, key)} | {change}"
        rows.append(f"| `{key}` | {cells} | {meaning} |")
        if key in _EXPANDED:  # no field: loading expands it
            expanded, about = _EXPANDED[key]
            rows.append(f"| `{expanded}` | text | none | {Change.NEVER} | {about} |")
        if key == "model.preset":
            cells = f"`{model_from.TRANSFORMERS}` | none | {change_of(key)}"
            rows.append(f"| `{model_from.CODE_KEY}` | {cells} | {model_from.CODE_MEANING} |")
    return "\n".join(rows) + "\n" if len(rows) > 2 else ""


def _type(info: FieldInfo) -> str:
    text = str(info.annotation)
    for kind in get_args(info.annotation):
        if (words := [w for w in get_args(kind) if isinstance(w, str)]) and "Annotated" in text:
            number = next(k for k in get_args(info.annotation) if get_origin(k) is Annotated)
            inner, *rules = get_args(number)
            as_number = FieldInfo(annotation=inner)
            as_number.metadata = [rule for r in rules for rule in getattr(r, "metadata", [r])]
            return f"{_type(as_number)}, or `{words[0]}`"
    choices = re.findall(r"Literal\[(.*?)\]", text)
    if choices and bool in get_args(info.annotation):
        return f"true or false, or `{choices[0].strip(chr(39))}`"
    if choices:
        named = ", ".join(f"`{c.strip(chr(39))}`" for c in choices[0].split(", "))
        if is_list(info.annotation):
            return f"list of {named}"
        return f"{named}; or a list of these" if "tuple[" in text else named
    names = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}
    kinds = [a for a in (get_args(info.annotation) or (info.annotation,)) if a is not type(None)]
    words = [names.get(getattr(k, "__name__", ""), "list") for k in kinds]
    text = words[0]
    if is_list(info.annotation):
        text = "list of texts" if "text" in words else "list of numbers"
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in info.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(rule, name, None) is not None and abs(getattr(rule, name)) < 2**62
    ]
    return f"{text}, {', '.join(bounds)}" if bounds else text


def _default(info: FieldInfo, key: str) -> str:
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "the preset's" if key.startswith("model.") else "must be given"
    return "none" if value is None else f"`{format_value(value)}`"
