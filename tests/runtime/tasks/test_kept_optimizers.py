"""The optimizers of a script: bit-equal with their own `step()`, also from slots alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from holdfast.config.sections.optimizer import OptimizerConfig, Slot
from holdfast.core.sharding.optimizer_state import optimizer_rows
from holdfast.core.sharding.parameters import Own, Parameter
from holdfast.core.sharding.state_table import TensorSpec
from holdfast.errors import TaskError
from holdfast.tasks.named.kept_optimizers import KeptOptimizers
from holdfast.training.optimizers.lion import Lion
from holdfast.training.optimizers.make_optimizer import UserParts, make_optimizer
from holdfast.training.optimizers.optimizer import Optimizer

STEPS, RESTART = 6, 3
Kept = torch.optim.Optimizer | list[torch.optim.Optimizer]
Make = Callable[[nn.Module], Kept]


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 4))


def _split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    every = list(model.parameters())
    return [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]


def _two(kind: Any, one: dict[str, Any], other: dict[str, Any], **options: Any) -> Make:
    """Two groups, with options of their own."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices, vectors = _split(model)
        made: torch.optim.Optimizer = kind(
            [{"params": matrices, **one}, {"params": vectors, **other}], **options
        )
        return made

    return make


def _one(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


def _muon_and_adamw(model: nn.Module) -> Kept:
    matrices, vectors = _split(model)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]


def _two_of_one_class(model: nn.Module) -> Kept:
    matrices, vectors = _split(model)
    return [torch.optim.SGD(matrices, 0.1, momentum=0.9), torch.optim.SGD(vectors, 0.2)]


