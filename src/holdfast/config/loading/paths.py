"""What a path means: `~` is the home, a `$` is refused, and a relative path has one base.

A path of the run file starts at the run file's folder, so that the same file means the same from
any current folder. A path of the command line starts at the current folder, as in a shell.

`data.sources.*.path`, `data.tokenizer.path` and the paths of `data.stages` stay as they are
written, because they are a part of a run's identity. `place` of their sections says where they lie.
All other paths are replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping

from holdfast.config.loading.fields import as_path, field_at, value_at, with_value
from holdfast.config.run import RunConfig
from holdfast.config.sections.data import DataConfig
from holdfast.errors import ConfigError

MAX_NAME_BYTES = 255
"""Bytes of a file's name on the file systems in use."""

FREE_PATHS = (
    "folder",
    "data.folder",
    "data.cache",
    "data.chat.template_file",
    "checkpoint.bucket",
    "checkpoint.fallback",
    "checkpoint.seal",
    "cluster.notices_at",
    "cluster.notices_account",
    "cluster.prediction",
    "cluster.faults",
    "launch.ssh.hosts_file",
    "pause.file",
    "plan.cluster",
    "task.folder",
    "model.weights",
    "lora.base",
    "lora.adapter",
    "objective.reference.model",
    "rollout.server.folder",
    "train.memory.folder",
)
PLACES = (
    "data.tokenizer.path",
    "data.sources.*.path",
    "data.stages.*.texts.*.path",
    "data.stages.*.function",
    "rollout.prompts.*.path",
    "rollout.rewards.*.path",
    "evaluate.tasks.*.path",
)
_FILES_OF_THIS_MACHINE = (
    *("data.tokenizer.", "data.stages.", "rollout.prompts.", "rollout.rewards.", "evaluate.tasks."),
)
_FREE_LISTS = ("evaluate.tasks.",)
"""Lists whose paths are replaced, too."""


def expand_path(text: str) -> str:
    """Return a path with `~` filled in. Raises ConfigError, without a place, for a path that would
    make a folder of an odd name."""
    if "$" in text:
        filled = os.path.expanduser(os.path.expandvars(text))
        raise ConfigError(
            f"{text!r} has a $, and Holdfast fills in no variables",
            remedy=f"write {filled}" if "$" not in filled else "write the path in full",
        )
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ConfigError(
            f"{text!r} has a control character", remedy="write a path of visible characters"
        )
    if found := re.match(r"(s3|gs|az|file|https?)(:(?!//)|//)", text, re.IGNORECASE):
        scheme = "s3" if found[1].lower().startswith("http") else found[1].lower()
        raise ConfigError(
            f"{text!r} is an address without its ://",
            remedy=f"write {scheme}://... for an address, or ./{text} for a folder",
        )
    path = os.path.expanduser(text)
    if path.startswith("~"):
        user = path[1:].partition("/")[0]
        raise ConfigError(
            f"{text!r} starts at the home of {user!r}, and there is no such user",
            remedy=f"write the path in full, or ./{text} for a name that begins with ~",
        )
    for name in path.split("/"):
        if len(os.fsencode(name)) > MAX_NAME_BYTES:
            raise ConfigError(
                f"a name in {text[:40] + '...'!r} has more than {MAX_NAME_BYTES} bytes",
                remedy="use a shorter one",
            )
    return path


def join_base(base: str, path: str) -> str:
    """A path that starts at `base`, in its shortest spelling that means the same."""
    joined = os.path.join(base, path)
    if ".." not in path.split("/"):
        return joined
    short = os.path.normpath(joined)
    return short if os.path.realpath(short) == os.path.realpath(joined) else joined


def expand_address(text: str) -> str:
    """The address of a bucket; a file that one of its options names may begin with ~."""
    if "$" in text:
        expand_path(text)
    address, mark, options = text.partition("?")
    if address.startswith("file://~"):
        address = "file://" + expand_path(address.removeprefix("file://"))
    pairs = [pair.partition("=") for pair in options.split("&")]
    words = [k + eq + (expand_path(v) if v.startswith("~") else v) for k, eq, v in pairs]
    return address + mark + "&".join(words)


