"""Cuts a long document into pieces that are tokenised one by one, to the same tokens.

A tokenizer needs some hundred times the memory of the text that it is given at a time. So a long
document is cut between two words, before the space. Around each cut the tokens of both sides are
compared with the tokens of the uncut text. A place where they differ is not taken, if any other is
near. A tokenizer that puts a mark of its own before each text gets the second piece without its
space, if that gives the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice

PIECE_CHARACTERS = 1 << 16
"""The length of a piece. A shorter document is not cut."""

CONTEXT = 64
"""Characters on each side of a cut whose tokens are compared."""

TRIES = 32
"""Places of each kind that are tried for one cut, before one is taken without the comparison."""

_PLACES = (
    re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])"),  # one space between two letters
    re.compile(r"(?<=\S)\s(?=\S)"),
    re.compile(r"(?<=\S)(?=\s)"),
)

Encode = Callable[[str], list[int]]


def cut_text(text: str, encode: Encode | None = None) -> Iterator[str]:
    """Yield the pieces of a document. Without `encode` the first place is taken each time."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end, after = _find_cut(text, start + PIECE_CHARACTERS, encode)
        yield text[start:end]
        start = after
    yield text[start:] if start else text


def _find_cut(text: str, around: int, encode: Encode | None) -> tuple[int, int]:
    """(end of one piece, start of the next), near `around`."""
    first: int | None = None
    stop = around + PIECE_CHARACTERS
    for place in _PLACES:
        for match in islice(place.finditer(text, around, stop), TRIES):
            at = match.start()
            if encode is None:
                return at, at
            first = at if first is None else first
            skip = _compare(text, at, encode)
            if skip is not None:
                return at, at + skip
    at = around if first is None else first
    return at, at


def _compare(text: str, at: int, encode: Encode) -> int | None:
    """Characters to leave out at a cut so that the tokens stay the same; None: they cannot."""
    before, after = text[at - CONTEXT : at], text[at : at + CONTEXT]
    both, left = encode(before + after), encode(before)
    if left + encode(after) == both:
        return 0
    return 1 if left + encode(after[1:]) == both else None
