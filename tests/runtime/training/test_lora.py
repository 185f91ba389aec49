"""Adapters in the engine: the same curve on any layout, and a base that nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.run import RunConfig
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.errors import ModelFolderError
from holdfast.layout import Layout, place_layout
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.lora_task import LoraTask
from tests.support.adapters import tiny_adapters, write_base
from tests.support.layouts import engine_of
from tests.support.ranks import RankContext, rank_values, ranks
from tests.support.tiny_training import digest, feed, train

STEPS = 4


def _engine(
    config: RunConfig, rank: RankContext, name: str, replicas: int = 1, dp_shard: int = 1
) -> StepEngine:
    layout = Layout(dp_replicate=replicas, dp_shard=dp_shard)
    topology = place_layout(layout, 1, ("node",) * layout.world_size)
    return engine_of(config, topology, rank.rank, rank.store(name), task=LoraTask(config))


def _curve(rank: RankContext, base: str, dp_shard: int = 1, **changes: Any) -> list[Any]:
    """Losses in full precision, and the state's digest at the end."""
    config = tiny_adapters(Path(base), **changes)
    replicas = rank.world_size // dp_shard
    made = _engine(config, rank, "world", replicas, dp_shard)
    verdicts = train(made, STEPS)
    assert all(v.mean_norm > config.train.optimizer.clip_norm for v in verdicts)
    assert len({v.mean_loss for v in verdicts}) == STEPS
    found = [*(v.mean_loss for v in verdicts), digest(made)]
    made.close()
    return found


@pytest.fixture
def base(tmp_path: Path) -> str:
    folder = tmp_path / "base"
    tiny_adapters(folder)
    return str(folder)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bit_equal_for_1_and_3_replicas(base: str, precision: str) -> None:
    """Adapters are in float32, on a base in the precision."""
    arguments = {"base": base, "train__precision": precision}
    curves = {
        tuple(curve) for replicas in (1, 3) for curve in rank_values(_curve, replicas, arguments)
    }
    assert len(curves) == 1


def test_zero_gives_the_same_curve(base: str) -> None:
    exact = {"base": base, "train__precision": "float64"}
    alone = rank_values(_curve, 1, exact)[0]
    for zero in (1, 3):
        arguments = exact | {"dp_shard": 2, "layout__zero": zero}
        for curve in rank_values(_curve, 2, arguments):
            assert curve[:-1] == pytest.approx(alone[:-1], rel=1e-10)


@ranks(1)
def test_the_state_is_the_adapters_alone_and_the_base_stays(rank: RankContext) -> None:
    config = tiny_adapters(rank.folder / "base", lora__targets=["q_proj", "up_proj"])
    made = _engine(config, rank, "world")
    decoder = made.objective.decoder
    before = {name: value.clone() for name, value in decoder.named_buffers()}
    assert {name for name, _ in decoder.named_parameters()} == {
        f"layers.{layer}.{part}.lora_{matrix}"
        for layer in (0, 1)
        for part in ("attention.q", "ffn.up")
        for matrix in "AB"
    }
    train(made, 2)
    assert len(made.state()) == 3 * 8
    elements = sum(local.tensor.numel() for local in made.state())
    assert elements == 3 * 2 * (4 * (16 + 16) + 4 * (16 + 24))
    after = dict(decoder.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(not value.requires_grad and value.grad is None for value in after.values())


@ranks(1)
def test_dropout_belongs_to_the_microbatch(rank: RankContext) -> None:
    config = tiny_adapters(rank.folder / "base", lora__dropout=0.5)
    made = _engine(config, rank, "world")
    train_state(made)
    fed = feed(1, 0)

    def loss(key: int | None, *, gradients: bool = True) -> float:
        batch = TensorMicrobatch(fed.inputs, fed.targets, None, [], fed.tokens, key)
        with torch.set_grad_enabled(gradients):
            return float(made.objective(*made.executor.arguments(batch)))

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)
    assert loss(1, gradients=False) == loss(2, gradients=False)


@ranks(1)
def test_dropout_is_the_same_where_blocks_are_run_again(rank: RankContext) -> None:
    found = []
    for policy in ("none", "selective", "full"):
        base = rank.folder / "base"
        config = tiny_adapters(base, lora__dropout=0.5, train__recompute=policy)
        made = _engine(config, rank, policy)
        train_state(made)
        fed = feed(1, 0)
        loss = made.objective(fed.inputs, fed.targets, None, {}, 7)
        torch.rand(3)
        loss.backward()
        gradients = [p.grad.clone() for p in made.objective.parameters() if p.grad is not None]
        found.append([loss.detach(), *gradients])
        made.close()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def train_state(made: StepEngine) -> None:
    """Adapters that add something: B is zero before the first step."""
    for parameter in made.objective.parameters():
        with torch.no_grad():
            parameter.add_(0.1)


@ranks(1)
def test_another_base_is_refused(rank: RankContext) -> None:
    folder = rank.folder / "base"
    config = tiny_adapters(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(ModelFolderError, match=r"no model\.safetensors here"):
        _engine(config, rank, "first")
    write_base(folder, config.model, seed=4)
    with pytest.raises(ModelFolderError, match="not those that the run was begun with"):
        _engine(config, rank, "second")
