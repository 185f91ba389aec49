"""A run file and the command line -> one validated RunConfig that knows where it comes from.

    loaded = load(Path("run.yaml"), ["train.steps=200"])
    loaded.config.train.steps              # 200
    loaded.origins["train.steps"]          # Origin("command line", "train.steps=200")

Every refusal is a ConfigError. It names the line (or the override), the key and a value that
would work. All refusals come at once.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from holdfast.config.loading import lora_from, model_from, yaml_tree
from holdfast.config.loading.explain import (
    MAX_NUMBER,
    Place,
    explain_errors,
    explain_rule,
    find_example,
    format_value,
    suggest_key,
)
from holdfast.config.loading.fields import (
    adapter_of,
    allows,
    as_path,
    field_at,
    is_list,
    leaves,
    section_of,
    with_value,
)
from holdfast.config.loading.paths import locate_paths, with_places
from holdfast.config.run import RunConfig
from holdfast.config.sections.model import PRESETS
from holdfast.config.sections.objective import NEXT_TOKEN, ObjectiveConfig
from holdfast.config.sections.run_place import dataset_of_run, is_bucket
from holdfast.errors import ConfigError, nearest_of

OriginKind = Literal["file", "command line", "preset", "model folder", "default", "planned"]
KeyPath = tuple[str | int, ...]
PlannedValue = tuple[Any, str]
"""A value, and the reason why a key has it."""
PlannedValues = Mapping[str, PlannedValue]
"""By dotted key."""
_ALIAS = re.compile(r"^[*&].*|(?<=[\[{,:\s])[*&][^\],}\s]*", re.DOTALL)
"""A text that YAML would read as an anchor or alias: a value, or an item of a list."""


@dataclass(frozen=True)
class Origin:
    """The source of a value.

    `place` is "run.yaml:12", the override's text, the preset's name or the reason of a plan. It
    is empty for a default.
    """

    kind: OriginKind
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.place})" if self.place else self.kind


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with the origin of each of its values, keyed by dotted key."""

    config: RunConfig
    origins: Mapping[str, Origin]
    text: str = ""  # the run file as it was read
    name: str = "run file"  # its path, for messages
    overrides: tuple[str, ...] = ()
    base: str = ""  # the folder that the run file's relative paths start at; "": the current one
    places: Mapping[str, str] = field(default_factory=dict)  # see `config.loading.paths`

    def where(self, key: str) -> str:
        """The place of a key for a message: a line, an override, or the run file."""
        origin = self.origins.get(key, Origin("default"))
        if origin.kind == "command line":
            return f"command line: {origin.place}"
        return origin.place if origin.kind == "file" else self.name

    def with_values(self, values: PlannedValues) -> LoadedConfig:
        """Return the same with planned values, each with the reason why. Only their types and
        bounds are checked: rules wait for `validated`. Raises ConfigError."""
        if not values:
            return self
        origins = {**self.origins, **{k: Origin("planned", why) for k, (_, why) in values.items()}}
        config = self.config
        for key, (value, _) in values.items():
            path = as_path(key)
            try:
                config = with_value(config, path, adapter_of(key).validate_python(value))
            except ValidationError as error:
                raise explain_errors(error, _place_in(origins), self.name, path) from None
        return replace(self, config=config, origins=origins)

    def validated(self) -> LoadedConfig:
        """Return the same, validated completely. Raises ConfigError when a rule of the run file
        forbids a value."""
        data = self.config.model_dump(mode="json")
        config = with_places(_validate(data, self.origins, self.name), self.places)
        return replace(self, config=config)

    def refuse_broken_rules(self) -> None:
        """Raises ConfigError if planned values do not go together. It checks the rules of the
        sections `train` and `layout`, and those between sections."""
        for name in ("train", "layout"):
            section = getattr(self.config, name)
            try:
                type(section).model_validate(section.model_dump())
            except ValidationError as error:
                raise explain_errors(error, _place_in(self.origins), self.name, (name,)) from None
        if (sentence := self.config.find_broken_rule()) is not None:
            raise explain_rule(sentence, _place_in(self.origins), self.name)

    def with_planned(self, values: Mapping[str, Any], reason: str) -> LoadedConfig:
        """Return the same with planned values, e.g. {"layout.workers": 2}, validated. Raises
        ConfigError when a rule of the run file forbids one."""
        return self.with_values({key: (value, reason) for key, value in values.items()}).validated()

    def to_json(self) -> dict[str, Any]:
        """Return the contents of `resolved.json`."""
        return {
            "config": self.config.model_dump(mode="json"),
            "origins": {k: {"kind": o.kind, "place": o.place} for k, o in self.origins.items()},
            "overrides": list(self.overrides),
        }


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, override, validate. Without a path: the defaults and the overrides."""
    if path is None:
        return resolve_config(None, "command line", overrides)
    base = os.path.dirname(str(path))
    return resolve_config(read_text(path), str(path), overrides, base)


def read_text(path: Path) -> str:
    """The run file's text. Raises ConfigError for what is not a readable UTF-8 file."""
    where = str(path)
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        if where.startswith(("s3:/", "gs:/", "az:/")):  # a path has lost the second slash
            raise ConfigError(
                "this is the address of a bucket, and this command takes a run file",
                where=where.partition("?")[0].replace(":/", "://", 1),
                remedy="name the run file, and the address with folder=ADDRESS",
            ) from None
        there = (str(each) for pattern in ("*.yaml", "*.yml") for each in path.parent.glob(pattern))
        near = nearest_of(where, there, cutoff=0.8)
        raise ConfigError(
            "there is no such run file",
            where=where,
            remedy=(f"did you mean {near}? Otherwise " if near else "")
            + f"make one: holdfast init {shlex.quote(where)}",
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            "this is a folder, not a run file", where=where, remedy="name the YAML file in it"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"the byte 0x{error.object[error.start]:02x} is not UTF-8",
            where=f"{where}:{line}",
            remedy="save the file as UTF-8 text",
        ) from None
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, "?")
        raise ConfigError(
            f"the run file cannot be read ({error.strerror or reason})",
            where=where,
            remedy="check its permissions",
        ) from None


