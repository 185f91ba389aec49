"""The kinds of stages: their keys, what they take and make, and the command of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from holdfast.borders import Border
from holdfast.wire.child_command import module_command
from holdfast_platform.search.file import overrides_of

LEFT_CODE = 75  # EX_TEMPFAIL of sysexits.h: asked to leave, and the same command continues
NO_RETRY = (2, 4)  # refused, over budget: a person has to change something
COMMAND = "command"  # the kind whose words the file has
OWN = "out"  # `${out.NAME}`: a result of the stage itself; `${out}`: the folder of all


class Kind(StrEnum):
    """What a stage makes, and what a reference leads to."""

    DATASET = "dataset"
    RUN = "run"
    MODEL = "model"
    REPORT = "report"
    FILES = "files"


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline file. Paths in `values` are absolute, except within `command`."""

    name: str
    kind: str  # a key of KINDS
    where: str  # file and line
    values: Mapping[str, Any]  # its other keys
    outputs: Mapping[str, Kind]  # by name


@dataclass(frozen=True)
class StageKind:
    """A row of the table of kinds."""

    keys: Border
    needs: tuple[str, ...]  # keys that a stage must have
    makes: Mapping[str, Kind]  # by name; of a `command` its file says them
    takes: Mapping[str, tuple[Kind, ...]]  # key -> kinds of the reference that it must be
    words: Callable[[Stage], list[str]]  # the command, with references; of `holdfast`, without it
    continues: bool = False  # a command that was killed continues in its folder
    texts: tuple[str, ...] = ()  # keys whose values are options of the command
    files: tuple[str, ...] = ()  # keys with paths whose bytes are a part of the recipe


REFERENCE = re.compile(r"\$\{([^}]*)\}")
SET_TAKES = (
    (re.compile(r"data\.folder"), Kind.DATASET),
    (re.compile(r"(model|lora)\.from|model\.weights|lora\.(base|adapter)"), Kind.MODEL),
    (re.compile(r"objective\.reference\.model"), Kind.MODEL),
    (re.compile(r"(data\.sources|rollout\.(prompts|rewards))\.\d+\.path"), Kind.FILES),
    (re.compile(r"data\.tokenizer\.path"), Kind.FILES),
)
"""Keys of a run file that may be a reference, with its kind."""


def kinds_of_set_key(key: str) -> tuple[Kind, ...]:
    """Return the kinds of a reference that a key of a run file takes."""
    return tuple(kind for pattern, kind in SET_TAKES if pattern.fullmatch(key))


def overrides(stage: Stage) -> list[str]:
    """Return `key=value` for what the stage sets in its run file."""
    values = dict(stage.values.get("set") or {})
    if "from" in stage.values:
        values[stage.values["from_key"]] = stage.values["from"]
    return overrides_of(values)


def _prepare(stage: Stage) -> list[str]:
    own = "data.folder=${out.dataset}"
    return ["data", "prepare", stage.values["run"], *overrides(stage), own]


def _train(stage: Stage) -> list[str]:
    own = ("folder=${out.run}", f"cluster.left_exit_code={LEFT_CODE}")
    return ["train", stage.values["run"], *overrides(stage), *own]


def _export(stage: Stage) -> list[str]:
    return ["export", stage.values["run"], "--to", "${out.model}", *_options(stage)]


def _search(stage: Stage) -> list[str]:
    return ["search", stage.values["search"], "--folder", "${out}"]


def _evaluate(stage: Stage) -> list[str]:
    tasks = [word for task in stage.values["tasks"] for word in ("--tasks", str(task))]
    own = ("--to", "${out.report}")
    return ["evaluate", stage.values["model"], *tasks, *_options(stage), *own]


def _gate(stage: Stage) -> list[str]:
    places = (stage.values[key] for key in ("registry", "model", "rules"))
    return module_command("holdfast_platform.pipeline.gate", *places, "${out.report}")


def _options(stage: Stage) -> list[str]:
    out = []
    for key in KINDS[stage.kind].texts:
        if (value := stage.values.get(key)) is not None:
            out += [f"--{key.replace('_', '-')}", str(value)]
    return out


_EXPORT = ("step", "dtype", "format", "names", "quantize", "shard_size")


def _row(kind: str, keys: str, makes: Mapping[str, Kind], *rest: Any, **more: Any) -> StageKind:
    """Return a row of the table. keys: those that a stage must have; after `;`, optional ones."""
    needs, _, free = keys.partition(";")
    border = Border(f"{kind} of a pipeline", frozenset(("kind", *needs.split(), *free.split())))
    return StageKind(border, tuple(needs.split()), makes, *rest, **more)


_RUN, _MODEL, _REPORT = {"run": Kind.RUN}, {"model": Kind.MODEL}, {"report": Kind.REPORT}
_FROM = {"from": (Kind.MODEL,)}
_TRAINING: dict[str, Any] = {"continues": True, "files": ("run",)}
KINDS: Mapping[str, StageKind] = {
    "prepare": _row(
        "prepare", "run; set from", {"dataset": Kind.DATASET}, _FROM, _prepare, **_TRAINING
    ),
    "train": _row("train", "run; set from", _RUN, _FROM, _train, **_TRAINING),
    "tune": _row("tune", "run from; set", _RUN, _FROM, _train, **_TRAINING),
    "search": _row(
        "search", "search", _RUN | _REPORT, {}, _search, continues=True, files=("search",)
    ),
    "export": _row(
        "export", "run; " + " ".join(_EXPORT), _MODEL, {"run": (Kind.RUN,)}, _export, texts=_EXPORT
    ),
    "evaluate": _row(
        "evaluate",
        "model tasks; limit shots",
        _REPORT,
        {"model": (Kind.RUN, Kind.MODEL)},
        _evaluate,
        texts=("limit", "shots"),
        files=("tasks",),
    ),
    "gate": _row(
        "gate", "model registry rules", _REPORT, {"model": (Kind.MODEL,)}, _gate, files=("rules",)
    ),
    COMMAND: _row(
        COMMAND,
        "command outputs; inputs continues",
        {},
        {},
        lambda stage: list(stage.values["command"]),
        files=("inputs",),
    ),
}


def is_holdfast(stage: Stage) -> bool:
    """Return True if the command of a stage is one of `holdfast`."""
    return stage.kind not in (COMMAND, "gate")


def command_of(stage: Stage) -> list[str]:
    """Return the command of a stage, with references in it."""
    words = KINDS[stage.kind].words(stage)
    return module_command("holdfast.cli.main", *words) if is_holdfast(stage) else words


def continues(stage: Stage) -> bool:
    """Return True if a killed command of this stage continues in its folder."""
    return KINDS[stage.kind].continues or bool(stage.values.get("continues"))


def result_path(folder: Path, name: str, kind: Kind) -> Path:
    """Return where a stage puts a result."""
    return folder / (f"{name}.json" if kind is Kind.REPORT else name)
