"""Promise 1 for every pipeline schedule: the curve of one process in float64, as `test_parity.py`.

Embeddings are tied, so under a schedule whose stages go down and up again one rank has both ends.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.runtime.training.test_parity import body, reference
from tests.support.layouts import assert_all_state, case, model_flags, of_one_model
from tests.support.ranks import rank_values

QUICK = ["interleaved.pp2", "zbh1.pp2", "zbv.pp2-dp2"]
LONG = [
    f"{name}.{axes}"
    for name in ("interleaved", "zbh1", "zbv", "dualpipev")
    for axes in ("pp2", "pp2-dp2", "pp2-tp2", "pp2-zero1.2", "pp4", "pp2+one", "pp2-tp2-dp2")
]
LONG += ["full.zbh1.pp2", "selective.zbv.pp2-tp2", "files.zbv.pp2", "biased.dualpipev.pp2"]
LONG += ["full.interleaved.pp2", "gathered.zbv.pp2-dp2", "plain.zbv.pp2-tp2", "gemma.zbh1.pp2"]
LONG += ["interleaved.pp2-cp2", "zbv.ring.pp2-cp2", "experts.zbv.pp2", "experts.interleaved.pp2"]
CASES = [
    *((name, 3) for name in QUICK),
    *(pytest.param(name, 20, marks=pytest.mark.slow) for name in LONG),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_same_curve_under_each_schedule(
    name: str, steps: int, references: Path, tmp_path: Path
) -> None:
    (name,) = of_one_model(name)
    alone, whole = reference(model_flags(name), steps, references)
    of = case(name)
    values = rank_values(
        body, of.world_size, {"name": name, "steps": steps}, folder=tmp_path, deadline=240
    )
    for value in values:
        np.testing.assert_allclose(value["losses"], alone["losses"], rtol=1e-10, atol=0)
        np.testing.assert_allclose(value["norms"], alone["norms"], rtol=1e-10, atol=0)
    assert_all_state(whole, [tmp_path / f"{rank}.npz" for rank in range(of.world_size)], 1e-10)