def resolve_config(
    text: str | None, name: str, overrides: Sequence[str] = (), base: str = ""
) -> LoadedConfig:
    """Text and overrides in, LoadedConfig out. `base`: the folder of the run file. Pure, unless
    `model.from` names a folder to look into."""
    tree = yaml_tree.parse_yaml(text, name) if text is not None else yaml_tree.YamlTree({})
    given: dict[str, Origin] = {
        ".".join(map(str, path)): Origin("file", f"{name}:{line}")
        for path, line in tree.lines.items()
        if path
    }
    _expand_short_forms(tree.value, given)
    for override in overrides:
        key = _override(tree.value, override)
        for stale in [k for k in given if k == key or k.startswith(key + ".")]:
            del given[stale]
        given[key] = Origin("command line", override)
        _expand_short_forms(tree.value, given)
    _drop_other_length(tree.value, given)

    def base_of(key: str) -> str:
        origin = origins.get(key) or given.get(key) or Origin("default")
        return "" if origin.kind in ("command line", "model folder") else base

    origins: dict[str, Origin] = {}
    data, folder = model_from.expand(tree.value, given, base_of(model_from.KEY))
    data, adapter, by_model = lora_from.expand(data, base_of(lora_from.KEY), folder)
    data = _with_score_head(data, given)
    layout, train = data.get("layout"), data.get("train") or {}
    if isinstance(layout, dict) and layout.get("mode") == "auto" and isinstance(train, dict):
        data = {**data, "train": {"microbatch_size": 0, **train}}  # searched, unless it is named
    config = _validate(data, given, name)
    origins = _origins(config, given)
    if adapter is not None:
        lora_from.refuse_differences(
            adapter, config.lora.model_dump(), lambda key: _place(given.get(key)) or name
        )
        origins |= dict.fromkeys(adapter.keys_taken, Origin("model folder", str(adapter.path)))
    if folder is not None:
        model_from.refuse_differences(folder, config, lambda key: _place(given.get(key)) or name)
        for key in (*folder.keys_taken, *by_model):
            for leaf in [o for o in origins if o == key or o.startswith(key + ".")]:
                origins[leaf] = Origin("model folder", str(folder.path))
    loaded = LoadedConfig(config, origins, text or "", name, tuple(overrides), base)
    config, places = locate_paths(config, base_of, loaded.where)
    loaded = replace(loaded, config=config, places=places)
    if origins["data.folder"].kind != "default" or not is_bucket(config.run_place):
        return loaded
    place = dataset_of_run(config.run_place)
    return loaded.with_values({"data.folder": (place, "the run's bucket")}) if place else loaded


