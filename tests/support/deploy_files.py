"""The files of `deploy/`, read as their programs would read them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from tests.support.ranks import ROOT

DEPLOY = ROOT / "deploy"


def container_instructions() -> list[tuple[str, str]]:
    """The instructions of the container file, with their continuation lines."""
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), rest) for word, rest in found]


def compose(environment: Mapping[str, str]) -> dict[str, Any]:
    """The Compose file with its variables filled in."""

    def fill(match: re.Match[str]) -> str:
        name, sign, word = match["name"], match["sign"], match["word"]
        if name in environment:
            return environment[name]
        assert sign == ":-", f"{name} is not set: {word}"
        return word

    pattern = re.compile(r"\$\{(?P<name>\w+)(?P<sign>:-|:\?)(?P<word>[^}]*)\}")
    found: dict[str, Any] = yaml.safe_load(pattern.sub(fill, (DEPLOY / "compose.yaml").read_text()))
    return found


def node_commands() -> dict[str, list[str]]:
    """The arguments of `holdfast` of each node of the Compose file."""
    services = compose({"BASE": "python@sha256:0"})["services"]
    return {name: [str(word) for word in each["command"]] for name, each in services.items()}


def unit_settings() -> dict[str, list[str]]:
    """Key -> values of the agent's unit, from all its sections."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "holdfast-agent@.service").read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def unit_command(run: str, node: str) -> list[str]:
    """The agent's command, as systemd would start it."""
    settings = unit_settings()
    given = [word for line in settings["Environment"] for word in shlex.split(line)]
    values = dict(word.split("=", 1) for word in given)
    (line,) = settings["ExecStart"]
    words: list[str] = []
    for word in line.split():
        if word.startswith("$") and not word.startswith("${"):
            words += values[word[1:]].split()  # an unbraced variable is split into words
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], word))
    return [word.replace("%i", run).replace("%H", node) for word in words]


def is_executable(name: str) -> bool:
    return any(os.access(os.path.join(folder, name), os.X_OK) for folder in os.get_exec_path())
