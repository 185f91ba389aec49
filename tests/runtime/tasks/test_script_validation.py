"""The validation of an own loop: what the script's function is given, and what it may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import TaskError
from holdfast.tasks.scripts.own_loop import Run
from holdfast.tasks.scripts.script_engine import ScriptPart, ScriptValidation, compute_losses

CPU = torch.device("cpu")


class Numbers:
    version = "1"

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((1,), float(index))}


def _begin(loss: Callable[[Any], Any], model: nn.Module | None = None) -> Run:
    run = Run(CPU, torch.float64, 0, "")
    model = model or nn.Linear(1, 1)
    run.keep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.validate(Numbers(), loss, every=5, samples=10)
    return run


def _computed(run: Run) -> tuple[list[float], list[ScriptPart]]:
    found = ScriptValidation(run, samples=10, microbatch_size=4, seed=1)
    parts = [found.part(index, 0, 1, CPU) for index in range(found.microbatches)]
    losses = compute_losses(run.kept.module, parts, lambda: None)
    return [float(loss) for loss in losses], parts


def test_each_microbatch_gives_a_sum_and_its_weight() -> None:
    modes: list[tuple[bool, bool, torch.dtype]] = []

    def loss(batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        modes.append((module.training, torch.is_grad_enabled(), batch["x"].dtype))
        return batch["x"].sum(), len(batch["x"])

    module = nn.Linear(1, 1)
    losses, parts = _computed(_begin(loss, module))
    assert losses == [0 + 2 + 4 + 6, 8 + 10 + 12 + 14, 16 + 18]  # evenly spread over 20
    assert [part.tokens for part in parts] == [4, 4, 2]
    assert set(modes) == {(False, False, torch.float64)}
    assert module.training


def test_random_numbers_of_a_microbatch_do_not_depend_on_what_came_before() -> None:
    run = _begin(lambda batch: (torch.rand(()), 1))
    (first, second, _), parts = _computed(run)
    torch.rand(7)
    assert float(parts[1].loss()) == second != first


def test_without_validation_there_are_no_microbatches() -> None:
    run = Run(CPU, torch.float32, 0, "")
    assert ScriptValidation(run, samples=10, microbatch_size=4, seed=1).microbatches == 0


def _touch(batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    _NORM.train()
    return _NORM(batch["x"]).sum(), 1


_NORM = nn.BatchNorm1d(1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda batch: batch["x"].sum(), "returned shape []"),
        (lambda batch: (batch["x"], 1), "return the loss as a sum"),
        (lambda batch: (batch["x"].sum(), -0.5), "its weight, a number from 0 on"),
        (_touch, "changes buffer num_batches_tracked"),
    ],
)
def test_a_function_that_returns_something_else_is_named(
    loss: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(TaskError) as raised:
        _computed(_begin(loss, _NORM))
    assert words in str(raised.value)
