"""A mistake in a task gives one sentence, as early as it can be seen."""

from __future__ import annotations

import json
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.task import TaskConfig
from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.run_table import row_of_text
from holdfast.errors import ConfigError, TaskError
from holdfast.launch.run.task_run import describe_in
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.tasks import child
from holdfast.tasks.task.ask import Question
from holdfast.tasks.task.batches import TaskBatches, open_samples
from holdfast.tasks.task.loading import load_task
from holdfast.tasks.task.module import TaskObjective, meta_module, module_rows, refuse_other_rows
from holdfast.tasks.task.own import OwnTask
from holdfast.tasks.task.task import Batch
from tests.support.own_tasks import first_loss, task_config, topology_of_layout
from tests.support.ranks import ROOT, RankContext, ranks
from tests.support.sample_tasks import WIDTH, Classifier, Convolution, Rows
from tests.support.tiny_training import CPU


class _Linear(Classifier):
    def model(self) -> nn.Module:
        return nn.Linear(WIDTH, 5)


class _With(_Linear):
    """A task with other methods, by name."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        vars(self).update(methods)


class _BatchNorm(Convolution):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 5))


class _WithStatistics(nn.Module):
    """A running mean by a function that does not count its change as a new version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(F.batch_norm(x, self.mean, self.variance, training=True))
        return out


def _mean(model: nn.Module, batch: Batch, dropout: float = 0.0, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(F.dropout(batch["x"], dropout)), batch["y"], reduction=reduction)


def _wrong(model: nn.Module, batch: Batch) -> Tensor:
    return _mean(model, {"x": batch["x"][:, 1:], "y": batch["y"]})


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (_With(loss=_mean), "it is a mean.*return the sum"),
        (_With(loss=partial(_mean, dropout=0.05)), "it is a mean"),
        (_With(loss=partial(_mean, reduction="none")), r"loss\(\) returned shape \[4\]"),
        (
            _With(loss=lambda *given: _mean(*given, reduction="sum").detach()),
            "depends on no parameter",
        ),
        (_With(loss=_wrong), r"loss\(\) failed for the first microbatch.*RuntimeError"),
        (_BatchNorm(), r"changes buffer 0\..*let merge\(\) say"),
        (_With(model=lambda: _WithStatistics()), "changes buffer mean"),
        (_With(weight=lambda batch: batch["x"].mean()), r"weight\(\) returned tensor\("),
    ],
)
def test_mistakes_of_a_loss(task: Any, words: str, tmp_path: Any) -> None:
    with pytest.raises(TaskError, match=words):
        first_loss(task, RankContext(0, 1, tmp_path))


def test_a_module_that_is_another_in_each_call() -> None:
    widths = count(5)
    task = _With(model=lambda: nn.Linear(WIDTH, next(widths)))
    first = module_rows(task, meta_module(task))
    with pytest.raises(TaskError, match=r"does not fit its table: row 1 is 'weight 6x12 decay'"):
        refuse_other_rows(first, module_rows(task, meta_module(task)))


class _Unequal(_Linear):
    def model(self) -> nn.Module:
        module = nn.Linear(WIDTH, 5)
        if not module.weight.is_meta:
            seed = int.from_bytes(os.urandom(4), "little")
            nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(seed))
        return module


@ranks(3)
def test_workers_that_begin_with_unequal_parameters(rank: RankContext) -> None:
    with pytest.raises(TaskError, match=r"workers 0 and 1 and 2 begin with other values of "):
        first_loss(_Unequal(), rank, "dp3")


@ranks(2)
def test_workers_with_unequal_shapes(rank: RankContext) -> None:
    config = task_config("Gru")
    planned = {"parameters": module_rows(_Sized(5), meta_module(_Sized(5)))}
    config = config.model_copy(update={"task": config.task.model_copy(update=planned)})
    groups = connect(
        ConnectSettings(rank.store(), CPU, seconds=120), topology_of_layout("dp2"), rank.rank
    )
    refused = OwnTask(_Sized(5 + rank.rank), config)
    if rank.rank == 0:
        refused.objective(groups)
    else:
        with pytest.raises(TaskError, match=r"row 1 is 'weight 6x12 decay', and the table has"):
            refused.objective(groups)
    groups.close()


