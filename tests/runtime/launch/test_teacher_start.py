"""Mistakes of a run whose teacher reads the student's completions are named before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import here
from tests.support.rollout_run import write_run_file, write_teacher


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("model.vocab_size=260",), "the teacher knows 257 tokens, and the student has 260"),
        (("data.sequence_length=300", "model.max_position=512"), "the teacher reads 256 tokens"),
        ((), "teacher and prompts have different tokenizers"),
    ],
)
def test_a_teacher_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...], says: str
) -> None:
    path, teacher = write_run_file(tmp_path), tmp_path / "teacher"
    write_teacher(teacher)
    if not settings:
        described = json.loads((teacher / "tokenizer.json").read_text())
        words = described["model"]["vocab"]
        words["a"], words["b"] = words["b"], words["a"]
        (teacher / "tokenizer.json").write_text(json.dumps(described))
    objective = f"objective={{kind: distill, reference: {{model: {teacher}}}}}"
    folder = f"folder={tmp_path / 'run'}"
    given = (objective, "rollout.rewards=[]", folder, *settings)
    here(capsys, "train", path, *given).refuses_last(says)
    assert not (tmp_path / "run").exists()
