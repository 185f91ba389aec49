"""Adapters of a task's module: only they are trained, on a base that the task gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.config.run import RunConfig
from holdfast.config.sections.lora import LoraConfig
from holdfast.errors import ConfigError, TaskError
from holdfast.model.lora import LoraLinear
from holdfast.tasks.child import describe
from holdfast.tasks.task.initial import trained_module
from holdfast.tasks.task.module import own_values
from tests.support.layouts import case
from tests.support.marks import in_campaign
from tests.support.own_tasks import TaskTraining, task_config
from tests.support.ranks import RankContext, rank_values, ranks
from tests.support.sample_tasks import Gru, Tied
from tests.support.tiny_training import digest


def _config(name: str, args: dict[str, Any] | None = None, **lora: Any) -> RunConfig:
    config = task_config(name, args)
    return _planned(config, {"rank": 2, **lora})


def _planned(config: RunConfig, lora: dict[str, Any]) -> RunConfig:
    asked = config.model_copy(update={"lora": LoraConfig.model_validate(lora)})
    found = describe(asked)
    task = config.task.model_copy(update={"parameters": tuple(found["parameters"])})
    given = asked.lora.model_copy(update={"base_checksum": found["base_checksum"]})
    return asked.model_copy(update={"task": task, "lora": given})


def _curve(rank: RankContext, name: str, layout: str, args: dict[str, Any]) -> list[str]:
    made = TaskTraining(_config(name, args, dropout=0.1), layout, rank.rank, rank.store())
    losses = [made.step(step) for step in range(1, 7)]
    assert len(set(losses)) == 6
    found = [loss.hex() for loss in losses] + [digest(made.engine)]
    made.engine.close()
    return found


@pytest.mark.parametrize("name", [in_campaign("Gru"), "EncoderDecoder"])
def test_replicas_change_no_bit(name: str) -> None:
    curves: set[tuple[str, ...]] = set()
    for layout in ("one", "dp2"):
        arguments = {"name": name, "layout": layout, "args": {}}
        for curve in rank_values(_curve, case(layout).world_size, arguments):
            curves.add(tuple(curve))
    assert len(curves) == 1


@ranks(1)
def test_only_adapters_are_state_and_the_base_is_the_task_s_own(rank: RankContext) -> None:
    config = _config("Gru")
    made = TaskTraining(config, "one", rank.rank, rank.store())
    assert [row.split(" ")[0] for row in config.task.parameters] == ["head.lora_A", "head.lora_B"]
    model = made.engine.objective.model
    own = own_values(Gru(), config.seed).parameters
    for step in (1, 2):
        made.step(step)
    assert {name.split(".", 1)[1] for name in made.state() if name.startswith("model.")} == {
        "head.lora_A",
        "head.lora_B",
    }
    held = dict(model.named_buffers())
    assert held.keys() == own.keys()
    assert all(torch.equal(held[name], own[name]) for name in own)
    x, head = torch.ones(1, model.head.in_features), model.head
    expected = x @ own["head.weight"].T + own["head.bias"]
    expected = expected + x @ head.lora_A.T @ head.lora_B.T * config.lora.scale
    torch.testing.assert_close(head(x), expected)


def test_tied_layers_are_frozen_together_and_linear_layers_alone_get_adapters() -> None:
    module = trained_module(Tied(), LoraConfig(rank=2))
    adapted = {name for name, part in module.named_modules() if isinstance(part, LoraLinear)}
    plain = {name for name, part in Tied().model().named_modules() if type(part) is nn.Linear}
    assert adapted == plain
    assert all(name.rpartition(".")[2].startswith("lora_") for name, _ in module.named_parameters())


def test_targets_that_mean_no_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets query: no linear layer") as refused:
        _config("Gru", targets=["query"])
    assert "use all-linear, or some of head" in str(refused.value)


@ranks(1)
def test_other_frozen_values_are_refused(rank: RankContext) -> None:
    config = _config("Gru")
    lora = config.lora.model_copy(update={"base_checksum": "0" * 32})
    with pytest.raises(TaskError, match="not those that the run was begun with"):
        TaskTraining(config.model_copy(update={"lora": lora}), "one", rank.rank, rank.store())
