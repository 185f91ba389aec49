"""The fused head and cross entropy against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from holdfast.training.engine.objective import (
    IGNORED_TARGET,
    chunk_tokens,
    linear_cross_entropy,
    loss_and_gradient,
)


def _case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(37, 8, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(29, 8, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, 29, (37,), generator=generator)
    targets[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("chunk", [None, 64, 10, 1])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_loss_and_gradients_are_those_of_cross_entropy(chunk: int | None, scale: float) -> None:
    hidden, weight, targets = _case(torch.float64)
    want = F.cross_entropy(hidden @ weight.T, targets, reduction="sum") * scale
    want_gradients = torch.autograd.grad(want, (hidden, weight))
    got = linear_cross_entropy(hidden, weight, targets, chunk) * scale
    got_gradients = torch.autograd.grad(got, (hidden, weight))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_gradients, want_gradients)


@pytest.mark.parametrize("chunk", [None, 10])
def test_bf16_takes_the_softmax_in_float32(chunk: int | None) -> None:
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
    cpu = torch.device("cpu")
    assert chunk_tokens(1024, cpu) * 1024 == 2**24
    assert chunk_tokens(128_256, cpu) * 128_256 <= 2**24
    assert chunk_tokens(10**9, cpu) == chunk_tokens(10**9, torch.device("cuda")) == 64
    assert chunk_tokens(128_256, torch.device("cuda")) == 2048
