"""The generator of tinyworld: its texts' probabilities add up to one, and nothing leaks."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "tinyworld"))

import world


def test_the_bits_of_a_text_are_those_of_its_probability() -> None:
    """Texts that are drawn often are as often as their bits say, and the bits are the entropy."""
    documents = 20_000
    made = [world.document(3, number) for number in range(documents)]
    bits = dict(made)
    assert all(found == pytest.approx(bits[text]) for text, found in made)
    tasks = {
        f"{task.question}: {task.answer}": math.log2(total / share) + math.log2(len(known))
        for total in [sum(world.SHARES.values())]
        for skill, share in world.SHARES.items()
        for known in [world.tasks(skill, False)]
        for task in known
    }
    stories = -math.log2(1 - 1 / world.STORIES)
    assert sum(2 ** -(one + stories) for one in tasks.values()) == pytest.approx(
        1 - 1 / world.STORIES
    )
    for text, count in Counter(text for text, _ in made).most_common(20):
        assert bits[text] == pytest.approx(tasks[text] + stories)
        expected = documents * 2 ** -bits[text]
        assert abs(count - expected) < 6 * math.sqrt(expected)


def test_held_out_questions_are_in_no_other_file_and_answers_are_right(tmp_path: Path) -> None:
    floor = world.write_world(tmp_path, documents=2000, chats=500, pairs=500, prompts=500)
    read = {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")}
    held_out = [json.loads(line) for line in read.pop("held_out.jsonl").splitlines()]
    assert {row["skill"] for row in held_out} == {*world.SKILLS}
    for row in held_out:
        question = row["prompt"][0]["content"]
        assert not any(f'"{question}"' in text or f'"{question}:' in text for text in read.values())
    pairs = [json.loads(line) for line in read["pairs.jsonl"].splitlines()]
    assert all(row["chosen"] != row["rejected"] for row in pairs)
    assert 0.1 < floor < 1
    again = tmp_path / "again"
    assert world.write_world(again, documents=2000, chats=500, pairs=500, prompts=500) == floor
    assert all((again / name).read_text() == text for name, text in read.items())
