"""Carries out remedies: a case makes a fault, reads the remedy and does what it says.

An attempt is what a user does. It fails with a message. The case says how a user reads the remedy,
and the attempt is repeated until it succeeds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from holdfast.cli.plan_request import read_plan_request
from holdfast.errors import UserError
from holdfast.model.huggingface import export_folder
from tests.support.models import config, decoder
from tests.support.sample_tasks import Classifier

MAX_ROUNDS = 4


@dataclass
class Lab:
    """A case's files, and what its attempt takes."""

    folder: Path
    trained: Path  # folder of a finished run, to copy
    settings: dict[str, Any] = field(default_factory=dict)

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def path(self, name: str) -> str:
        return str(self.folder / name)


Mend = Callable[[Lab, re.Match[str]], object]


@dataclass(frozen=True)
class Case:
    module: str  # below src/holdfast; it composes the refusal
    begin: Callable[[Lab], object]
    attempt: Callable[[Lab], object]
    remedy: str  # a pattern of the complete remedy
    mend: Mend  # what a user does who reads it

    def __str__(self) -> str:
        return self.module


def carry_out(one: Case, lab: Lab) -> None:
    """Attempt, and follow the remedy until the attempt succeeds."""
    one.begin(lab)
    messages: list[str] = []
    while (message := _complaint(one, lab)) is not None:
        assert message not in messages, f"leads nowhere: {message}"
        messages.append(message)
        assert len(messages) < MAX_ROUNDS, "\n".join(messages)
        match = re.search(rf"{one.remedy}$", message)
        assert match, f"cannot be followed: {message}"
        one.mend(lab, match)
    assert messages, "this was no mistake"


def _complaint(one: Case, lab: Lab) -> str | None:
    try:
        one.attempt(lab)
    except UserError as error:
        return str(error)
    return None


# --- what users do --------------------------------------------------------------------------
def setting(key: str, read: Callable[[str], Any] = str) -> Mend:
    """Give the attempt the value that the remedy names."""

    def mend(lab: Lab, match: re.Match[str]) -> None:
        lab.settings[key] = read(match[1])

    return mend


def fixed(**settings: Any) -> Mend:
    """Give the attempt other values, as a person chooses them."""
    return lambda lab, match: lab.settings.update(settings)


# --- steps that several tables take ---------------------------------------------------------------
class Sized(Classifier):
    def __init__(self, width: int = 8) -> None:
        self.width = width

    def model(self) -> nn.Module:
        return nn.Linear(8, 5)


def values(**given: Any) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(given)


MODEL = config()


def export(folder: Path, **changes: Any) -> None:
    model = config(**changes)
    export_folder(folder, model, decoder(model).state_dict(), None)


RUN = "run"


def begin_run(lab: Lab) -> None:
    """Begin in a folder with a finished run; its checkpoints are of steps 3 and 6."""
    trained = lab.trained
    shutil.copytree(trained, lab.folder / RUN)
    shutil.copy(trained.parent / "run.yaml", lab.folder / "run.yaml")


PLANNED = "model: {preset: tiny, vocab_size: 512}\ntrain: {batch_size: 1, microbatch_size: 1}\n"


def begin_plan(cluster: str, *overrides: str) -> Callable[[Lab], None]:
    def write(lab: Lab) -> None:
        lab.write("run.yaml", PLANNED)
        lab.settings.update(cluster=cluster, overrides=list(overrides))

    return write


def make_plan(lab: Lab) -> None:
    overrides, cluster = lab.settings["overrides"], lab.settings["cluster"]
    read_plan_request(lab.folder / "run.yaml", overrides, cluster)


def calling(function: Callable[..., object]) -> Callable[[Lab], object]:
    return lambda lab: function(**lab.settings)
