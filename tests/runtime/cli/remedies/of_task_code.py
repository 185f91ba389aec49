"""Remedies of messages about a task's code: wrong code, and the code that a remedy asks for."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from re import Match
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast
from holdfast.config.run import RunConfig
from holdfast.config.sections.lora import LoraConfig
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.tasks.child import answer
from holdfast.tasks.task.adapters import (
    frozen_values,
    refuse_other_values,
    trained_module,
    values_checksum,
)
from holdfast.tasks.task.ask import Question, describe_task
from holdfast.tasks.task.batches import open_samples
from holdfast.tasks.task.initial import first_values
from holdfast.tasks.task.module import known_flops, module_rows
from holdfast.tasks.task.own import OwnTask
from holdfast.tasks.task.task_export import Shaped, _exported
from holdfast.tasks.task.validation import open_validation
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.runtime.cli.remedies.of_others import Sized, values
from tests.support.own_tasks import config_of_task, first_loss
from tests.support.ranks import ROOT, RankContext
from tests.support.sample_tasks import CLASSES, WIDTH, Classifier, Rows


class Linear(Classifier):
    def model(self) -> nn.Module:
        return nn.Linear(WIDTH, CLASSES)


def task(**members: Any) -> type[Linear]:
    """A task that has these members in the place of those of `Linear`."""
    return type("Task", (Linear,), members)


def code(site: str, wrong: type, remedy: str, right: type, attempt: Any = None) -> Case:
    """A class that is written wrongly, and as the remedy makes a user write it."""
    begin, mend = values(task=wrong), fixed(task=right)
    return case(f"tasks/{site}", begin, attempt or first_step, remedy, mend)


# --- what a run does with a task ------------------------------------------------------------
def first_step(lab: Lab) -> None:
    first_loss(lab.settings["task"](), RankContext(0, 1, lab.folder))


def open_module(lab: Lab) -> None:
    """What a worker does with the module, in a replica of `dp_shard` ranks."""
    made = lab.settings["task"]()
    config = config_of_task(
        made,
        compile=lab.settings.get("compile", False),
        recompute=lab.settings.get("recompute", "none"),
        memory={"activations": lab.settings.get("activations", "device")},
    )
    groups = SimpleNamespace(degree=lambda axis: lab.settings.get(axis, 1))
    OwnTask(made, config).objective(cast(ProcessGroups, groups))


def open_data(lab: Lab) -> None:
    opened = open_samples(lab.settings["task"]())
    assert opened is not None
    assert len(opened[0][3]["x"]) == WIDTH


def open_validation_data(lab: Lab) -> None:
    open_validation(lab.settings["task"]())


def name_exported(lab: Lab) -> None:
    """The names under which an export writes the parameters."""
    shapes = {name: tuple(value.shape) for name, value in Linear().model().named_parameters()}
    weights = SimpleNamespace(names=list(shapes), shape=shapes.__getitem__)
    _exported(lab.settings["task"](), cast(Shaped, weights))


def count_flops(lab: Lab) -> None:
    known_flops(lab.settings["task"]())


def first_parameters(lab: Lab) -> None:
    made = lab.settings["task"]()
    frozen_values(made, first_values(made, 1))


def compare_frozen(lab: Lab) -> None:
    """A run with adapters compares the values that they are for."""
    made = lab.settings["task"]()
    refuse_other_values(frozen_values(made, first_values(made, 1)), lab.settings["checksum"])


def begin_frozen(lab: Lab) -> None:
    """The run was begun with the values of `Linear`; the class has changed since."""
    made = Linear()
    lab.settings["checksum"] = values_checksum(frozen_values(made, first_values(made, 1)))
    lab.settings["task"] = task(initial=lambda self, name, shape: holdfast.Normal(0.3))


def begin_shared_layer(lab: Lab) -> None:
    lab.settings.update(targets=("all-linear",))


def add_adapters(lab: Lab) -> None:
    made = task(model=lambda self: Twice())()
    module_rows(made, trained_module(made, LoraConfig(rank=2, targets=lab.settings["targets"])))


def ask_in_this_process(line: list[str], *, input: str, **_: Any) -> Any:
    """What the child does that imports a task."""
    found = answer(Question.from_json(json.loads(input)))
    Path(line[-1]).write_text(json.dumps(asdict(found)))
    return subprocess.CompletedProcess(line, 0, "", "")


def describe(lab: Lab) -> None:
    named = {"name": f"{Sized.__module__}:Sized", "args": lab.settings["arguments"]}
    config = RunConfig.model_validate({"task": named})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", ask_in_this_process)
        describe_task(config)


# --- wrong and right code -------------------------------------------------------------------
class Stream:
    """Samples without a number."""

    version = "stream"

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        rows = Rows(8)
        return ({"x": rows[n]["x"].numpy(), "y": rows[n]["y"]} for n in range(8))


def write_shards(lab: Lab, found: Match[str]) -> None:
    """Take the code of the page that the remedy names."""
    page = (ROOT / found[1]).read_text()
    block = next(one for one in page.split("```python\n") if "class Shards" in one)
    names: dict[str, Any] = {}
    exec(block.split("```")[0], names)
    folder = lab.folder / "shards"
    folder.mkdir()
    names["write_shards"](iter(Stream()), folder, size=4)
    lab.settings["task"] = task(data=lambda self: names["Shards"](folder, "1"))


class Pairs(Rows):
    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        return found["x"], found["y"]


class Augmented(Rows):
    def __getitem__(self, index: int) -> Mapping[str, Any]:
        found = super().__getitem__(index)
        return {**found, "x": found["x"] + torch.rand(WIDTH)}


class Twice(nn.Module):
    """A layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.again, self.head = self.first, nn.Linear(WIDTH, CLASSES)