class _Sized(_Linear):
    def __init__(self, classes: int) -> None:
        self.classes = classes

    def model(self) -> nn.Module:
        return nn.Linear(WIDTH, self.classes)


def _changed(name: str, value: Any) -> nn.Module:
    module = nn.Linear(WIDTH, 5)
    setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.LazyLinear(5), "parameter weight has no shape yet"),
        (
            lambda: nn.Linear(WIDTH, 1 + int(torch.ones(()).item())),
            "on the meta device, where no tensor has values: .*test_task_mistakes.py:",
        ),
        (lambda: _changed("shift", torch.zeros(5)), "shift is a plain tensor of the module"),
        (lambda: nn.Linear(WIDTH, 5).to(torch.complex64), "parameter weight is torch.complex64"),
        (
            lambda: _changed("temperature", nn.Parameter(torch.ones(()))),
            r"parameter temperature is a scalar; give it the shape \[1\]",
        ),
        (lambda: nn.Linear(WIDTH, 5).requires_grad_(False), "no parameter that is trained"),
    ],
)
def test_modules_that_cannot_be_trained(model: Any, words: str) -> None:
    task = _With(model=model)
    with (
        warnings.catch_warnings(action="ignore"),  # torch's, of complex modules
        pytest.raises(TaskError, match=words),
    ):
        module_rows(task, meta_module(task))


class _Growing(Rows):
    def __len__(self) -> int:
        self._samples += 1
        return self._samples


def test_a_dataset_whose_length_changes() -> None:
    config = task_config("Gru")
    task = _With(data=lambda: _Growing(config.task.samples - 1))
    with pytest.raises(TaskError, match="had 96 samples and now has 97"):
        TaskBatches(task, config)


class _Augmented(Rows):
    def __getitem__(self, index: int) -> Mapping[str, Any]:
        found = super().__getitem__(index)
        return {**found, "x": found["x"] + torch.rand(WIDTH)}


def test_a_file_that_a_task_does_not_find_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(config: Any) -> Any:
        raise FileNotFoundError(2, "No such file", "weights.pt")

    monkeypatch.setattr(child, "describe", missing)
    question = Question("describe", RunConfig().model_dump(mode="json"), [], [], 0)
    assert re.fullmatch(
        r"FileNotFoundError: \[Errno 2\] No such file: 'weights.pt' \(test_task_mistakes.py:\d+\)",
        child.answer(question).message,
    )


def test_what_a_loss_draws_depends_on_its_seed_alone() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        drawn = random.random() + np.random.rand() + float(torch.rand(()))
        found: Tensor = model(batch["x"]).sum() * drawn
        return found

    objective = TaskObjective(_With(loss=loss), nn.Linear(WIDTH, 5), torch.float32)
    same = [objective({"x": torch.ones(1, WIDTH)}, key).item() for key in (7, 8, 7)]
    assert same[0] == same[2] != same[1]


def test_a_dataset_that_draws_random_numbers(tmp_path: Any) -> None:
    with pytest.raises(TaskError, match="different tensors when they are read again"):
        first_loss(_With(data=_Augmented), RankContext(0, 1, tmp_path))


