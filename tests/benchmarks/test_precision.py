"""Training in two bytes follows fp32 within a band, on the quickstart's data and model."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.runtime.precision import PRECISIONS, QUANTIZED, STATES, curve_of, differences

STEPS = 80


@pytest.mark.slow
def test_bf16_and_fp16_stay_near_fp32(tmp_path: Path) -> None:
    curves = {name: curve_of(name, c, STEPS, tmp_path) for name, c in PRECISIONS.items()}
    reference = curves["fp32"].losses
    for precision in ("bf16", "fp16"):
        assert len(curves[precision].losses) == STEPS
        assert differences(curves[precision].losses, reference).max() < 0.01
    assert len(curves["fp16"].skipped) < STEPS / 10
    assert not curves["bf16"].skipped


@pytest.mark.slow
def test_short_state_stays_near_fp32(tmp_path: Path) -> None:
    """Within 1 % at equal tokens. The quickstart's own rate is so high that any rounding moves the
    loss by more."""
    curves = {
        name: curve_of(name, STATES[name], STEPS, tmp_path, rate=1e-3) for name in list(STATES)[:3]
    }
    reference = curves["fp32 state"]
    for name, most in (("bf16 state", 4.0), ("8bit state", 2.2)):
        assert differences(curves[name].losses, reference.losses).max() < 0.01
        assert curves[name].validation == pytest.approx(reference.validation, rel=0.01)
        assert curves[name].state_bytes <= most
    assert reference.state_bytes == 8.0


@pytest.mark.slow
def test_quantized_exchange_stays_near_fp32(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        exact, found = (
            curve_of(name, QUANTIZED[name], STEPS, tmp_path, rate=1e-3, seed=seed)
            for name in ("none", "both")
        )
        assert found.losses != exact.losses
        assert differences(found.losses, exact.losses).max() < 0.01
        assert found.validation == pytest.approx(exact.validation, rel=0.01)
