"""The sharding table of a user's task: what tp computes is what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.config.loading.load import resolve_config
from holdfast.errors import ConfigError, PeerLostError, TaskError
from holdfast.parallel.axes.tensor_layers import TensorRegions
from holdfast.tasks.huggingface import tensor_plan
from holdfast.tasks.task.module import meta_module
from holdfast.tasks.task.sharding import sharding_rows
from tests.support.layouts import assert_all_state, case, load_pieces, pieces, save_pieces
from tests.support.marks import in_campaign
from tests.support.own_tasks import TaskTraining, first_loss, task_config
from tests.support.ranks import RankContext, rank_values
from tests.support.sample_tasks import WIDTH, Gpt2, Heads, HeadsNet, Planned
from tests.support.tiny_training import digest


def _trained(
    rank: RankContext, args: dict[str, Any], layout: str, to: str, name: str = "Heads"
) -> list[float]:
    config = task_config(name, args, precision="float64")
    made = TaskTraining(config, layout, rank.rank, rank.store())
    losses = [made.step(step) for step in range(1, 7)]
    save_pieces(f"{to}-{rank.rank}.npz", pieces(made.engine))
    made.engine.close()
    return losses


def _run(tmp_path: Path, layout: str) -> list[float]:
    arguments = {"args": {}, "layout": layout, "to": f"{tmp_path}/{layout}"}
    return rank_values(_trained, case(layout).world_size, arguments)[0]


LAYOUTS = ("dp2-tp2", "tp4", "tp2+one", "shard2-tp2", "zero1.2-tp2", "zero2.2-tp2")


@pytest.mark.parametrize("layout", ["tp2", *map(in_campaign, LAYOUTS)])
def test_a_layout_agrees_with_one_process(layout: str, tmp_path: Path) -> None:
    losses = _run(tmp_path, "one")
    assert _run(tmp_path, layout) == pytest.approx(losses, rel=1e-10)
    whole = {name: values for name, _, values in load_pieces(tmp_path / "one-0.npz")}
    assert_all_state(whole, sorted(tmp_path.glob(f"{layout}-*.npz")), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Olmo", "Cohere"])
def test_a_plan_of_transformers_agrees_with_one_process(kind: str, tmp_path: Path) -> None:
    """To float32, in which these models compute norms and angles. Cohere's head is tied."""
    found = {}
    for layout in ("one", "tp2", "shard2-tp2"):
        arguments = {"args": {"kind": kind}, "layout": layout, "to": f"{tmp_path}/{layout}"}
        count = case(layout).world_size
        found[layout] = rank_values(_trained, count, arguments | {"name": "Planned"})[0]
    assert found["tp2"] == pytest.approx(found["one"], rel=1e-6)
    assert found["shard2-tp2"] == pytest.approx(found["one"], rel=1e-6)


def test_plans_of_transformers_become_tables() -> None:
    """Of a family with a norm inside attention, and of two without a plan that can be followed."""
    rows = sharding_rows(Planned("Qwen3"), meta_module(Planned("Qwen3")))
    assert "model.layers.1.self_attn.k_proj.weight 0 2" in rows
    assert "model.layers.1.self_attn.q_norm.weight partial" in rows
    assert f"lm_head.weight 0 {WIDTH}" in rows
    assert Planned("Phi3").sharding() == {}
    assert tensor_plan(Gpt2().model()) == {}


def _curve(
    rank: RankContext, args: dict[str, Any], layout: str, recompute: str = "none"
) -> list[str]:
    config = task_config("Heads", args, recompute=recompute)
    made = TaskTraining(config, layout, rank.rank, rank.store())
    found = [made.step(step).hex() for step in range(1, 5)] + [digest(made.engine)]
    made.engine.close()
    return found


@pytest.mark.slow
def test_replicas_of_a_cut_module_change_no_bit() -> None:
    """With dropout inside the cut layers, where each rank draws numbers of its own."""
    curves = {}
    for layout in ("tp2", "dp2-tp2", "dp3-tp2"):
        arguments = {"args": {"dropout": 0.2}, "layout": layout}
        found = rank_values(_curve, case(layout).world_size, arguments)
        curves[layout] = {tuple(curve) for curve in found}
        assert len({curve[:-1] for curve in curves[layout]}) == 1
    assert curves["tp2"] == curves["dp2-tp2"] == curves["dp3-tp2"]


def _losses(rank: RankContext, layout: str) -> list[float]:
    config = task_config("Heads", precision="bf16")
    made = TaskTraining(config, layout, rank.rank, rank.store())
    losses = [made.step(step) for step in range(1, 7)]
    made.engine.close()
    return losses


@pytest.mark.slow
def test_mixed_precision_is_near() -> None:
    found = [
        rank_values(_losses, case(layout).world_size, {"layout": layout})[0]
        for layout in ("one", "tp2", "shard2-tp2")
    ]
    assert found[1] == pytest.approx(found[0], rel=0.02)
    assert found[2] == pytest.approx(found[0], rel=0.02)


