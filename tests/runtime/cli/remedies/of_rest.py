"""Remedies of messages about tasks, plans, trackers, rows and checkpoints: what is left."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from re import Match
from typing import Any

import torch
from torch import nn

from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.verify import check_dataset
from holdfast.layout import Replica, Topology
from holdfast.plan.placing.layouts import check_dealing_of_steps, layouts_of, replicas_of
from holdfast.report.trackers.cursor import CURSOR_FILE, Cursor
from holdfast.report.trackers.registry import load_tracker
from holdfast.tasks.task.batches import TaskBatches, open_samples
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.runtime.cli.remedies.of_datasets import begin_damaged, remake
from tests.runtime.cli.remedies.of_datasets_cases import FORM, OTHER, REMAKE, refused_row
from tests.runtime.cli.remedies.of_models import export
from tests.runtime.cli.remedies.of_others import Sized, check_layout, rows_of, values
from tests.runtime.cli.remedies.of_runs import (
    attempt,
    line,
    run_command,
)
from tests.runtime.data import test_chat_templates as chats
from tests.support.corpus import batches, data_config, make, text_folder, text_source


# --- tasks ----------------------------------------------------------------------------------
class Scalar(Sized):
    def model(self) -> nn.Module:
        module = super().model()
        module.register_parameter("gain", nn.Parameter(torch.tensor(1.0)))
        return module


class Shaped(Sized):
    def model(self) -> nn.Module:
        module = super().model()
        module.register_parameter("gain", nn.Parameter(torch.ones(1)))
        return module


class Merged(Sized):
    answer: Any = "max"

    def model(self) -> nn.Module:
        module = super().model()
        module.register_buffer("seen", torch.ones(3))
        return module

    def merge(self, name: str) -> Any:
        return self.answer


class MergedAsMean(Merged):
    answer = "mean"


class Samples:
    def __init__(self, count: int = 4, version: str = "1") -> None:
        self.count, self.version = count, version

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(8), "y": torch.tensor(1)}


def with_data(**given: Any) -> Any:
    """A task over some samples."""
    return type("Task", (Sized,), {"data": lambda self: Samples(**given)})()


def open_data(lab: Lab) -> None:
    open_samples(lab.settings["task"])


def open_batches(lab: Lab) -> None:
    config = RunConfig.model_validate({"task": {"name": "a:B"}})
    known = {"samples": 4, "data": "1"}
    task = config.task.model_copy(update=known)
    TaskBatches(lab.settings["task"], config.model_copy(update={"task": task}))


# --- data -----------------------------------------------------------------------------------
def begin_names(lab: Lab) -> None:
    text_folder(lab.folder / "in", files=6, words=60)
    lab.settings["folder"] = "out"
    make(named(lab, "a"))


def named(lab: Lab, name: str) -> Any:
    source = text_source(lab.folder / "in", name)
    return data_config(lab.folder / lab.settings["folder"], source)


def mix(lab: Lab) -> None:
    config = named(lab, "b")
    dataset = Dataset.open(config.folder) if lab.settings["folder"] == "out" else make(config)
    batches(dataset, config)


def begin_swapped(lab: Lab) -> None:
    """Tokens that changed in place: the sizes are right."""
    begin_damaged("shards/train-*.bin", lambda content: bytes(reversed(content)))(lab)


def check_made(lab: Lab) -> None:
    check_dataset(Dataset.open(lab.folder / lab.settings["folder"]))


def cursor(lab: Lab) -> None:
    Cursor.load(lab.folder)


# --- plans ----------------------------------------------------------------------------------
def replicas(lab: Lab) -> None:
    config = resolve_config(None, "command line", lab.settings["overrides"]).config
    replicas_of(config.layout)


def deal(lab: Lab) -> None:
    check_dealing_of_steps(resolve_config(None, "command line", lab.settings["overrides"]).config)


def plan_stages(lab: Lab) -> None:
    layouts_of(resolve_config(None, "command line", lab.settings["overrides"]).config)


def overrides(*words: str) -> Callable[[Lab], None]:
    return values(overrides=list(words))


def add(pattern: str) -> Callable[[Lab, Match[str]], None]:
    return lambda lab, found: lab.settings["overrides"].append(pattern.format(*found.groups()))


def staged(*stages: tuple[int, ...]) -> tuple[Replica, ...]:
    return tuple(
        Replica(n, (2 * n, 2 * n + 1), (2, 1, 1, 1), each) for n, each in enumerate(stages)
    )


def begin_other_shape(lab: Lab) -> None:
    export(lab.folder / "hf")
    lab.settings["overrides"] = [f"model.from={lab.folder}/hf", "model.dim=64"]


def resolve(lab: Lab) -> None:
    resolve_config(None, "command line", lab.settings["overrides"])


TASK, CHAT = "tasks/", "data/chat_"

CASES: list[Case] = [
    case(
        TASK + "module.py: parameter … …",
        values(task=Scalar),
        rows_of,
        r"give it the shape \[1\]",
        fixed(task=Shaped),
    ),
    case(
        TASK + "module.py: merge() returned … for …",
        values(task=Merged),
        rows_of,
        r'return "mean", "sum" or None',
        fixed(task=MergedAsMean),
    ),
    case(
        TASK + "batches.py: the data (…) has no version",
        values(task=with_data(version="")),
        open_data,
        r"give it an attribute `version`, a text that changes with its content",
        fixed(task=with_data()),
    ),
    case(
        TASK + "batches.py: the data had … samples and now has …",
        values(task=with_data(count=9)),
        open_batches,
        r"let the length of a dataset stay, or give new data a new version",
        fixed(task=with_data()),
    ),
    case(
        TASK + "batches.py: the data's version was … and is now …",
        values(task=with_data(version="2")),
        open_batches,
        r"go back to that data, or start over with --fresh.*",
        fixed(task=with_data()),
    ),
    case(
        "config/loading/model_from.py: (refuse_differences)",
        begin_other_shape,
        resolve,
        r"remove (?:it|them) from the run file, for model.from gives (?:it|them)",
        lambda lab, found: lab.settings["overrides"].pop(),
    ),
    case(
        "data/stream/batch.py: the dataset has the sources …, the run file names …",
        begin_names,
        mix,
        OTHER,
        fixed(folder="new"),
    ),
    case("data/stream/verify.py: (check_dataset)", begin_swapped, check_made, REMAKE, remake),
    refused_row(
        "'history' is no list of two texts each",
        {"instruction": "a", "output": "b", "history": [["c"]]},
        FORM,
        {"instruction": "a", "output": "b", "history": [["c", "d"]]},
        rows="instruction",
    ),
    case(
        CHAT + "rows.py: a message is from …, and the known ones are …",
        values(row={"conversations": [{"from": "me", "value": "a"}]}, rows="sharegpt"),
        lambda lab: chats.read(**lab.settings),
        r".*",
        fixed(
            row={
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                ]
            }
        ),
    ),
    case(
        "report/trackers/cursor.py: this is not the position of a tracker",
        lambda lab: lab.write(CURSOR_FILE, "{"),
        cursor,
        r"remove the file; the tracker then gets the entire run again",
        lambda lab, found: (lab.folder / CURSOR_FILE).unlink(),
    ),
    case(
        "report/trackers/registry.py: the tracker … is not a subclass of ….Tracker",
        values(name="collections:Counter"),
        lambda lab: load_tracker(lab.settings["name"]),
        r"derive the class from it",
        fixed(name="csv"),
    ),
    case(
        "plan/placing/layouts.py: the number of workers has not been planned",
        overrides("layout.workers=0"),
        replicas,
        r"use a multiple of (\d+)",
        add("layout.workers={0}"),
    ),
    case(
        "plan/memory/stage_memory.py: memory has no formula for this run's schedule, or for its "
        "experts, windows, masks of documents, norms, precision, …, or cp with "
        "train.recompute_keep attention",
        overrides(
            "model.layers=4",
            "layout.pp=2",
            "layout.workers=2",
            "layout.balance=memory",
            "train.batch_size=4",
            "train.microbatch_size=1",
            "data.attention=document",
        ),
        plan_stages,
        r"use layout.balance (time)",
        add("layout.balance={0}"),
    ),
    case(
        "plan/placing/layouts.py: ….pp … under … needs … microbatches a replica, but step … has "
        "…, of which replica … gets …",
        overrides(
            "model.layers=4",
            "layout.pp=4",
            "layout.workers=4",
            "train.batch_size=2",
            "train.microbatch_size=1",
            "layout.schedule=1f1b",
        ),
        deal,
        r"use ([\w.]+=\w+|layout\.schedule=gpipe).*|.*(layout\.schedule=gpipe).*",
        add("layout.schedule=gpipe"),
    ),
    case(
        "layout.py: the stages of replica … hold … blocks, those of replica … …",
        values(replicas=staged((1, 1), (2, 1)), nodes=("a",) * 4, generation=1),
        lambda lab: Topology(**lab.settings),
        r"give every replica all blocks of the model",
        fixed(replicas=staged((1, 1), (1, 1))),
    ),
    case(
        "parallel/axes/tensor_parallel.py: tp cannot cut a norm that spans all query heads "
        "(model.qk_norm_width all)",
        values(tp=2, model={"qk_norm": True, "qk_norm_width": "all"}),
        check_layout,
        r"use tp (1)",
        lambda lab, found: lab.settings.update(tp=int(found[1])),
    ),
    case(
        "cli/data.py: there is no prepared dataset",
        line("data inspect {root}/run.yaml data.folder={root}/none"),
        attempt,
        r"make it: (holdfast data prepare .*)",
        lambda lab, found: _prepare(found[1]),
    ),
]


def _prepare(command: str) -> None:
    run_command(shlex.split(command)[1:])
