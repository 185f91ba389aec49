"""`model.from: FOLDER`: shape, tokenizer and weights out of a folder in Hugging Face form.

The folder's `config.json` gives every key of `model:` that the run file does not, and its
tokenizer.json is the run's unless `data.tokenizer.path` names another. Loading expands the key like
a preset, and gives `model.weights` the folder. With `model.weights: false` the folder's weights are
not read. Adapters read them as `lora.base`, and transformers' code reads them itself.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config.huggingface.convert import shape_differences
from holdfast.config.huggingface.folder import CONFIG, TOKENIZER, read_folder_model
from holdfast.config.loading.paths import expand_path, join_base
from holdfast.config.loading.yaml_tree import is_plain
from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ConfigError, ModelFolderError

Differences = Mapping[str, tuple[Any, Any]]
"""The run file's value, and the folder's, by key of a section."""
KEY = "model.from"
CODE_KEY = "model.code"
WEIGHTS_KEY = "model.weights"
TRANSFORMERS = "transformers"
TRANSFORMERS_TASK = "holdfast.tasks.huggingface:CausalLM"
SPEECH_TASK = "holdfast.tasks.families:Speech"
VISION_TASK = "holdfast.tasks.families:VisionLanguage"
TRANSFORMERS_TASKS = (TRANSFORMERS_TASK, SPEECH_TASK, VISION_TASK)
_SHARD_ARGUMENTS = ("shards", "validation")
MEANING = (
    "folder in Hugging Face form: gives every other key of `model`, the tokenizer, and the weights "
    "that the run begins with"
)
CODE_MEANING = (
    "transformers: the folder of `model.from` is trained by its own modelling code, from its "
    "weights (docs/guide/python.md); none: by the built-in decoder"
)


@dataclass(frozen=True)
class ModelFolder:
    """The folder that `model.from` names. model: its shape; None where transformers computes it.
    keys_taken: dotted keys with its values."""

    path: Path
    model: ModelConfig | None
    keys_taken: tuple[str, ...]


def expand(
    data: dict[str, Any], given: Mapping[str, Any], base: str = ""
) -> tuple[dict[str, Any], ModelFolder | None]:
    """The run file's values without `model.from`, with those of its folder where it has none.

    given: the keys with a place of their own. base: the folder that a relative path starts at, ""
    for the current folder. Raises ModelFolderError for a folder that cannot be read, ConfigError
    for a preset next to it.
    """
    section = data.get("model")
    if not isinstance(section, dict) or not {"from", "code", "weights"} & set(section):
        return data, None
    own = {key: value for key, value in section.items() if key not in ("from", "code")}
    named, code = section.get("from"), section.get("code")
    if code not in (None, TRANSFORMERS):
        raise ConfigError(f"{CODE_KEY} {code!r} is unknown", remedy=f"use {TRANSFORMERS}")
    if named is None:
        switched = own.get("weights") in (True, "true") and WEIGHTS_KEY
        if needs := CODE_KEY if code is not None else switched:
            raise ConfigError(f"{needs} needs {KEY}", remedy=f"name a folder in {KEY}")
        _takes_weights(own)
        return {**data, "model": own}, None
    path = folder_at(KEY, named, base)
    if own.get("preset") is not None:
        raise ConfigError(
            f"model.preset {own['preset']} and {KEY} {named} both give the shape",
            remedy="use one of the two",
        )
    has_weights = _takes_weights(own)
    if code is not None:
        return _as_task({**data, "model": own}, given, path, base, has_weights)
    model = read_folder_model(path)
    if own.get("vocab_size") == 0:
        del own["vocab_size"]
    objective = data.get("objective")
    kind = objective.get("kind") if isinstance(objective, dict) else None
    if not model.has_language_head and kind != "reward":
        raise ConfigError(
            f"{KEY} {named} is a reward model, which cannot predict tokens",
            remedy="name a language model, or use objective.kind: reward",
        )
    values = model.model_dump(mode="json")
    del values["score_head"]  # that of this run follows from its objective
    adapters = data.get("lora")
    if isinstance(adapters, dict) and (adapters.get("rank") or adapters.get("from")):
        if not has_weights:
            raise ConfigError(
                f"adapters are trained on the weights of {named}, and {WEIGHTS_KEY} is false",
                remedy=f"remove {WEIGHTS_KEY}",
            )
    elif has_weights and "weights" not in own:
        values["weights"] = str(path)
    taken = [f"model.{key}" for key in values if key not in own]
    if isinstance(own.get("experts"), dict) and values["experts"]:
        own["experts"] = values["experts"] | own["experts"]
    out = {**data, "model": {**values, **own, "preset": None}}
    taken += _take_tokenizer(out, given, path / TOKENIZER)
    return out, ModelFolder(path, model, tuple(taken))


def folder_at(key: str, named: Any, base: str) -> Path:
    """The folder that a key names. Raises ConfigError."""
    if not isinstance(named, str) or not named:
        raise ConfigError(f"{key} {named!r} is not a path", remedy="name a folder")
    return Path(join_base(base, expand_path(named)))


def _takes_weights(own: dict[str, Any]) -> bool:
    """Return False for `weights: false`. Leave only a path in `own`."""
    value = own.get("weights")
    if value in (None, True, False, "true", "false"):
        own.pop("weights", None)
    return value not in (False, "false")


def _as_task(
    data: dict[str, Any], given: Mapping[str, Any], path: Path, base: str, has_weights: bool
) -> tuple[dict[str, Any], ModelFolder]:
    """The run file's values with the folder's model as the task. Raises ConfigError."""
    task = data.get("task") or {}
    if not isinstance(task, dict) or task.get("name") not in (None, "", *TRANSFORMERS_TASKS):
        raise ConfigError(
            f"task and {CODE_KEY} both say what is trained", remedy="use one of the two"
        )
    if unused := sorted(data["model"]):
        raise ConfigError(
            f"model.{unused[0]} has no effect with {CODE_KEY} {TRANSFORMERS}", remedy="remove it"
        )
    chosen = {} if has_weights else {"pretrained": False}
    args = {**chosen, **(task.get("args") or {}), "folder": os.path.abspath(path)}
    for key in _SHARD_ARGUMENTS:
        if args.get(key):
            args[key] = os.path.abspath(folder_at(f"task.args.{key}", args[key], base))
    name = task.get("name") or (_shard_task(path) if "shards" in args else TRANSFORMERS_TASK)
    out = {key: value for key, value in data.items() if key != "model"}
    out["task"] = {**task, "name": name, "args": args}
    if name != TRANSFORMERS_TASK:
        return out, ModelFolder(path, None, ("task.name", "task.args.folder"))
    taken = _take_tokenizer(out, given, path / TOKENIZER)
    return out, ModelFolder(path, None, ("task.name", "task.args.folder", *taken))


def _shard_task(folder: Path) -> str:
    """The task that reads shards for a folder's model: of images if its config has a part for
    them, otherwise of sound. A file that cannot be read is refused later."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return SPEECH_TASK
    return VISION_TASK if isinstance(config, dict) and config.get("vision_config") else SPEECH_TASK


