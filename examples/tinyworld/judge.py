"""Greedy answers to held-out questions, judged by exact match per skill.

python examples/tinyworld/judge.py MODEL_FOLDER held_out.jsonl
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.config.sections.evaluate import EvaluationTask
from holdfast.evaluation.model import open_model
from holdfast.evaluation.tasks import evaluate_tasks

MAX_TOKENS = 40


@dataclass(frozen=True)
class Score:
    """Held-out questions of one skill."""

    skill: str
    right: int
    asked: int
    shown: tuple[str, str, str]  # question, answer and reply of the first one that is wrong

    @property
    def share(self) -> float:
        return self.right / self.asked


def judge(folder: Path, questions: Path) -> list[Score]:
    """Return the score of each skill of a model in Hugging Face form."""
    task = EvaluationTask(path=str(questions), max_tokens=MAX_TOKENS)
    model = open_model(folder, None, None, lambda line: None)
    (result,) = evaluate_tasks(model, [task], lambda line: None)
    right: dict[str, list[bool]] = {}
    shown: dict[str, tuple[str, str, str]] = {}
    rows = [json.loads(line) for line in questions.read_text("utf-8").splitlines()]
    for row, (value, _), reply in zip(rows, result.items, result.replies, strict=True):
        skill, prompt = str(row["skill"]), row["prompt"]
        right.setdefault(skill, []).append(value == 1)
        if value != 1 and skill not in shown:
            said = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
            shown[skill] = (said, str(row["answer"]), reply)
    return [
        Score(skill, sum(found), len(found), shown.get(skill, ("", "", "")))
        for skill, found in sorted(right.items())
    ]


def main() -> None:
    torch.set_num_threads(1)
    scores = judge(Path(sys.argv[1]), Path(sys.argv[2]))
    for score in scores:
        question, answer, reply = score.shown
        mistake = f"  {question} -> {reply!r}, not {answer!r}" if question else ""
        print(f"{score.skill:8} {score.right:3} of {score.asked}{mistake}")
    right, asked = sum(s.right for s in scores), sum(s.asked for s in scores)
    print(f"{'all':8} {right:3} of {asked} ({right / asked:.1%})")


if __name__ == "__main__":
    main()
