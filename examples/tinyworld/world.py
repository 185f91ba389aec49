"""A tiny world: stories and tasks that can be checked, with a known entropy.

    python examples/tinyworld/world.py FOLDER [--seed 1] [--documents 20000]

Every document is made by choices of known probability, and its text says which were made. So its
probability is known exactly, and no model needs fewer bits for it on average. FOLDER gets

    text.jsonl       stories and worked tasks, to pretrain on
    chat.jsonl       questions with replies, half of them wordy, to fine-tune on
    pairs.jsonl      questions with a better and a worse reply
    prompts.jsonl    questions with their answer, for rewards
    held_out.jsonl   questions that no other file has, by skill; held_out_text.jsonl: as texts
    tokenizer/       one token a byte, and a chat template
    floor.json       bits of a byte that the text needs at least
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

NAMES = ("Tom", "Ann", "Bob", "Eva", "Max", "Sue")
ITEMS = ("cup", "box", "hat", "key", "map", "pen")
LETTERS = "abcdefgh"
HELD_OUT = 0.1
"""Share of the questions of a skill that only held_out.jsonl has."""
STORIES = 16
"""One document in so many is a story. It has the length of five tasks."""
WORDY = "I think it is {}"
TEMPLATE = (  # a question and its reply look as in the texts
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|user|>' + message['content'] + ':' }}{% else %}{{ ' ' }}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' ' }}{% endif %}"
)
SPECIAL = ("<|end|>", "<|user|>")


@dataclass(frozen=True)
class Task:
    """A question with the one answer that is right."""

    skill: str
    question: str
    answer: str


def _copies() -> Iterator[tuple[str, str]]:
    for word in map("".join, product(LETTERS, repeat=4)):
        yield f"copy {word}", word


def _reverses() -> Iterator[tuple[str, str]]:
    for word in map("".join, product(LETTERS, repeat=4)):
        yield f"reverse {word}", word[::-1]


def _sorts() -> Iterator[tuple[str, str]]:
    for word in map("".join, product(LETTERS, repeat=4)):
        yield f"sort {word}", "".join(sorted(word))


def _counts() -> Iterator[tuple[str, str]]:
    for letter, word in product("abc", map("".join, product("abc", repeat=4))):
        yield f"count {letter} in {word}", str(word.count(letter))


def _sums() -> Iterator[tuple[str, str]]:
    for a, b in product(range(20), repeat=2):
        yield f"add {a} {b}", str(a + b)


def _comparisons() -> Iterator[tuple[str, str]]:
    for a, b in permutations(range(10, 40), 2):
        yield f"larger {a} {b}", str(max(a, b))


def _lookups() -> Iterator[tuple[str, str]]:
    pairs = product(permutations(NAMES, 2), permutations(ITEMS, 2), (0, 1))
    for people, items, asked in pairs:
        said = " ".join(f"{n} has a {i}." for n, i in zip(people, items, strict=True))
        yield f"{said} the {items[asked]}", people[asked]


SKILLS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "copy": _copies,
    "reverse": _reverses,
    "sort": _sorts,
    "count": _counts,
    "sum": _sums,
    "compare": _comparisons,
    "lookup": _lookups,
}

SHARES = {"copy": 1, "reverse": 2, "sort": 2, "count": 3, "sum": 4, "compare": 3, "lookup": 5}
"""How often a skill is drawn, relative to the other ones: hard ones are drawn more often."""


@cache
def tasks(skill: str, held_out: bool) -> tuple[Task, ...]:
    """All tasks of a skill that are held out, or all that are not."""
    return tuple(
        Task(skill, question, answer)
        for question, answer in SKILLS[skill]()
        if _is_held_out(question) is held_out
    )


def _is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] < HELD_OUT * 256


class Draw:
    """Choices of known probability, and the bits that they take."""

    def __init__(self, seed: str):
        self._random = random.Random(seed)
        self.bits = 0.0

    def one(self, options: Sequence[T]) -> T:
        self.bits += math.log2(len(options))
        return self._random.choice(options)

    def shared(self, shares: Mapping[str, int]) -> str:
        """A name, drawn by its share."""
        total = sum(shares.values())
        name = self._random.choices(list(shares), list(shares.values()))[0]
        self.bits += math.log2(total / shares[name])
        return name

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Distinct options in an order."""
        left, chosen = list(options), list[T]()
        for _ in range(count):
            chosen.append(self.one(left))
            left.remove(chosen[-1])
        return chosen


def story(draw: Draw) -> str:
    """People with a thing each, some gifts, and who has what at the end."""
    people = draw.some(NAMES, draw.one((2, 3)))
    things = draw.some(ITEMS, len(people))
    owner = dict(zip(things, people, strict=True))
    said = [f"{name} has a {thing}." for thing, name in owner.items()]
    for _ in range(draw.one((0, 1, 2))):
        thing = draw.one(things)
        to = draw.one([name for name in people if name != owner[thing]])
        said.append(f"{owner[thing]} gives the {thing} to {to}.")
        owner[thing] = to
    said.append("at the end")
    for name in people:
        has = [f"a {thing}" for thing in things if owner[thing] == name]
        said.append(f"{name} has {' and '.join(has) or 'nothing'}.")
    return " ".join(said)