TOKENIZER_KEY = "data.tokenizer.path"


def _take_tokenizer(data: dict[str, Any], given: Mapping[str, Any], path: Path) -> list[str]:
    """Let `data.tokenizer` be this file, if it is there and the run file names none. Return the
    keys that were taken."""
    section: Any = {} if data.get("data") is None else data["data"]
    tokenizer: Any = section.get("tokenizer") if isinstance(section, dict) else ""
    tokenizer = {} if tokenizer is None else tokenizer
    is_named = not isinstance(tokenizer, dict) or tokenizer.get("path") is not None
    if is_named or TOKENIZER_KEY in given or not path.is_file():
        return []
    data["data"] = {**section, "tokenizer": {**tokenizer, "path": str(path)}}
    return [TOKENIZER_KEY]


def refuse_differences(folder: ModelFolder, config: RunConfig, place: Callable[[str], str]) -> None:
    """Raises ConfigError, one message with all keys, when the run file says another shape."""
    if folder.model is None:
        return
    differences = shape_differences(config.model, folder.model)
    refuse_other_values("model", differences, describe_differences, folder.path, KEY, place)


def refuse_other_values(
    section: str,
    differences: Differences,
    describe: Callable[[Differences, str], str],
    folder: Path,
    key: str,
    place: Callable[[str], str],
) -> None:
    """Raises ConfigError for values of a section that a folder, named by `key`, gives otherwise."""
    if differences:
        them = "it" if len(differences) == 1 else "them"
        raise ConfigError(
            describe(differences, str(folder)),
            where=place(f"{section}.{next(iter(differences))}"),
            remedy=f"remove {them} from the run file, for {key} gives {them}",
        )


def refuse_other_shape(
    model: ModelConfig, found: ModelConfig, folder: Path, where: str | None = None
) -> None:
    """Raises ModelFolderError if the model of a folder, `found`, has another shape. where: the
    folder's key."""
    if differences := shape_differences(model, found):
        raise ModelFolderError(
            describe_differences(differences, str(folder)),
            where=where,
            remedy="give the shape with model.from, or name weights of that shape",
        )


def describe_differences(differences: Differences, folder: str) -> str:
    """(ours, the folder's) by key of `model:`, in words."""
    parts = [
        f"model.{k} is {yaml_word(a)} here and {yaml_word(b)} there"
        for k, (a, b) in differences.items()
    ]
    return f"the model of {folder} has another shape: {', '.join(parts)}"


def as_overrides(differences: Differences) -> str:
    """The folder's values, to be typed on a command line."""
    return " ".join(shlex.quote(f"model.{k}={yaml_word(b)}") for k, (_, b) in differences.items())


def yaml_word(value: Any) -> str:
    """Return a value of a run file as YAML writes it on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {yaml_word(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml_word, value)) + "]"
    if isinstance(value, str) and not is_plain(value):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
