"""Experts on one device: what they compute, and what their router learns from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.model.experts import RoutedFeedForward
from holdfast.training.optimizers.optimizer import merge_buffers
from tests.support.models import config, lively, tokens

MIXTRAL = {"count": 4, "top_k": 2, "balance_loss": 0.3, "z_loss": 0.2}
DEEPSEEK = {
    "count": 4,
    "top_k": 3,
    "width": 24,
    "scores": "sigmoid",
    "scale": 1.5,
    "shared": 2,
    "choice_bias": True,
    "bias_rate": 0.01,
}


def layer_of(experts: dict[str, Any]) -> RoutedFeedForward:
    family = "dots1" if "choice_bias" in experts else "mixtral"
    model = lively(config(family=family, experts=experts), dtype=torch.float64)
    layer = model.layers[1].ffn
    assert isinstance(layer, RoutedFeedForward)
    return layer


def by_definition(layer: RoutedFeedForward, x: Tensor) -> tuple[Tensor, Tensor]:
    """Every expert computes every token, and the weights choose. -> (output, losses)"""
    flat, routing, config = x.flatten(0, 1), layer.router(x.flatten(0, 1)), layer.config
    out = torch.zeros_like(flat)
    for number in range(config.count):
        gate, up, down = (m.weight[number] for m in layer.experts.children())
        weight = (routing.weights * (routing.experts == number)).sum(-1, keepdim=True)
        out = out + weight * ((F.silu(flat @ gate.T) * (flat @ up.T)) @ down.T)
    parts = torch.bincount(routing.experts.flatten(), minlength=config.count).double() / (
        flat.shape[0] * config.top_k
    )
    loss = config.z_loss * routing.scores.exp().sum(-1).log().square().sum()
    loss = loss + config.balance_loss * config.count * (parts * routing.shares.sum(0)).sum()
    out = out.view_as(x)
    return out if layer.shared is None else out + layer.shared(x), loss


@pytest.mark.parametrize("experts", [MIXTRAL, DEEPSEEK])
def test_outputs_and_gradients_are_those_of_the_definition(experts: dict[str, Any]) -> None:
    layer = layer_of(experts)
    x = torch.randn(2, 9, 32, dtype=torch.float64, requires_grad=True)
    held = [x, *(p for name, p in layer.named_parameters() if not name.endswith("bias"))]
    out = layer(x)
    want, loss = by_definition(layer, x)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(out.square().sum(), held)
    expected = torch.autograd.grad(want.square().sum() + loss, held)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_choices_are_the_gradient_of_a_bias_which_moves_by_its_rate() -> None:
    layer = layer_of(DEEPSEEK)
    bias = layer.router.choice_bias
    assert bias is not None
    before, x = bias.detach().clone(), torch.randn(2, 8, 32, dtype=torch.float64)
    layer(x).sum().backward()
    counts, dropped = layer.take_counts()
    assert dropped == 0
    assert bias.grad is not None
    assert sum(counts) == 16 * 3
    assert bias.grad.tolist() == counts
    assert layer.take_counts() == ([], 0)
    merge_buffers([bias.detach()], [bias.grad], {0: "balance 0.01 12.0"}, 1)
    moved = [round(m, 9) for m in (bias.detach() - before).tolist()]
    assert moved == [0.01 * ((c < 12) - (c > 12)) for c in counts]


def test_an_expert_computes_the_first_choices_up_to_its_capacity() -> None:
    layer = layer_of({**MIXTRAL, "capacity": 0.5})
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    routing, room = layer.router(x[0]), math.ceil(0.5 * 40 * 2 / 4)
    seen = [0] * 4
    for token, experts in enumerate(routing.experts.tolist()):
        for choice, expert in enumerate(experts):
            seen[expert] += 1
            if seen[expert] > room:
                routing.weights[token, choice] = 0.0
    layer.router.forward = lambda _: routing  # type: ignore[method-assign]
    want, _ = by_definition(layer, x)
    out = layer(x.requires_grad_())
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    out.sum().backward()
    counts, dropped = layer.take_counts()
    assert dropped == sum(max(0, count - room) for count in counts) > 0
    with torch.no_grad():  # nothing is dropped where nothing is trained
        assert not torch.equal(layer_of({**MIXTRAL, "capacity": 0.5})(x), out)


def test_a_step_in_bfloat16_takes_the_grouped_product() -> None:
    model = lively(config(family="mixtral", experts=MIXTRAL, dim=32, ffn_dim=56))
    half = lively(
        config(family="mixtral", experts=MIXTRAL, dim=32, ffn_dim=56), dtype=torch.bfloat16
    )
    text = tokens(2, 20)
    want, got = model(text), half(text).float()
    assert (want - got).abs().max() < 0.1 * want.abs().max()
    half(text).float().square().sum().backward()
    assert all(p.grad is not None for p in half.parameters())
