"""Models of other people under faults: a net with batch normalisation, GPT-2 of transformers, an
encoder-decoder, and a net with dropout and tied weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sample_tasks
from tests.support.commands import apart

RUN_FILE = Path(str(sample_tasks.__file__)).with_suffix(".yaml")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Normed", "Gpt2", "EncoderDecoder", "Tied"])
def test_a_task_recovers_from_faults_with_equal_bits(name: str, tmp_path: Path) -> None:
    chosen = ["--faults", "8", "--layout", "two", "--no-network", "--out", str(tmp_path / "out")]
    found = apart("chaos", RUN_FILE, f"task.name=sample_tasks:{name}", *chosen, deadline=1200)
    assert found.code == 0, found.out + found.err
    assert "1 of 1 runs recovered" in found.err
