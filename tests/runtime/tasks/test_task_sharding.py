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
from tests.support.layouts import assert_all_state, case, load_complete
from tests.support.marks import in_campaign
from tests.support.own_tasks import first_loss, train_task
from tests.support.ranks import RankContext, rank_values
from tests.support.sample_tasks import WIDTH, Gpt2, Heads, HeadsNet, Planned


def _run(layout: str, to: Path, **given: Any) -> list[float]:
    """The losses of a run, in float64; the state's pieces are in files."""
    arguments = {"name": "Heads", "layout": layout, "to": f"{to}/{layout}", **given}
    found = rank_values(train_task, case(layout).world_size, arguments | {"precision": "float64"})
    return [float.fromhex(loss) for loss in found[0][:-1]]


LAYOUTS = ("dp2-tp2", "tp4", "tp2+one", "shard2-tp2", "zero1.2-tp2", "zero2.2-tp2")


@pytest.mark.parametrize("layout", ["tp2", *map(in_campaign, LAYOUTS)])
def test_a_layout_agrees_with_one_process(layout: str, tmp_path: Path) -> None:
    losses = _run("one", tmp_path)
    assert _run(layout, tmp_path) == pytest.approx(losses, rel=1e-10)
    whole = load_complete(tmp_path / "one-0.npz")
    assert_all_state(whole, sorted(tmp_path.glob(f"{layout}-*.npz")), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Olmo", "Cohere"])
def test_a_plan_of_transformers_agrees_with_one_process(kind: str, tmp_path: Path) -> None:
    """To float32, in which these models compute norms and angles. Cohere's head is tied."""
    layouts = ("one", "tp2", "shard2-tp2")
    found = {at: _run(at, tmp_path, name="Planned", args={"kind": kind}) for at in layouts}
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


def _curves(layout: str, **given: Any) -> list[list[str]]:
    arguments = {"name": "Heads", "layout": layout, "steps": 4, **given}
    return rank_values(train_task, case(layout).world_size, arguments)


@pytest.mark.slow
def test_replicas_of_a_cut_module_change_no_bit() -> None:
    """With dropout inside the cut layers, where each rank draws numbers of its own."""
    curves = {}
    for layout in ("tp2", "dp2-tp2", "dp3-tp2"):
        curves[layout] = {tuple(curve) for curve in _curves(layout, args={"dropout": 0.2})}
        assert len({curve[:-1] for curve in curves[layout]}) == 1
    assert curves["tp2"] == curves["dp2-tp2"] == curves["dp3-tp2"]


@pytest.mark.slow
def test_mixed_precision_is_near() -> None:
    one, *others = (
        [float.fromhex(loss) for loss in _curves(layout, precision="bf16")[0][:-1]]
        for layout in ("one", "tp2", "shard2-tp2")
    )
    for found in others:
        assert found == pytest.approx(one, rel=0.02)


@pytest.mark.slow
def test_recomputation_draws_the_same_numbers_again() -> None:
    curves = set()
    for policy in ("none", "selective", "full"):
        curves.add(tuple(_curves("tp2", args={"dropout": 0.2}, recompute=policy)[0]))
    assert len(curves) == 1


def test_a_table_changes_nothing_without_tp() -> None:
    with_table, without = (
        _curves("one", args={"dropout": 0.2, "table": table}) for table in (True, False)
    )
    assert with_table == without


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
    assert rows[:3] == ("embed.weight 0 12", "blocks.0.q.weight 0 4", "blocks.0.q.bias 0 4")
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