@pytest.mark.slow
def test_recomputation_draws_the_same_numbers_again() -> None:
    curves = set()
    for policy in ("none", "selective", "full"):
        arguments = {"args": {"dropout": 0.2}, "layout": "tp2", "recompute": policy}
        curves.add(tuple(rank_values(_curve, 2, arguments)[0]))
    assert len(curves) == 1


def test_a_table_changes_nothing_without_tp() -> None:
    found = [
        rank_values(_curve, 1, {"args": {"dropout": 0.2, "table": table}, "layout": "one"})
        for table in (True, False)
    ]
    assert found[0] == found[1]


class Fixed(HeadsNet):
    """Views its heads by a fixed number: each rank takes its columns for all four heads."""

    def __init__(self) -> None:
        super().__init__(0.0)
        for block in self.blocks:
            block.norm = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for block in self.blocks:
            q, k, v = (
                layer(x).view(*x.shape[:2], 4, -1).transpose(1, 2)
                for layer in (block.q, block.k, block.v)
            )
            seen = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + block.o(seen.transpose(1, 2).flatten(2))
        out: Tensor = self.head(x)
        return out


class Mistaken(Heads):
    """leaves_out: a pattern that its table lacks. is_fixed: heads are viewed by a fixed number."""

    def __init__(self, leaves_out: str = "", is_fixed: bool = False) -> None:
        super().__init__()
        self.leaves_out, self.is_fixed = leaves_out, is_fixed

    def model(self) -> nn.Module:
        return Fixed() if self.is_fixed else super().model()

    def sharding(self) -> dict[str, str | tuple[str, int]]:
        return {name: cut for name, cut in super().sharding().items() if name != self.leaves_out}


def _said(rank: RankContext, wrong: dict[str, Any]) -> str:
    """The reason, on the first rank."""
    try:
        first_loss(Mistaken(**wrong), rank, "tp2")
    except (TaskError, PeerLostError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "wrong", [{"is_fixed": True}, in_campaign({"leaves_out": "blocks.*.norm"}), in_campaign({})]
)
def test_a_module_that_computes_something_else_is_refused(wrong: dict[str, Any]) -> None:
    said, _ = rank_values(_said, 2, {"wrong": wrong})
    assert ("with layout.tp 2 the gradient of " in said) == bool(wrong)


def test_degrees_that_do_not_fit_the_table() -> None:
    text = (
        "task: {name: my_task:Net, parameters: [w 6x4 decay, v 8x4], "
        "sharding: [w 0 6, v partial]}\n"
    )
    for layout, words in (
        ("tp: 4", "layout.tp 4 does not divide the 6 parts of w; use 3 or 6"),
        ("replicas: [{tp: 4}, {tp: 2}]", "tp 4 does not divide the 6 parts of w; use 3 or 6"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve_config(f"{text}layout: {{{layout}}}\n", "run.yaml")
    resolve_config(f"{text}layout: {{tp: 3}}\n", "run.yaml")
    with pytest.raises(ConfigError, match=r"use train\.compile false"):
        resolve_config(f"{text}layout: {{tp: 3}}\ntrain: {{compile: true}}\n", "run.yaml")
    small = "train: {optimizer: {state_dtype: 8bit}}\n"
    with pytest.raises(ConfigError, match=r"does not work with .*8bit; use state_dtype bf16"):
        resolve_config(f"{text}layout: {{tp: 3}}\n{small}", "run.yaml")
    with pytest.raises(ConfigError, match=r"sharding table.*and lora has none"):
        resolve_config(f"{text}layout: {{tp: 3}}\nlora: {{rank: 2}}\n", "run.yaml")


def test_the_rows_of_a_table() -> None:
    rows = sharding_rows(Heads(), meta_module(Heads()))
    assert rows[:3] == (
        "embed.weight 0 12",
        "blocks.0.q.weight 0 4",
        "blocks.0.q.bias 0 4",
    )
    assert "blocks.1.norm.weight partial" in rows
    assert "blocks.1.o.weight 1 4" in rows
    assert not [row for row in rows if row.startswith(("blocks.1.o.bias", "blocks.1.before"))]


def test_random_numbers_inside_are_the_ranks_own_and_come_again() -> None:
    """Also where a pass is computed again for its gradient."""

    class Alone:
        rank, size = 1, 1

        def copy(self, x: Tensor) -> Tensor:
            return x

        reduce = copy

    regions = TensorRegions(Alone())  # type: ignore[arg-type]

    def numbers() -> list[list[float]]:
        found = [torch.rand(2)]
        for _ in range(2):
            regions.enter(regions.enter(found[0]))
            found.append(torch.rand(2))
            regions.leave(found[0])
            found.append(torch.rand(2))
        return [values.tolist() for values in found]

    torch.manual_seed(5)
    first = numbers()
    torch.manual_seed(5)
    regions.enter(torch.zeros(1))  # left open, as by a recomputation that stops early
    torch.manual_seed(5)
    again = numbers()
    assert first == again
    assert len({tuple(values) for values in first}) == 5
    regions.collectives.rank = 0
    torch.manual_seed(5)
    other = numbers()
    assert [first[n] == other[n] for n in range(5)] == [True, False, True, False, True]