class SignDescent(torch.optim.Optimizer):
    """A class of a user, with a state that it declares and an attribute of its own."""

    state_shapes: ClassVar = {"norm": "scalar"}

    def __init__(self, parameters: Any, lr: float, floor: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.floor = floor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None
                state = self.state[p]
                if not state:
                    state["norm"] = torch.zeros((), dtype=p.dtype)
                    state["mean"] = torch.zeros_like(p)
                state["norm"].mul_(0.5).add_(p.grad.norm())
                state["mean"].lerp_(p.grad, 0.1)
                scale = max(float(state["norm"]), self.floor)
                p.sub_(state["mean"].sign() * p.grad.abs(), alpha=group["lr"] / scale)


OPTIMIZERS: dict[str, Make] = {
    "fused AdamW": _one(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW by groups": _two(
        torch.optim.AdamW,
        {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.3},
        {"lr": 0.002, "weight_decay": 0.1},
    ),
    "AMSGrad": _one(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "Adam": _one(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "SGD": _one(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD without state": _one(torch.optim.SGD, lr=0.1),
    "SGD with momentum in a group": _two(torch.optim.SGD, {"momentum": 0.9}, {"lr": 0.05}, lr=0.1),
    "RMSprop": _one(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": _one(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "Lion": lambda model: Lion([{"params": list(model.parameters())}], (0.9, 0.99)),
    "Adafactor": _one(torch.optim.Adafactor, lr=0.01, weight_decay=0.1),
    "Muon and AdamW": _muon_and_adamw,
    "two of SGD": _two_of_one_class,
    "a user's": _one(SignDescent, lr=0.5, floor=1e-3),
}


def _gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in _model().parameters()]


def _kept(model: nn.Module, make: Make) -> KeptOptimizers:
    made = make(model)
    return KeptOptimizers(model, made if isinstance(made, list) else [made])


def _rows(model: nn.Module) -> list[Parameter]:
    return [Parameter(n, tuple(p.shape), p.dim() > 1, Own()) for n, p in model.named_parameters()]


def _config(kept: KeptOptimizers) -> OptimizerConfig:
    planned = kept.planned_values.items()
    return OptimizerConfig(**{key.rpartition(".")[2]: value for key, value in planned})


def _ours(
    model: nn.Module, make: Make, held: list[Tensor], sums: list[Tensor]
) -> tuple[KeptOptimizers, Optimizer]:
    kept = _kept(model, make)
    user = UserParts(rate=kept.rate, parts=kept.parts)
    rows = [replace(row, decay=kept.decays(row.name)) for row in _rows(model)]
    return kept, make_optimizer(_config(kept), rows, held, sums, user)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kept_optimizer_has_the_bits_of_its_own_step(name: str) -> None:
    theirs = _model()
    made = OPTIMIZERS[name](theirs)
    held = [p.detach().clone() for p in _model().parameters()]
    sums = [torch.zeros_like(p) for p in held]
    kept, ours = _ours(_model(), OPTIMIZERS[name], held, sums)
    for step in range(1, STEPS + 1):
        if step == RESTART:  # another process, which has read the slots from a checkpoint
            saved = [tensor for one in ours.slots for tensor in one.tensors if tensor is not None]
            kept, ours = _ours(_model(), OPTIMIZERS[name], held, sums)
            fresh = [tensor for one in ours.slots for tensor in one.tensors if tensor is not None]
            for to, value in zip(fresh, saved, strict=True):
                to.copy_(value)
        for p, total, gradient in zip(theirs.parameters(), sums, _gradients(step), strict=True):
            p.grad = gradient / 3.0
            total.copy_(gradient)
        for each in made if isinstance(made, list) else [made]:
            each.step()
        kept.use_options(step)
        ours.apply(step, kept.rate(step), 3.0)
        for p, own in zip(theirs.parameters(), held, strict=True):
            assert torch.equal(p, own), (name, step)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_of_state_has_what_the_worker_holds(name: str) -> None:
    model = _model()
    held = [p.detach().clone() for p in model.parameters()]
    kept, ours = _ours(model, OPTIMIZERS[name], held, [torch.zeros_like(p) for p in held])
    config = _config(kept)
    assert [Slot.of_text(slot.text) for slot in config.state_slots] == list(config.state_slots)
    parameters = tuple(TensorSpec(row.name, "float32", row.shape) for row in _rows(model))
    rows = [row for rows in optimizer_rows(config, parameters) for row in rows]
    named = [
        (f"optimizer.{one.slot.name}.{row.name}", tuple(tensor.shape))
        for one in ours.slots
        for row, tensor in zip(_rows(model), one.tensors, strict=True)
        if tensor is not None
    ]
    assert [(row.name, row.shape) for row in rows] == named
    assert len({row.name for row in rows}) == len(rows)


def test_the_options_of_a_step_are_those_at_its_apply() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = KeptOptimizers(model, [optimizer])
    held = [p.detach().clone() for p in model.parameters()]
    before = [p.clone() for p in held]
    sums = [torch.ones_like(p) for p in held]
    ours = make_optimizer(_config(kept), _rows(model), held, sums, UserParts(parts=kept.parts))
    kept.use_options(1)
    optimizer.param_groups[0]["lr"] = 0.5  # the script is in the next step already
    ours.apply(1, kept.rate(1), 1.0)
    assert all(torch.equal(own, p - 1.0) for own, p in zip(held, before, strict=True))


def test_ranks_with_unlike_options_of_any_group_have_unlike_digests() -> None:
    def digest(**of_vectors: object) -> int:
        groups = {"lr": 0.1, "betas": (0.9, 0.99), **of_vectors}
        kept = _kept(_model(), _two(torch.optim.AdamW, {"lr": 0.1}, groups))
        kept.use_options(1)
        return kept.digest(1)

    assert digest() == digest(lr=torch.tensor(0.1, dtype=torch.float64))
    assert len({digest(), digest(lr=0.2), digest(betas=(0.8, 0.99)), digest(foreach=False)}) == 4


def _in_two(model: nn.Module) -> Kept:
    return [torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_one(torch.optim.LBFGS), "torch.optim.LBFGS"),
        (_one(torch.optim.NAdam), "torch.optim.NAdam has state 'mu_product'"),
        (_one(torch.optim.ASGD), "torch.optim.ASGD has state"),
        (_one(torch.optim.SparseAdam), "torch.optim.SparseAdam"),
        (_one(torch.optim.SGD, fused=True), "the optimizer torch.optim.SGD has fused"),
        (_in_two, "parameter 0.weight is in two optimizers; give each"),
        (lambda model: [None], "run.keep() was given NoneType as an optimizer; give it"),
        (lambda model: torch.optim.AdamW([model[0].weight]), "parameter 0.bias is not in the"),
        (
            lambda model: torch.optim.AdamW([nn.Parameter(torch.ones(2))]),
            "that is not the module's",
        ),
    ],
)
def test_an_optimizer_that_a_run_cannot_keep_is_refused(make: Make, words: str) -> None:
    with pytest.raises(TaskError) as raised:
        _kept(_model(), make)
    assert words in str(raised.value)
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [("betas", (0.5, 0.9), "betas of AdamW has changed"), ("lr", 0.7, "now have several")],
)
def test_the_engines_adamw_takes_no_other_options_later(
    option: str, value: object, words: str
) -> None:
    model = _model()
    made = _two(torch.optim.AdamW, {"weight_decay": 0.1}, {"weight_decay": 0.0})(model)
    assert isinstance(made, torch.optim.Optimizer)
    kept = KeptOptimizers(model, [made])
    assert "train.optimizer.name" not in kept.planned_values
    made.param_groups[1][option] = value
    with pytest.raises(TaskError, match=words):
        kept.use_options(1)
