"""The decoder against formulas written out, against itself, and under torch's compiler."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.model.decoder import Attention, Decoder
from holdfast.model.documents import DocumentAttention, document_positions
from holdfast.model.rotary import RotaryTable, frequencies, rotate
from tests.support.marks import in_campaign
from tests.support.models import SCALING, SHAPES, config, decoder, lively, tokens


def attention_by_hand(layer: Attention, x: Tensor, theta: float) -> Tensor:
    """Head by head and query by query, with complex rotations.  x: [S, D] -> [S, D]"""
    length, head = x.shape[0], layer.head
    angles = torch.arange(length)[:, None] * theta ** (-torch.arange(0, head, 2) / head)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)

    def turned(y: Tensor) -> Tensor:
        pairs = torch.complex(y[:, : head // 2], y[:, head // 2 :]) * turn
        return torch.cat((pairs.real, pairs.imag), dim=1)

    q, k, v = layer.q(x).split(head, 1), layer.k(x).split(head, 1), layer.v(x).split(head, 1)
    mixed = []
    for index, query in enumerate(q):
        group = index * len(k) // len(q)
        key, value, rows = turned(k[group]), v[group], []
        for i, one in enumerate(turned(query)):
            rows.append((key[: i + 1] @ one / math.sqrt(head)).softmax(0) @ value[: i + 1])
        mixed.append(torch.stack(rows))
    return layer.o(torch.cat(mixed, dim=1))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_formula(kv_heads: int) -> None:
    model = lively(config(kv_heads=kv_heads), dtype=torch.float64)
    x = torch.randn(1, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    layer = model.layers[0].attention
    ours = layer(x, model.rotary(9, None, x), None)
    torch.testing.assert_close(ours[0], attention_by_hand(layer, x[0], 10_000.0))


def test_block_is_the_formula() -> None:
    model = lively(config(), dtype=torch.float64)
    block, x = model.layers[1], torch.randn(2, 5, 32, dtype=torch.float64)
    rotary = model.rotary(5, None, x)

    def norm(y: Tensor, gain: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    middle = x + block.attention(norm(x, block.attention_norm.weight), rotary, None)
    inner = norm(middle, block.ffn_norm.weight)
    gate, up = inner @ block.ffn.gate.weight.T, inner @ block.ffn.up.weight.T
    expected = middle + (gate * gate.sigmoid() * up) @ block.ffn.down.weight.T
    torch.testing.assert_close(block(x, rotary, None), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_do_not_see_the_future(shape: str) -> None:
    model, text = lively(config(**SHAPES[shape])), tokens(1, 24)
    changed = text.clone()
    changed[0, 15:] = (changed[0, 15:] + 1) % 96
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :15], after[:, :15], rtol=0, atol=1e-5)
    assert (before[:, 15:] - after[:, 15:]).abs().max() > 0.1


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 4))
def test_documents_in_a_row_are_alone(lengths: list[int], seed: int) -> None:
    """Packed documents get the logits that each gets by itself, bit for bit up to rounding."""
    model = lively(config(**SHAPES["llama_grouped_scaled"]), dtype=torch.float64)
    pieces = [tokens(1, n, seed=seed + i) for i, n in enumerate(lengths)]
    # Numbers of documents need not rise, nor be unique in a row unless they touch.
    documents = torch.cat([torch.full((1, n), (i * 5) % 7) for i, n in enumerate(lengths)], 1)
    packed = model(torch.cat(pieces, 1), documents)
    alone = torch.cat([model(piece) for piece in pieces], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)


def test_documents_differ_from_row_to_row() -> None:
    documents = torch.tensor([[4, 4, 4, 9, 9], [1, 2, 2, 2, 2]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    assert DocumentAttention().pack(documents).lengths == (3, 2, 1, 4)


def test_positions_matter_only_by_their_differences() -> None:
    model = lively(config(), dtype=torch.float64)
    text, own = tokens(2, 12), torch.arange(12).expand(2, 12)
    torch.testing.assert_close(model(text, positions=own), model(text))
    torch.testing.assert_close(model(text, positions=own + 100), model(text))
    assert (model(text, positions=own * 2) - model(text)).abs().max() > 0.1


def test_rotation_keeps_lengths_and_turns_back() -> None:
    model = config(head_dim=16)
    x = torch.randn(2, 30, 4, 16, dtype=torch.float64)
    cos, sin = RotaryTable(model)(30, None, x)
    turned = rotate(x, (cos, sin))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotate(turned, (cos, -sin)), x)
    torch.testing.assert_close(turned[:, 0], x[:, 0])


def test_scaling_slows_long_waves_only() -> None:
    plain, scaled = (
        frequencies(config(head_dim=64)),
        frequencies(config(head_dim=64, rope_scaling=SCALING)),
    )
    waves = 2 * math.pi / plain
    long, short = waves > 32 / 1.0, waves < 32 / 4.0
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    assert torch.equal(scaled[short], plain[short])
    between = ~long & ~short
    assert between.any()
    assert (scaled[between] <= plain[between]).all()
    assert (scaled[between] >= plain[between] / 8).all()


def test_table_knows_device_and_precision() -> None:
    table, half = RotaryTable(config()), torch.zeros(1, dtype=torch.bfloat16)
    assert table(4, None, half)[0].dtype == torch.float32
    wide = table(40, None, half.double())[0]
    assert wide.dtype == torch.float64
    torch.testing.assert_close(table(40, None, half)[0], wide.float(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_reach_every_parameter(shape: str) -> None:
    model = lively(config(**SHAPES[shape]))
    F.cross_entropy(model(tokens(2, 16)).flatten(0, 1), tokens(32), reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_gradients_are_derivatives() -> None:
    model = lively(config(layers=1, dim=8, heads=2, kv_heads=1, ffn_dim=6), dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]
    text, targets = tokens(1, 5), tokens(5, seed=1)

    def loss(*values: Tensor) -> Tensor:
        given_values = dict(zip(names, values, strict=True))
        logits = torch.func.functional_call(model, given_values, (text,))
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")

    inputs = tuple(p.detach().clone().requires_grad_() for p in model.parameters())
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


@pytest.mark.parametrize("shape", ["llama_grouped_scaled", "qwen3"])
def test_precisions_agree(shape: str) -> None:
    model, text = config(**SHAPES[shape]), tokens(2, 16)
    exact = lively(model, dtype=torch.float64)
    wanted = exact(text)
    single = exact.float()
    torch.testing.assert_close(single(text).double(), wanted, rtol=0, atol=1e-4)
    scale = wanted.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = single(text)
    assert (mixed.double() - wanted).abs().max() < 0.1 * scale
    half = single.to(torch.bfloat16)(text)
    assert half.dtype == torch.bfloat16
    assert (half.double() - wanted).abs().max() < 0.1 * scale


@pytest.mark.parametrize("shape", ["llama_grouped_scaled", in_campaign("qwen3_tied")])
def test_block_compiles_without_a_break(shape: str) -> None:
    model, text = lively(config(**SHAPES[shape])), tokens(2, 16)
    plain = model(text)
    for index, block in enumerate(model.layers):
        model.layers[index] = torch.compile(block, fullgraph=True, backend="aot_eager")
    compiled = model(text)
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)
    compiled.sum().backward()


def test_building_draws_no_random_numbers() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    Decoder(config())
    decoder(config())
    assert torch.equal(torch.rand(3), wanted)