def _expand_short_forms(data: dict[str, Any], given: dict[str, Origin]) -> None:
    """Write `task: NAME` as `task: {name: NAME}`, and `layout: auto` as `layout: {mode: auto}`."""
    for section, key in (("task", "name"), ("layout", "mode")):
        word = data.get(section)
        if isinstance(word, str) and (section == "task" or word == "auto"):
            data[section] = {key: word}
            given[f"{section}.{key}"] = given.pop(section)


def _with_score_head(data: dict[str, Any], given: dict[str, Origin]) -> dict[str, Any]:
    """Return the values with the score head that the kind of objective needs, if they name none."""
    objective, model = data.get("objective"), data.get("model") or {}
    if not (isinstance(objective, dict) and isinstance(model, dict)) or "score_head" in model:
        return data
    try:
        needed = ObjectiveConfig.model_validate({"kind": objective.get("kind", NEXT_TOKEN)})
    except ValidationError:
        return data  # said with the other mistakes
    if needed.score_head == "none":
        return data
    given["model.score_head"] = Origin("planned", f"objective.kind {needed.kind}")
    return {**data, "model": {**model, "score_head": needed.score_head}}


def _drop_other_length(data: dict[str, Any], given: dict[str, Origin]) -> None:
    """Leave out the file's `train.steps` where the command line gives `train.epochs`, and the
    other way round: both say how long the run is. `train.epochs=0` says nothing."""
    train = data.get("train")
    if not isinstance(train, dict) or not (train.get("epochs") and "steps" in train):
        return
    kinds = {key: (given.get(f"train.{key}") or given["train"]).kind for key in ("steps", "epochs")}
    if len(set(kinds.values())) == 2:
        (dropped,) = (key for key, kind in kinds.items() if kind == "file")
        del train[dropped], given[f"train.{dropped}"]


def _override(data: dict[str, Any], override: str) -> str:
    """Apply one `key=value` to `data`; returns its key."""
    key, equals, text = override.partition("=")
    key = key.strip()
    where = f"command line: {override}"
    if not equals or not key:
        raise ConfigError(
            "an override is written key=value", where=where, remedy="for example train.steps=200"
        )
    path: KeyPath = as_path(key)
    field = field_at(path)
    if key in (model_from.KEY, model_from.CODE_KEY, lora_from.KEY):
        section, _, part = key.partition(".")
        data[section] = {**(data.get(section) or {}), part: text.strip()}
        return key
    if field is None:
        raise ConfigError(f"unknown key {key}", where=where, remedy=suggest_key(path))
    value = _parse(key, text, where)
    if re.search(r"(?:^|\s)#", text) and "#" not in str(value):
        raise ConfigError(
            "what follows the # would be a comment",
            where=where,
            remedy=f"put the value in quotes: '{key}={json.dumps(text.strip())}'",
        )
    if allows(field.annotation, str) and not isinstance(value, str) and value is not None:
        value = text.strip()  # name=2026 is text, whatever it looks like
    holder: Any = data
    for depth in range(len(path)):
        last = depth == len(path) - 1
        holder = _step(holder, path, depth, value if last else None, last, where)
    return key


def _parse(key: str, text: str, where: str) -> Any:
    """The value of an override. Raises ConfigError."""
    try:
        return yaml_tree.parse_value(text, where)
    except ConfigError as error:
        quoted = _ALIAS.sub(lambda found: json.dumps(found[0]), text.strip())
        if "aliases (*)" not in error.message or quoted == text.strip():
            raise
        raise ConfigError(
            "a text that begins with * or & has to be in quotes",
            where=where,
            remedy=f"write {shlex.quote(f'{key}={quoted}')}",
        ) from None


