"""The fused head and cross entropy against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from holdfast.core.devices import DEVICES
from holdfast.layout import Layout, place_layout
from holdfast.parallel.axes.process_groups import ProcessGroups, connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.torch_compat import memory_store
from holdfast.plan.memory.estimate import estimates_by_rank
from holdfast.training.engine.objective import (
    IGNORED_TARGET,
    linear_cross_entropy,
    loss_and_gradient,
)
from holdfast.training.engine.task import DecoderTask
from tests.support.layouts import config_of


def alone() -> ProcessGroups:
    settings = ConnectSettings(memory_store(), torch.device("cpu"))
    return connect(settings, place_layout(Layout(), 1, ("a",)), 0)


def _case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(37, 8, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(29, 8, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, 29, (37,), generator=generator)
    targets[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("chunk", ["auto", 64, 10, 1])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_loss_and_gradients_are_those_of_cross_entropy(chunk: int | str, scale: float) -> None:
    hidden, weight, targets = _case(torch.float64)
    want = F.cross_entropy(hidden @ weight.T, targets, reduction="sum") * scale
    want_gradients = torch.autograd.grad(want, (hidden, weight))
    got = linear_cross_entropy(hidden, weight, targets, chunk) * scale
    got_gradients = torch.autograd.grad(got, (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_gradients, want_gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", ["auto", 10])
def test_bf16_takes_the_softmax_in_float32(chunk: int | str) -> None:
    hidden, weight, targets = _case(torch.bfloat16)
    logits = F.linear(hidden, weight).float()
    want = F.cross_entropy(logits, targets, reduction="sum")
    got = linear_cross_entropy(hidden, weight, targets, chunk)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.float(), want, rtol=1e-6, atol=0)
    got_gradients = torch.autograd.grad(got, (hidden, weight))
    want_gradients = torch.autograd.grad(want, (hidden, weight))
    for a, b in zip(got_gradients, want_gradients, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_the_compiler_is_given_is_the_same_function(dtype: torch.dtype) -> None:
    hidden, weight, targets = _case(dtype)
    assert bool((targets == IGNORED_TARGET).any())
    compiled = torch.compile(loss_and_gradient, backend="aot_eager", fullgraph=True)
    want = linear_cross_entropy(hidden, weight, targets, 10)
    got = linear_cross_entropy(hidden, weight, targets, 10, compiled)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in (got, want)]
    near = 1e-12 if dtype == torch.float64 else 0.02
    torch.testing.assert_close(*gradients, rtol=near, atol=near)


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    hidden, weight, targets = _case(torch.float64)

    def never(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("a gradient was computed")

    with torch.no_grad():
        got = linear_cross_entropy(hidden, weight, targets, slope=never)
    assert not got.requires_grad
    torch.testing.assert_close(got, F.cross_entropy(hidden @ weight.T, targets, reduction="sum"))


def test_all_masked_is_zero_with_zero_gradients() -> None:
    hidden, weight, targets = _case(torch.float32)
    got = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert got.item() == 0.0
    assert all(not g.any() for g in torch.autograd.grad(got, (hidden, weight)))


def test_chunks_bound_the_logits_that_are_held() -> None:
    cpu, card = DEVICES["cpu"], DEVICES["cuda"]
    assert cpu.chunk_tokens(1024) * 1024 == 2**24
    assert cpu.chunk_tokens(128_256) * 128_256 <= 2**24
    assert cpu.chunk_tokens(10**9) == card.chunk_tokens(10**9) == 64
    assert card.chunk_tokens(128_256) == 2048
    assert card.chunk_tokens(128_256, 100) == 100


def test_the_run_file_says_the_length_of_a_chunk() -> None:
    """The estimate has less memory for shorter chunks, and the loss stays the same."""
    small, big = (
        config_of({"train__loss_chunk": chunk, "data__sequence_length": 64})
        for chunk in (64, "auto")
    )
    losses, logits = [], []
    for config in (small, big):
        with torch.device("meta"):
            objective = DecoderTask(config).objective(alone())
        objective.to_empty(device="cpu")
        objective.to(torch.float64)
        DecoderTask(config).fill_constants(objective, torch.device("cpu"))
        for parameter in objective.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        tokens = torch.arange(4 * 64).view(4, 64) % config.model.vocab_size
        losses.append(objective(tokens, tokens).item())
        logits.append(estimates_by_rank(config, place_layout(Layout(), 1, ("a",)))[0].logits)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert logits[0] < logits[1]
