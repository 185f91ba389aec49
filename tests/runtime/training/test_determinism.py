"""What a worker of an accelerator sets for equal bits, and the sentence for a kernel that it then
lacks. The settings hold for a CPU's operations too, so torch's refusal is the real one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.training.engine.precision import as_indeterminate, same_kernels_each_time


@pytest.fixture
def _strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    same_kernels_each_time(compiled=False)
    yield
    torch.set_deterministic_debug_mode("default")
    settings.fill_uninitialized_memory = filled


@pytest.mark.usefixtures("_strict")
def test_an_operation_without_a_fixed_order_is_refused_with_one_sentence() -> None:
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    assert torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError) as refused:
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2))
    found = as_indeterminate(refused.value)
    assert found is not None
    assert str(found) == (
        "train.deterministic: put_ gives other bits each time on this device; "
        "use train.deterministic=false, or another operation in the model"
    )


def test_other_errors_stay_what_they_are() -> None:
    assert as_indeterminate(RuntimeError("CUDA error: out of memory")) is None
    assert as_indeterminate(ValueError("it does not have a deterministic implementation")) is None