def _step(holder: Any, path: KeyPath, depth: int, value: Any, last: bool, where: str) -> Any:
    """Set `value` at the end of the path, or walk (and make) one level of it."""
    part, so_far = path[depth], ".".join(map(str, path[:depth]))
    if isinstance(part, int):
        if not isinstance(holder, list) or part > len(holder):
            size = len(holder) if isinstance(holder, list) else 0
            raise ConfigError(
                f"{so_far} has no item {part}",
                where=where,
                remedy=f"the next one is {so_far}.{size}",
            )
        if part == len(holder):
            holder.append({})
    elif not isinstance(holder, dict):
        kind = "a list, so its items are" if isinstance(holder, list) else "one value, without"
        raise ConfigError(
            f"{so_far} is {kind} keys of their own",
            where=where,
            remedy=f"write {so_far}.0.{part}=..."
            if isinstance(holder, list)
            else f"write {so_far}=...",
        )
    if last:
        holder[part] = value
        return None
    if isinstance(part, str) and holder.get(part) is None:
        field = field_at(path[: depth + 1])
        holder[part] = [] if field is not None and is_list(field.annotation) else {}
    return holder[part]


def _validate(data: dict[str, Any], given: Mapping[str, Origin], name: str) -> RunConfig:
    place = _place_in(given)
    data = {key: value for key, value in data.items() if not _empty_section(key, value)}
    refused = _booleans_for_numbers(data, place, name)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        refused.append(explain_errors(error, place, name).message)
    if refused:
        raise ConfigError("\n".join(refused))
    large = [
        f"{place(as_path(key)) or name}: {key} is {format_value(value)}, which is too large; "
        f"use {MAX_NUMBER} or less"
        for key, value in leaves(config.model_dump())
        if isinstance(value, int) and abs(value) > MAX_NUMBER and key != "seed"
    ]
    if large:
        raise ConfigError("\n".join(large))
    return config


def _place_in(given: Mapping[str, Origin]) -> Place:
    """Return what says where a key was given. A section counts as given by its own line only."""
    return lambda path: _place(given.get(".".join(map(str, path))))


def _place(origin: Origin | None) -> str | None:
    """The place of a value, in words."""
    if origin is None:
        return None
    return f"command line: {origin.place}" if origin.kind == "command line" else origin.place


def _empty_section(key: str, value: Any) -> bool:
    """`train:` with nothing below it is a section left at its defaults."""
    field = field_at((key,))
    return value is None and field is not None and section_of(field.annotation) is not None


def _booleans_for_numbers(data: dict[str, Any], place: Place, name: str) -> list[str]:
    """Refuse true and false where a number belongs: Python, and so the schema, takes them for 1
    and 0."""
    found: list[str] = []
    for key, value in leaves(data):
        path: KeyPath = as_path(key)
        kinds = (field := field_at(path)) and field.annotation
        is_number = allows(kinds, int) or allows(kinds, float)
        if isinstance(value, bool) and is_number and not allows(kinds, bool):
            example = find_example(path) or 1
            found.append(
                f"{place(path) or name}: {key} is {format_value(value)}, not a number; "
                f"use {example}"
            )
    return found


def _origins(config: RunConfig, given: Mapping[str, Origin]) -> dict[str, Origin]:
    """Return the origin of every leaf. If a list is given as one value, its items share it."""
    origins: dict[str, Origin] = {}
    preset = config.model.preset
    for key, _ in leaves(config.model_dump(mode="json")):
        found = given.get(key)
        parts = key.split(".")
        for length in range(len(parts) - 1, 0, -1):
            if found is not None:
                break
            parent = given.get(".".join(parts[:length]))
            # A section's own line says nothing of keys that it does not name. An override that
            # gives a complete list or section does.
            if parent is not None and parent.kind == "command line":
                found = parent
        if found is None and preset and parts[0] == "model" and parts[1] in PRESETS[preset]:
            found = Origin("preset", preset)
        origins[key] = found or Origin("default")
    return origins
