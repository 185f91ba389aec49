"""Two equal trainings on one device, as `holdfast doctor` compares them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from holdfast.doctor.checks import check_equal_steps
from holdfast.training.measure.equal_steps import unequal


@pytest.mark.slow
def test_a_cpu_gives_the_same_bits() -> None:
    check = check_equal_steps("cpu")
    assert (check.state, check.found) == ("good", "two equal trainings on cpu have the same bits")


def test_a_device_that_is_not_there_fails_with_its_error() -> None:
    check = check_equal_steps("nothing:0")
    assert check.state == "fails"
    assert "a small training on nothing:0 failed" in check.found
    assert check.remedy


def test_one_other_bit_is_found() -> None:
    one = {"a": torch.zeros(3), "b": torch.ones(2)}
    assert unequal(one, {"a": torch.tensor([0.0, -0.0, 0.0]), "b": torch.ones(2)}) == ["a"]


def test_a_device_with_other_bits_each_time_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "python"
    command.write_text('#!/bin/sh\necho \'{"tensors": 3, "unequal": ["a in bf16"]}\'\n')
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    check = check_equal_steps("cuda:0")
    assert (check.state, check.found) == (
        "weak",
        "two equal trainings on cuda:0 differ in 1 tensor",
    )
