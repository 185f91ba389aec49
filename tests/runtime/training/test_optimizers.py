"""Each optimizer equals its reference on a small model, and continues from its slots alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.core.sharding.parameters import Own, Parameter
from holdfast.training.optimizers.make_optimizer import make_optimizer
from holdfast.training.optimizers.optimizer import Optimizer

RATES = (0.01, 0.02, 0.015, 0.01, 0.005, 0.002)
DIVISOR = 3.0
Step = Callable[[float], None]


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 4)).to(dtype)


def _gradients(model: nn.Module, step: int) -> list[Tensor]:
    """Of a sum of squares over the inputs of a step."""
    inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(step)).to(
        next(model.parameters()).dtype
    )
    model.zero_grad()
    model(inputs).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _rows(model: nn.Module) -> list[Parameter]:
    named = model.named_parameters()
    return [Parameter(name, tuple(p.shape), p.dim() > 1, Own()) for name, p in named]


def _ours(model: nn.Module, config: OptimizerConfig) -> tuple[Optimizer, list[Tensor]]:
    parameters = [p.detach() for p in model.parameters()]
    sums = [torch.zeros_like(p) for p in parameters]
    return make_optimizer(config, _rows(model), parameters, sums), sums


def _step(model: nn.Module, made: Optimizer, sums: Sequence[Tensor], step: int) -> None:
    for total, gradient in zip(sums, _gradients(model, step), strict=True):
        total.copy_(gradient * DIVISOR)
    made.apply(step, RATES[step - 1], DIVISOR)


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _of_torch(*made: torch.optim.Optimizer) -> Step:
    def step(rate: float) -> None:
        for each in made:
            for group in each.param_groups:
                group["lr"] = rate
            each.step()

    return step


def _lion(model: nn.Module) -> Step:
    """Chen et al. (2023), algorithm 2, line by line."""
    momenta = [torch.zeros_like(p) for p in model.parameters()]

    @torch.no_grad()
    def step(rate: float) -> None:
        for p, m in zip(model.parameters(), momenta, strict=True):
            decay = 0.1 if p.dim() > 1 else 0.0
            assert p.grad is not None
            update = torch.sign(0.9 * m + 0.1 * p.grad)
            p.copy_(p - rate * decay * p - rate * update)
            m.copy_(0.99 * m + 0.01 * p.grad)

    return step


def _muon(model: nn.Module) -> Step:
    """The last matrix is the head, which takes AdamW."""
    hidden, head = model.get_parameter("0.weight"), model.get_parameter("3.weight")
    rest = [p for p in model.parameters() if p.dim() < 2]
    muon = torch.optim.Muon([hidden], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [head], "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return _of_torch(muon, torch.optim.AdamW(groups, betas=(0.9, 0.95)))


REFERENCES: dict[str, tuple[dict[str, Any], Callable[[nn.Module], Step]]] = {
    "adamw": ({}, lambda m: _of_torch(torch.optim.AdamW(_groups(m, 0.1), betas=(0.9, 0.95)))),
    "sgd": (
        {"nesterov": True, "weight_decay": 0.2},
        lambda m: _of_torch(torch.optim.SGD(_groups(m, 0.2), momentum=0.9, nesterov=True)),
    ),
    "lion": ({}, _lion),
    "adafactor": (
        {"weight_decay": 0.1},
        lambda m: _of_torch(torch.optim.Adafactor(_groups(m, 0.1))),
    ),
    "muon": ({"adamw_for": ["3.weight"]}, _muon),
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("name", REFERENCES)
def test_it_equals_the_reference(name: str, dtype: torch.dtype, tolerance: float) -> None:
    options, reference = REFERENCES[name]
    model, theirs = _model(dtype), _model(dtype)
    made, sums = _ours(model, OptimizerConfig.model_validate({"name": name, **options}))
    step = reference(theirs)
    start = [p.detach().clone() for p in model.parameters()]
    for number, rate in enumerate(RATES, start=1):
        _step(model, made, sums, number)
        _gradients(theirs, number)
        step(rate)
    for p, q, was in zip(model.parameters(), theirs.parameters(), start, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        assert not torch.equal(p, was)


@pytest.mark.parametrize("name", REFERENCES)
def test_it_continues_from_its_slots_bit_by_bit(name: str) -> None:
    config = OptimizerConfig.model_validate({"name": name, **REFERENCES[name][0]})
    model, again = _model(torch.float32), _model(torch.float32)
    made, sums = _ours(model, config)
    for step in range(1, 5):
        _step(model, made, sums, step)
    restored, restored_sums = _ours(again, config)
    again.load_state_dict(model.state_dict())
    for ours, saved in zip(restored.slots, made.slots, strict=True):
        for to, found in zip(ours.tensors, saved.tensors, strict=True):
            if to is not None and found is not None:
                to.copy_(found)
    for step in (5, 6):
        _step(model, made, sums, step)
        _step(again, restored, restored_sums, step)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_first_group_that_matches_decides() -> None:
    """A rate of zero leaves a parameter as it is; a frozen one decays in no group."""
    config = OptimizerConfig.model_validate(
        {
            "groups": [
                {"match": "0.*", "learning_rate_scale": 0.0},
                {"match": "*.bias", "weight_decay": 0.5, "learning_rate_scale": 0.5},
                {"match": "*", "weight_decay": 0.5},
            ]
        }
    )
    model, theirs = _model(torch.float64), _model(torch.float64)
    made, sums = _ours(model, config)
    groups: dict[float, list[Tensor]] = {0.0: [], 0.5: [], 1.0: []}
    for name, p in theirs.named_parameters():
        groups[0.0 if name.startswith("0.") else 0.5 if name.endswith("bias") else 1.0].append(p)
    adamw = [
        torch.optim.AdamW(groups[scale], betas=(0.9, 0.95), weight_decay=0.5) for scale in groups
    ]
    for number, rate in enumerate(RATES, start=1):
        _step(model, made, sums, number)
        _gradients(theirs, number)
        for scale, each in zip(groups, adamw, strict=True):
            each.param_groups[0]["lr"] = rate * scale
            each.step()
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.get_parameter("0.weight"), _model(torch.float64)[0].weight)