def locate_paths(
    config: RunConfig, base_of: Callable[[str], str], where: Callable[[str], str]
) -> tuple[RunConfig, dict[str, str]]:
    """Return the configuration with its free paths located, and the places of the other ones.

    `base_of(key)` is the folder that a relative path starts at; "" is the current folder.
    `where(key)` is the place of a refusal. Raises ConfigError, for all refused paths at once.
    """
    refused: list[str] = []
    found: dict[str, str] = {}
    for key, value in paths_of(config):
        try:
            found[key] = _located(config, key, value, base_of(key))
        except ConfigError as error:
            refused.append(f"{where(key)}: {key}: {error}")
    if refused:
        raise ConfigError("\n".join(refused))
    kept = [key for key in found if key not in FREE_PATHS and not key.startswith(_FREE_LISTS)]
    places = {key: found[key] for key in kept}
    for key in found.keys() - places.keys():
        config = with_value(config, as_path(key), found[key])
    return with_places(config, places), places


def with_places(config: RunConfig, places: Mapping[str, str]) -> RunConfig:
    """The configuration whose sources and tokenizer know where they lie."""
    data = config.data
    sources = tuple(
        source.at(places.get(f"data.sources.{i}.path")) for i, source in enumerate(data.sources)
    )
    tokenizer = data.tokenizer.at(places.get("data.tokenizer.path"))
    stages = tuple(
        stage.at(
            places.get(f"data.stages.{i}.function"),
            [places.get(f"data.stages.{i}.texts.{j}.path") for j in range(len(stage.texts))],
        )
        for i, stage in enumerate(data.stages)
    )
    located: DataConfig = data.model_copy(
        update={"sources": sources, "tokenizer": tokenizer, "stages": stages}
    )
    files = {
        key: tuple(
            entry.at(places.get(f"rollout.{key}.{i}.path"))
            for i, entry in enumerate(getattr(config.rollout, key))
        )
        for key in ("prompts", "rewards")
    }
    rollout = config.rollout.model_copy(update=files)
    return config.model_copy(update={"data": located, "rollout": rollout})


def paths_of(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys of a run's paths and addresses, with their values."""
    for key in FREE_PATHS:
        value, info = value_at(config, as_path(key)), field_at(as_path(key))
        assert info is not None, key
        if key == "cluster.notices_at" and config.cluster.notices != "file":
            continue  # the address of a service
        if key == "checkpoint.seal" and value == "env":
            continue
        if key == "plan.cluster" and config.plan.is_short_cluster:
            continue
        if value or info.default:  # an empty path means none if it is the default
            yield key, value
    if config.data.tokenizer.path is not None:
        yield "data.tokenizer.path", config.data.tokenizer.path
    for index, source in enumerate(config.data.sources):
        if source.path is not None:
            yield f"data.sources.{index}.path", source.path
    for index, stage in enumerate(config.data.stages):
        for number, texts in enumerate(stage.texts):
            yield f"data.stages.{index}.texts.{number}.path", texts.path
        if stage.function is not None:
            yield f"data.stages.{index}.function", stage.function
    for index, prompts in enumerate(config.rollout.prompts):
        yield f"rollout.prompts.{index}.path", prompts.path
    for index, reward in enumerate(config.rollout.rewards):
        if reward.path is not None:
            yield f"rollout.rewards.{index}.path", reward.path
    for index, task in enumerate(config.evaluate.tasks):
        yield f"evaluate.tasks.{index}.path", task.path


def _located(config: RunConfig, key: str, value: str, base: str) -> str:
    if not value.strip():
        raise ConfigError("the path is empty", remedy="name a file or a folder")
    if (
        key in ("folder", "checkpoint.bucket", "checkpoint.fallback", "data.folder")
        and "://" in value
    ):
        return expand_address(value)
    if key.startswith("data.sources.") and "://" in value:
        return expand_address(value)
    if key.startswith(_FILES_OF_THIS_MACHINE) and "://" in value:
        raise ConfigError(
            f"{value.partition('?')[0]} is an address, and this key takes a file of this machine",
            remedy="fetch the file first, and name its path here",
        )
    path = expand_path(value)
    if key == "folder":
        expand_path(path.replace("{name}", config.name))  # is a name too long?
    joined = join_base(base, path)
    if key.startswith("data.sources."):
        source = config.data.sources[int(key.split(".")[2])]
        if source.kind == "huggingface" and not os.path.isdir(joined):
            return path  # a name on the hub
    return joined
