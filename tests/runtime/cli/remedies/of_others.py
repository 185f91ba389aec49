"""Remedies of messages about traces, schedules, layouts, tasks and the public functions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from re import Match
from typing import Any

import torch
from torch import nn

from holdfast.config.sections.task import TaskConfig
from holdfast.layout import Replica, Topology
from holdfast.parallel.axes.tensor_parallel import _check_units
from holdfast.tasks.task.loading import load_task
from holdfast.tasks.task.module import meta_module, module_rows, refuse_other_rows
from holdfast_lab.chaos.schedule import read_trace
from holdfast_lab.traces.loading import load_trace
from tests.runtime.cli.remedies.lab import Lab, fixed
from tests.support.models import config
from tests.support.sample_tasks import Classifier

THIS = __name__


# --- values ---------------------------------------------------------------------------------
def values(**given: Any) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(given)


def calling(function: Callable[..., object]) -> Callable[[Lab], object]:
    return lambda lab: function(**lab.settings)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


# --- traces: the text of a file -------------------------------------------------------------
def trace(lab: Lab) -> None:
    load_trace(lab.settings["text"], "trace")


def text(content: str) -> Callable[[Lab], None]:
    return values(text=content)


def rewritten(content: str) -> Callable[[Lab, Match[str]], None]:
    """Write the file as the remedy says."""
    return fixed(text=content)


def as_shown(lab: Lab, found: Match[str]) -> None:
    """Write the file that the remedy shows."""
    lab.settings["text"] = found[1]


def faults(lab: Lab) -> None:
    read_trace(lab.settings["text"], "trace", "seed")


def fault(**row: Any) -> Callable[[Lab], None]:
    return text(json.dumps(row))


def change_fault(key: str) -> Callable[[Lab, Match[str]], None]:
    def mend(lab: Lab, found: Match[str]) -> None:
        row = json.loads(lab.settings["text"])
        lab.settings["text"] = json.dumps({**row, key: found[1]})

    return mend


def ticks(**value: Any) -> Callable[[Lab], None]:
    return text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [4, 4, 3], **value}))


OUTAGES = "System,nodenumz,Prob Started,Prob Fixed\n"


# --- tasks ----------------------------------------------------------------------------------
class Sized(Classifier):
    def __init__(self, width: int = 8) -> None:
        self.width = width

    def model(self) -> nn.Module:
        return nn.Linear(8, 5)


class Net:
    """No task."""


class PlainTensor(Sized):
    def model(self) -> nn.Module:
        module = super().model()
        module.scale = torch.ones(3)
        return module


class Buffered(Sized):
    def model(self) -> nn.Module:
        module = super().model()
        module.register_buffer("scale", torch.ones(3))
        return module


class Different(Sized):
    """Another module in each call."""

    made = 0

    def model(self) -> nn.Module:
        Different.made += 1
        return nn.Linear(8, 5 + Different.made)


def load(lab: Lab) -> None:
    settings = dict(lab.settings)
    load_task(TaskConfig(name=settings.pop("name"), **settings))


def rows_of(lab: Lab) -> None:
    task = lab.settings["task"]()
    rows = module_rows(task, meta_module(task))
    refuse_other_rows(rows, module_rows(task, meta_module(task)))


def name_of(lab: Lab, found: Match[str]) -> None:
    lab.settings["folder"] = lab.path("tasks")


def begin_elsewhere(lab: Lab) -> None:
    lab.write(
        "tasks/remedy_task.py",
        f"from {THIS} import Sized\n\n\nclass Net(Sized):\n    pass\n",
    )
    lab.settings["name"] = "remedy_task:Net"


def check_layout(lab: Lab) -> None:
    _check_units(config(**lab.settings.get("model", {})), *2 * (lab.settings["tp"],))


def topology(lab: Lab) -> None:
    Topology(generation=1, **lab.settings)


ONE = Replica(0, (0,))