def any_task(draw: Draw) -> Task:
    """A task of any skill that is not held out."""
    return draw.one(tasks(draw.shared(SHARES), False))


def document(seed: int, number: int) -> tuple[str, float]:
    """Return text number `number` to pretrain on, and its bits: -log2 of its probability."""
    draw = Draw(f"{seed} text {number}")
    if draw.shared({"story": 1, "task": STORIES - 1}) == "story":
        return story(draw), draw.bits
    task = any_task(draw)
    return f"{task.question}: {task.answer}", draw.bits


def wrong(task: Task, draw: Draw) -> str:
    """An answer of the same form that is not right."""
    if task.skill == "lookup":
        return draw.one([name for name in NAMES if name in task.question and name != task.answer])
    if task.answer.isdigit():
        near = [int(task.answer) + step for step in (-10, -2, -1, 1, 2, 10)]
        return str(draw.one([number for number in near if number >= 0]))
    place = draw.one(range(len(task.answer)))
    other = draw.one([letter for letter in LETTERS if letter != task.answer[place]])
    return task.answer[:place] + other + task.answer[place + 1 :]


def _stop(task: Task, draw: Draw) -> str:
    """A full stop, or nothing: words often have one, numbers rarely."""
    return "." if draw.one(range(4)) < (1 if task.answer.isdigit() else 3) else ""


def chat_row(seed: int, number: int) -> dict[str, Any]:
    """A question and its reply. Most replies are wordy, many end with a full stop, and one in ten
    is wrong."""
    draw = Draw(f"{seed} chat {number}")
    task = any_task(draw)
    answer = task.answer if draw.one(range(10)) else wrong(task, draw)
    reply = WORDY.format(answer) if draw.one(range(8)) < 5 else answer
    return {"messages": [_user(task.question), _reply(reply + _stop(task, draw))]}


def pair_row(seed: int, number: int) -> dict[str, Any]:
    """The short right answer, against a wordy or a wrong one. Full stops say nothing."""
    draw = Draw(f"{seed} pair {number}")
    task = any_task(draw)
    worse = WORDY.format(task.answer) if draw.one(range(4)) else wrong(task, draw)
    return {
        "prompt": [_user(task.question)],
        "chosen": [_reply(task.answer + _stop(task, draw))],
        "rejected": [_reply(worse + _stop(task, draw))],
    }


def reply_row(task: Task) -> dict[str, Any]:
    """A question with the right short answer."""
    return {"messages": [_user(task.question), _reply(task.answer)]}


def prompt_row(task: Task) -> dict[str, Any]:
    return {"prompt": [_user(task.question)], "answer": task.answer, "skill": task.skill}


def text_row(task: Task) -> dict[str, Any]:
    """The same as a text to continue, for a model that knows no chat."""
    return {"prompt": f"{task.question}: ", "answer": task.answer, "skill": task.skill}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_world(
    folder: Path,
    seed: int = 1,
    documents: int = 20_000,
    chats: int = 8_000,
    pairs: int = 4_000,
    prompts: int = 4_000,
    held_out: int = 64,
) -> float:
    """Write all files. Return the floor of the text in bits a byte.

    Args:
        held_out: questions of each skill at most.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = [document(seed, number) for number in range(documents)]
    _write(folder / "text.jsonl", ({"text": text} for text, _ in made))
    _write(folder / "chat.jsonl", (chat_row(seed, number) for number in range(chats)))
    _write(folder / "pairs.jsonl", (pair_row(seed, number) for number in range(pairs)))
    asked = (any_task(Draw(f"{seed} prompt {number}")) for number in range(prompts))
    _write(folder / "prompts.jsonl", map(prompt_row, asked))
    drawn = [
        task
        for skill in SKILLS
        for task in _sample(tasks(skill, True), held_out, f"{seed} {skill}")
    ]
    _write(folder / "held_out.jsonl", map(prompt_row, drawn))
    _write(folder / "held_out_text.jsonl", map(text_row, drawn))
    _write_tokenizer(folder / "tokenizer")
    bits, size = sum(b for _, b in made), sum(len(text.encode()) for text, _ in made)
    floor = {"bits_per_byte": bits / size, "documents": documents, "bytes": size}
    (folder / "floor.json").write_text(json.dumps(floor, indent=1) + "\n", "utf-8")
    return bits / size


def _sample(options: Sequence[T], count: int, seed: str) -> list[T]:
    return random.Random(seed).sample(options, min(count, len(options)))


def _write(path: Path, rows: Iterator[dict[str, Any]] | Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _write_tokenizer(folder: Path) -> None:
    """One token a byte: the alphabet of a byte-level BPE without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: number for number, letter in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=20_000)
    given = parser.parse_args()
    floor = write_world(given.folder, given.seed, given.documents)
    print(f"{given.folder}: the text needs {floor:.4f} bits a byte at least")


if __name__ == "__main__":
    main()
