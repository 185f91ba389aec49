"""A user's task in a pipeline: what its stages compute is what one process computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast.config.loading.load import resolve_config
from holdfast.errors import ConfigError, PeerLostError, TaskError
from holdfast.plan.placing.balance import planned_stages
from holdfast.tasks.child import describe_task
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.module import meta_module
from holdfast.tasks.task.pipeline import TaskStage, stage_rows
from tests.support.layouts import assert_all_state, case, load_complete
from tests.support.marks import in_campaign
from tests.support.own_tasks import task_config, train_task
from tests.support.ranks import rank_values
from tests.support.sample_tasks import Stack


def _run(layout: str, to: Path, **given: Any) -> list[float]:
    """The losses of a run, in float64; the state's pieces are in files."""
    arguments = {"name": "Stack", "layout": layout, "to": f"{to}/{layout}", **given}
    found = rank_values(train_task, case(layout).world_size, arguments | {"precision": "float64"})
    assert len({tuple(curve[:-1]) for curve in found}) == 1
    return [float.fromhex(loss) for loss in found[0][:-1]]


@pytest.mark.parametrize(
    ("layout", "given"),
    [
        ("pp2", {}),
        in_campaign("pp4", {}),
        in_campaign("gpipe.pp2", {}),
        in_campaign("dp2-pp2", {}),
        in_campaign("pp2+one", {}),
        in_campaign("pp2", {"recompute": "full"}),
        in_campaign("pp2", {"args": {"dropout": 0.0, "shares": True}}),
        in_campaign("pp2-shard2", {"args": {"dropout": 0.0}}),
        in_campaign("zero1.2-pp2", {"args": {"dropout": 0.0}}),
    ],
)
def test_a_layout_agrees_with_one_process(
    layout: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """With dropout in the blocks and before them, and a tied output matrix."""
    losses = _run("one", tmp_path, **given)
    assert _run(layout, tmp_path, **given) == pytest.approx(losses, rel=1e-10)
    whole = load_complete(tmp_path / "one-0.npz")
    assert_all_state(whole, sorted(tmp_path.glob(f"{layout}-*.npz")), 1e-10)


def test_a_block_at_several_positions_runs_at_each() -> None:
    task = Stack(dropout=0.0, shares=True)
    model, batch = task.model(), {"tokens": torch.arange(18).view(2, 9) % 5}
    x = task.before(model, batch)
    for _ in range(4):
        x = task.block(model.get_submodule("encoder.blocks.0"), x, batch)
    loss = float(task.after(model, x, batch))
    assert float(task.loss(model, batch)) == pytest.approx(loss, rel=1e-6)
    assert float(TaskStage(task).run(model, batch, 1, None)) == pytest.approx(loss, rel=1e-6)
    assert "encoder.blocks.0.norm2.bias 0 1 2 3" in stage_rows(task, meta_module(task))[1]


def test_stages_follow_the_blocks() -> None:
    config = task_config("Stack", {"layers": 6})
    assert config.task.blocks == 6
    assert "embed.weight -1 6" in config.task.positions
    assert "encoder.blocks.5.norm2.bias 5" in config.task.positions
    assert planned_stages(config, (2, 1, 1, 1)) == (3, 3)


class OwnLoss(Stack):
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return 2 * super().loss(model, batch)


class TwoTensors(Stack):
    def before(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        return super().before(model, batch), batch["tokens"]


class BlockOfTwo(Stack):
    def block(self, block: nn.Module, x: Tensor, batch: Mapping[str, Tensor]) -> Any:
        return super().block(block, x, batch), 1


class KeepsMask(Stack):
    def before(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        self.mask = batch["tokens"][:, :-1] == 3
        return super().before(model, batch)


class CountsBlocks(Stack):
    at = 0

    def block(self, block: nn.Module, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        self.at += 1
        return super().block(block, x, batch) * self.at


class NormsFirst(Stack):
    def before(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = model.get_submodule("norm")(super().before(model, batch))
        return out


class Named(Stack):
    """The parts that a test names."""

    def __init__(self, *before: str) -> None:
        super().__init__()
        self.named = before

    def pipeline(self) -> holdfast.PipelineTask.Parts:
        return self.Parts("encoder.blocks", self.named, ["norm", "head"])


class NamedByText(Stack):
    def pipeline(self) -> holdfast.PipelineTask.Parts:
        return self.Parts("encoder.blocks", "embed", ["norm", "head"])


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Stack(forgets="norm"), r"norm\.weight is in no part .* name its module in"),
        (Named("embed", "places", "encoder"), "names encoder .* contains encoder.blocks, "),
        (
            Named("embed", "places", "encoder.blocks.0"),
            "names encoder.blocks.0 .* lies in encoder.blocks, .* next to the blocks",
        ),
        (NamedByText(), r"returned .*before='embed'.* lists of the names"),
        (TwoTensors(), r"before\(\) of TwoTensors returned a tuple of 2, .* return one"),
        (BlockOfTwo(), r"block\(\) of BlockOfTwo gave a tuple of 2 for block 0, .* got \[2, 8"),
        (KeepsMask(), r"before\(\) sets self.mask, .* compute it from the batch"),
        (CountsBlocks(), r"block\(\) sets self.at, .* compute it from the batch"),
        (NormsFirst(), r"before\(\) uses norm, .* in `after` alone.* name it in `before` too"),
        (OwnLoss(), r"OwnLoss has a loss\(\) of its own.* move loss\(\) into after\(\)"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_the_start(task: Stack, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        describe_task(task_config("Stack"), task)


def test_pipelines_that_a_task_does_not_have() -> None:
    text = "task: {name: my_task:Net, parameters: [w 6x4, v 4], "
    stages = "blocks: 2, positions: [w 0, v 1]}\n"
    for task, layout, words in (
        (
            "}\n",
            "pp: 2",
            "pp 2 shares out blocks, .* names none; use pp 1, .* write a PipelineTask",
        ),
        (stages, "pp: 3", "layout.pp 3 is more than task.blocks 2; use 2 or less"),
        (stages, "pp: 2, schedule: zbv", "zbv is for the built-in decoder.* use .*schedule 1f1b"),
        (
            f"sharding: [w 0 6], {stages}",
            "pp: 2, tp: 2",
            "pp 2 of a task does not work with layout.tp 2; use pp 1",
        ),
        (stages, "pp: 2, stages: [2, 1]", "holds 3 blocks, but task.blocks is 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve_config(f"{text}{task}layout: {{{layout}}}\n", "run.yaml")
    resolve_config(f"{text}{stages}layout: {{pp: 2}}\n", "run.yaml")


def test_a_lost_peer_is_no_mistake_in_the_users_code() -> None:
    with pytest.raises(PeerLostError, match="gone"), user_code("loss() failed"):
        raise PeerLostError("gone")
