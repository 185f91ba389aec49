"""The sharding table: every parameter has a row, and its cuts do not change what is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.core.sharding.sharding_table import gradient_is_partial, sharding_table, tp_part
from tests.support.topologies import tiny


def test_every_parameter_has_a_row_and_units_divide_its_dim() -> None:
    for model in (tiny(), tiny(tied_embeddings=True), tiny(qk_norm=False)):
        table = sharding_table(model)
        assert list(table) == [p.name for p in decoder_parameters(model)]
        for p in decoder_parameters(model):
            row = table[p.name]
            if row.tp_dim is None:
                assert (row.tp_units, len(p.shape)) == (1, 1)  # norms, and only they, are whole
                assert row.per_token == (".q_norm." not in p.name and ".k_norm." not in p.name)
            else:
                assert p.shape[row.tp_dim] % row.tp_units == 0
                assert not row.per_token


def test_heads_are_units() -> None:
    table = sharding_table(tiny())
    rows = {name.split(".", 2)[-1]: table[name] for name in table if name.startswith("layers.1.")}
    assert [rows[f"attention.{n}.weight"].tp_units for n in "qkvo"] == [4, 2, 2, 4]
    assert [rows[f"attention.{n}.weight"].tp_dim for n in "qkvo"] == [0, 0, 0, 1]
    assert [rows[f"ffn.{n}.weight"].tp_dim for n in ("gate", "up", "down")] == [0, 0, 1]
    assert table["embed.weight"].tp_units == table["head.weight"].tp_units == 7


def test_positions() -> None:
    table = sharding_table(tiny())
    assert table["embed.weight"].positions == (-1,)
    assert table["layers.2.ffn.up.weight"].positions == (2,)
    assert table["norm.weight"].positions == table["head.weight"].positions == (3,)
    assert sharding_table(tiny(tied_embeddings=True))["embed.weight"].positions == (-1, 3)


@pytest.mark.parametrize("units", range(1, 9))
@pytest.mark.parametrize("tp", range(1, 9))
def test_tp_parts(units: int, tp: int) -> None:
    parts = [tp_part(units, tp, index) for index in range(tp)]
    held = [tuple(range(start, start + count)) for start, count in parts]
    assert set().union(*held) == set(range(units))
    if units >= tp:
        theirs = [tuple(c.tolist()) for c in torch.arange(units).chunk(tp)]
        assert held == theirs + [()] * (tp - len(theirs))
    else:
        assert all(len(one) == 1 for one in held)
        assert held == sorted(held)
        if tp % units == 0:
            assert all(held.count((unit,)) == tp // units for unit in range(units))


def part(weight: Tensor, dim: int, units: int, tp: int, index: int) -> Tensor:
    size = weight.shape[dim] // units
    first, count = tp_part(units, tp, index)
    return weight.narrow(dim, first * size, count * size)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_cut_by_the_table_computes_the_same(tp: int, kv_heads: int) -> None:
    """Each rank's query heads find the key/value heads that they read in its own part."""
    model = tiny(kv_heads=kv_heads, dim=6)
    generator = torch.Generator().manual_seed(0)
    shapes = {p.name: p.shape for p in decoder_parameters(model)}
    weights = [
        torch.randn(
            shapes[f"layers.0.attention.{n}.weight"], generator=generator, dtype=torch.float64
        )
        for n in "qkvo"
    ]
    x = torch.randn(5, model.dim, generator=generator, dtype=torch.float64)
    rows = [sharding_table(model)[f"layers.0.attention.{n}.weight"] for n in "qkvo"]

    def attend(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        heads = [(x @ w.T).view(5, -1, model.head_size).transpose(0, 1) for w in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1) @ o.T

    summed = sum(
        attend(
            *(
                part(weight, row.tp_dim or 0, row.tp_units, tp, index)
                for weight, row in zip(weights, rows, strict=True)
            )
        )
        for index in range(tp)
    )
    assert isinstance(summed, Tensor)
    torch.testing.assert_close(summed, attend(*weights), rtol=1e-12, atol=1e-12)


def test_which_gradients_are_parts() -> None:
    table = sharding_table(tiny())

    def partial(name: str) -> tuple[bool, bool]:
        return (gradient_is_partial(table[name], False), gradient_is_partial(table[name], True))

    for name in ("norm", "layers.0.attention_norm", "layers.0.ffn_norm"):
        assert partial(f"{name}.weight") == (False, True)
    for name in ("k", "v", "q_norm", "k_norm"):
        assert partial(f"layers.0.attention.{name}.weight") == (True, True)