def stack_pairs(self: Any, items: Any) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in items]), "y": torch.tensor([y for _, y in items])}


def entropy(model: Any, batch: Any, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction=reduction)


def noisy(model: Any, batch: Any) -> Tensor:
    return entropy(model, {**batch, "x": batch["x"] + torch.rand(WIDTH)})


def normed(self: Any) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))


def merge(self: Any, name: str) -> str:
    return "sum" if name.endswith("num_batches_tracked") else "mean"


OWN, OBJECTIVE, BATCHES = "own.py: ", "objective.py: ", "batches.py: "


def list_children(self: Any, model: nn.Module) -> list[nn.Module]:
    return list(model.children())


NORMED = task(model=normed, merge=merge)

CASES: list[Case] = [
    code(
        "module.py: flops() returned …",
        task(flops=lambda self: -2),
        r"return a number above 0, or None if it is not known",
        task(flops=lambda self: None),
        count_flops,
    ),
    code(
        "task_export.py: exported() returned …, as for another one | exported() returned …",
        task(exported=lambda self, name: "one"),
        r"return a name of its own for each parameter, or None to leave it out",
        task(exported=lambda self, name: f"net.{name}"),
        name_exported,
    ),
    code(
        "task_export.py: exported() returned None for each parameter",
        task(exported=lambda self, name: None),
        r"return a name for those that are to be written",
        task(exported=lambda self, name: f"net.{name}"),
        name_exported,
    ),
    code(
        BATCHES + "weight() returned …",
        task(weight=lambda self, batch: -1),
        r"return a number from 0 on: the samples or tokens of the batch, or the sum of their "
        r"weights",
        task(weight=lambda self, batch: len(batch["x"])),
    ),
    case(
        "tasks/" + BATCHES + "… (…) has no length and no index, so a step cannot ask for its "
        "samples",
        values(task=task(data=lambda self: Stream())),
        open_data,
        r"write it to shards first, and read them by number \((\S+)\)",
        write_shards,
    ),
    code(
        OBJECTIVE + "loss() returned …",
        task(loss=lambda self, model, batch: entropy(model, batch, "none")),
        r"return a scalar",
        task(loss=lambda self, model, batch: entropy(model, batch, "none").sum()),
    ),
    code(
        OBJECTIVE + "the loss depends on no parameter that is trained",
        task(loss=lambda self, model, batch: entropy(model, batch).detach()),
        r"compute it from the output of the module that loss\(\) is given",
        Linear,
    ),
    code(
        BATCHES + "a batch holds tensors alone, and its … is …",
        task(data=lambda self: Pairs(), collate=lambda *a: {**stack_pairs(*a), "names": ["a"]}),
        r"leave it out in collate\(\), or make a tensor of it",
        task(data=lambda self: Pairs(), collate=stack_pairs),
    ),
    code(
        OBJECTIVE + "the forward pass changes buffer …, so the state would depend on which rank "
        "computes what",
        task(model=normed),
        r"keep it unchanged, or let merge\(\) say how its changes are put together",
        NORMED,
    ),
    code(
        OWN + "the loss of a batch is …, and of the same samples twice …: it is a mean",
        task(loss=lambda self, model, batch: entropy(model, batch, "mean")),
        r"return the sum, and let weight\(\) return what to divide by",
        task(weight=lambda self, batch: len(batch["y"])),
    ),
    code(
        BATCHES + "the same samples are different tensors when they are read again",
        task(data=lambda self: Augmented()),
        r"draw random numbers where the loss is computed: their seed is set there",
        task(loss=lambda self, model, batch: noisy(model, batch)),
    ),
    case(
        "tasks/" + OWN + "buffer … is merged, and … … cuts what it is computed from",
        values(task=NORMED, dp_shard=2),
        open_module,
        r"use dp_shard (1)",
        lambda lab, found: lab.settings.update(dp_shard=int(found[1])),
    ),
    case(
        "tasks/" + OWN + "train.compile compiles the module's units, and it has none",
        values(task=Linear, compile=True),
        open_module,
        r"name some in units\(\), or use train\.compile=false",
        fixed(task=task(units=lambda self, model: [model])),
    ),
    case(
        "tasks/" + OWN + "train.memory.activations … moves what the module's units keep, and it "
        "has none",
        values(task=Linear, activations="host"),
        open_module,
        r"name some in units\(\), or use train\.memory\.activations=device",
        fixed(task=task(units=lambda self, model: [model])),
    ),
    case(
        "tasks/" + OWN + "train.recompute … runs the module's units again, and it has none",
        values(task=Linear, recompute="full"),
        open_module,
        r"name some in units\(\), or use train\.recompute=none",
        fixed(task=task(units=lambda self, model: [model])),
    ),
    case(
        "tasks/" + OWN + "train.recompute … runs a unit again, which would change its buffer … a "
        "second time",
        values(task=task(model=normed, merge=merge, units=list_children), recompute="full"),
        open_module,
        r"leave that unit out in units\(\), or use train\.recompute=none",
        fixed(recompute="none"),
    ),
    code(
        "task.py: a sample is a …: return a dict of tensors",
        task(data=lambda self: Pairs()),
        r"or write collate\(\), which an own loop gives as step\.batches\(\.\.\., collate=\)",
        task(data=lambda self: Pairs(), collate=stack_pairs),
    ),
    code(
        "validation.py: validation() has no samples",
        task(validation=lambda self: Rows(0)),
        r"return None for none",
        task(validation=lambda self: None),
        open_validation_data,
    ),
    code(
        "initial.py: weights() has …, which is no parameter of the module",
        task(weights=lambda self: {"tail.weight": torch.zeros(CLASSES, WIDTH)}),
        r"give the names of model\(\)\.named_parameters\(\)",
        task(weights=lambda self: {"weight": torch.zeros(CLASSES, WIDTH)}),
        first_parameters,
    ),
    case(
        "tasks/task/adapters.py: layer … is used under several names, so it cannot have an adapter",
        begin_shared_layer,
        add_adapters,
        r"leave it out of lora\.targets",
        fixed(targets=("head",)),
    ),
    case(
        "tasks/task/adapters.py: the frozen parameters of the task are not those that the run was "
        "begun with: their checksum is …, and it was …",
        begin_frozen,
        compare_frozen,
        r"let model\(\) and initial\(\) give the values that they gave then",
        fixed(task=Linear),
    ),
    case(
        "tasks/task/ask.py: (_ask)",
        values(arguments={"witdh": 8}),
        describe,
        r"write task\.args\.(\w+) \(its arguments: width\)",
        lambda lab, found: lab.settings.update(arguments={found[1]: 8}),
    ),
]
