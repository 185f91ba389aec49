"""Rules for changes of which some are wrong: they are byzfl's, and a minority does not move them.

`HOLDFAST_BYZFL_PYTHON` names an interpreter with byzfl 0.0.11; without it the comparison is
skipped. byzfl's benchmarks import torchvision, which its rules do not need: a mock takes its place.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch

from holdfast.parallel.outer.rules import (
    centred_clipping,
    combine,
    geometric_median,
    krum,
    median,
    multi_krum,
    rda,
    trimmed_mean,
)

RULES = ("median", "trimmed_mean", "geometric_median", "krum", "multi_krum", "centred_clipping")
LEARNERS, SIZE = 8, 200

BYZFL = """
import json, sys
from unittest.mock import MagicMock
sys.modules["torchvision"] = MagicMock()
import numpy as np
from byzfl import CenteredClipping, GeometricMedian, Krum, Median, MultiKrum, TrMean
x = np.array(json.load(sys.stdin))
made = {
    "median": Median(), "trimmed_mean": TrMean(2), "krum": Krum(2), "multi_krum": MultiKrum(2),
    "geometric_median": GeometricMedian(0.1, 8), "centred_clipping": CenteredClipping(None, 4, 3.0),
}
print(json.dumps({name: rule(x).tolist() for name, rule in made.items()}))
"""


def _changes(seed: int, learners: int = LEARNERS) -> torch.Tensor:
    """Alike in part, as changes of learners are."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return common + torch.randn(learners, SIZE, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_rules_are_those_of_byzfl(seed: int) -> None:
    python = os.environ.get("HOLDFAST_BYZFL_PYTHON")
    if not python:
        pytest.skip("HOLDFAST_BYZFL_PYTHON names no interpreter with byzfl")
    x = _changes(seed)
    found = subprocess.run(
        [python, "-c", BYZFL], input=json.dumps(x.tolist()), text=True, capture_output=True
    )
    assert found.returncode == 0, found.stderr
    ours = {
        "median": median(x),
        "trimmed_mean": trimmed_mean(x, 2),
        "krum": krum(x, 2),
        "multi_krum": multi_krum(x, 2),
        "geometric_median": geometric_median(x, 8, 0.1),
        "centred_clipping": centred_clipping(x, torch.zeros_like(x[0]), 3.0, 4),
    }
    theirs = json.loads(found.stdout)
    assert ours.keys() == theirs.keys() == set(RULES)
    for name, value in ours.items():
        expected = torch.tensor(theirs[name], dtype=torch.float64)
        assert float((value - expected).abs().max()) < 1e-6, name


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30, -50.0])
def test_a_minority_moves_no_rule_far(rule: str, bad: float) -> None:
    honest = _changes(7).float()
    changes = honest.clone()
    changes[2], changes[5] = bad, bad
    far = honest.norm(dim=1).max()
    assert float((combine(rule, changes, 2) - honest.mean(0)).norm()) < far


@pytest.mark.parametrize("rule", RULES)
def test_equal_changes_are_left_as_they_are(rule: str) -> None:
    same = _changes(3)[:1].float().expand(LEARNERS, SIZE)
    assert torch.allclose(combine(rule, same, 1), same[0], atol=1e-5)


def test_rda_keeps_the_length_of_changes_in_unlike_directions() -> None:
    """Of orthogonal changes the mean is shorter by the root of their number."""
    x = torch.zeros(4, 10)
    x[range(4), range(4)] = torch.tensor([1.0, 1.0, 3.0, 3.0])
    x[:, 6:] = x[:, :4]
    found = rda(x, (6, 4), {1})
    assert torch.allclose(found[:6].norm(), torch.tensor(2.0))
    assert torch.allclose(found[:4] / found[:4].norm(), torch.full((4,), 0.5))
    assert torch.equal(found[6:], x[:, 6:].mean(0))
    assert bool(rda(torch.zeros(3, 5), (5,), ()).eq(0).all())


def test_without_a_finite_change_there_is_no_result() -> None:
    changes = torch.full((3, 5), torch.nan)
    assert all(bool(combine(rule, changes, 1).isnan().all()) for rule in RULES)