class _Odd(Rows):
    """Rows that a function changes."""

    def __init__(self, change: Callable[[dict[str, Any], int], Any]) -> None:
        super().__init__()
        self._change = change

    def __getitem__(self, index: int) -> Any:
        return self._change(dict(super().__getitem__(index)), index)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row, _: (row["x"], row["y"]), "a sample is a tuple: return a dict"),
        (
            lambda row, _: {"text": "one"},
            "'text' of the samples cannot be stacked: .*[^)]$",  # no line is the user's
        ),
        (lambda row, index: row if index % 2 else None, "a sample is a NoneType: return a dict"),
        (
            lambda row, index: row | {"z": 1} if index % 2 else row,
            r"collate\(\) failed for samples .*: samples have unlike names",
        ),
        (
            lambda row, _: json.loads("no json"),
            r"cannot be read: .* \(test_task_mistakes.py:\d+\)$",
        ),
    ],
)
def test_samples_that_are_no_tensors_by_name(change: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        TaskBatches(_With(data=lambda: _Odd(change)), task_config("Gru")).microbatch(1, 0)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([1], "returned list, no dict of tensors"),
        ({"x": torch.ones(1), "names": ["a"]}, "its 'names' is list; leave it out"),
        ({}, "a batch has no tensors"),
    ],
)
def test_batches_that_are_no_tensors_by_name(batch: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        TaskBatches(_With(collate=lambda items: batch), task_config("Gru")).microbatch(1, 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module_here:Net", "there is no module no_such_module_here"),
        ("tests.support.sample_tasks:Missing", "has no class Missing"),
        ("tests.support.sample_tasks:GruNet", "is no subclass of holdfast.Task"),
    ],
)
def test_names_that_lead_nowhere(name: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        load_task(TaskConfig(name=name))


class Sized(Classifier):
    def __init__(self, width: int, depth: int = 2) -> None:
        self.shape = width, depth


@pytest.mark.parametrize(
    ("args", "where", "words"),
    [
        ({"width": 3, "zzz": 3}, "task.args.zzz", "remove it (its arguments: width, depth)"),
        ({"wdth": 3}, "task.args.wdth", "write task.args.width (its arguments: width, depth)"),
        ({"depth": 3}, "task.args", "give task.args.width a value (its arguments: width, depth)"),
    ],
)
def test_unknown_and_missing_arguments(args: dict[str, int], where: str, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(TaskConfig(name=f"{__name__}:Sized", args=args))
    assert (caught.value.where, caught.value.remedy) == (where, words)


def test_a_wrong_argument_is_named_with_its_place_in_the_run_file() -> None:
    text = "task:\n  name: tests.support.sample_tasks:Gru\n  args:\n    width: 3\n"
    with pytest.raises(TaskError, match=r"run\.yaml:4: task\.args\.width: class Gru takes no"):
        describe_in(resolve_config(text, "run.yaml"), str(ROOT))


def test_tp_is_refused_once_it_is_known_that_there_is_no_sharding_table() -> None:
    text = "task: {name: my_task:Net, parameters: [w 4x4]}\nlayout: {tp: 2}\n"
    with pytest.raises(ConfigError, match=r"layout.tp 2 needs a sharding table.*:Net has"):
        resolve_config(text, "run.yaml")
    resolve_config("task: my_task:Net\nlayout: {tp: 2}\n", "run.yaml")


def test_the_short_form_and_the_long_form_are_the_same() -> None:
    short = resolve_config("task: my_task:Net\n", "run.yaml", ["task.args.hidden=8"])
    long = resolve_config("task: {name: my_task:Net, args: {hidden: 8}}\n", "run.yaml")
    assert short.config == long.config
    assert short.where("task.name") == "run.yaml:1"


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    version = "stream-1"

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        yield {"x": torch.zeros(WIDTH), "y": 0}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (_Stream(), r"\(_Stream\) has no length and no index.*shards"),
        ([{"x": 1}], "has no version"),
    ],
)
def test_data_that_a_step_cannot_ask_for(data: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        open_samples(_With(data=lambda: data))


def test_weights_of_another_module() -> None:
    config = task_config("Gru")
    task = OwnTask(_With(weights=lambda: {"tail.weight": torch.zeros(5, WIDTH)}), config)
    with pytest.raises(TaskError, match=r"weights\(\) has tail.weight, which is no parameter"):
        task.initial_values(1)(row_of_text(config.task.parameters[0]), whole_box("x", (24, 3)))
