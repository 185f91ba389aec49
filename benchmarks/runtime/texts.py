"""Text for runs that a benchmark trains: the same words each time, for it does not matter which."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "rain", "falls")


def write_texts(folder: Path, documents: int, words: int) -> Path:
    """The folder, made and filled."""
    folder.mkdir()
    chooser = random.Random(7)
    for number in range(documents):
        text = " ".join(chooser.choice(WORDS) for _ in range(words))
        (folder / f"{number}.txt").write_text(f"Text {number}. {text}.\n")
    return folder
