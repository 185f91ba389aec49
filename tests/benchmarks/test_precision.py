"""Training in two bytes follows fp32 within a band, on the quickstart's data and model."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.precision import curve_of, differences

STEPS = 80


@pytest.mark.slow
def test_bf16_and_fp16_stay_near_fp32(tmp_path: Path) -> None:
    curves = {p: curve_of(p, STEPS, tmp_path) for p in ("fp32", "bf16", "fp16")}
    reference = curves["fp32"].losses
    for precision in ("bf16", "fp16"):
        assert len(curves[precision].losses) == STEPS
        assert differences(curves[precision].losses, reference).max() < 0.01
    assert len(curves["fp16"].skipped) < STEPS / 10
    assert not curves["bf16"].skipped
