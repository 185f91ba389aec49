"""Steps that several tables take."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from holdfast.cli.plan_request import read_plan_request
from holdfast.model.huggingface import export_folder
from tests.runtime.cli.remedies.lab import Lab
from tests.support.models import config, decoder
from tests.support.sample_tasks import Classifier


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
