"""Checks a given tokenizer on some of the text: does it keep what it is given?

A tokenizer of another language or alphabet turns text into unknown tokens, or drops it. The share
is measured in characters: one unknown token may stand for a complete document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from holdfast.errors import DataError

PROBE_BYTES = 1 << 18
"""Text that the tokenizer is tried on."""

PIECE_CHARACTERS = 1 << 14
REFUSED_SHARE = 0.2
"""A tokenizer that loses so much of the text is of other text."""

SAID_SHARE = 0.001


def check_tokenizer(tokenizer: Tokenizer, path: Path, texts: Iterable[str], name: str) -> list[str]:
    """Return lines about text that the tokenizer loses. `name`: of the file, for messages.

    Raises DataError if it loses much of the text, or gives other tokens each time.
    """
    unknown = _unknown_ids(tokenizer, path)
    lost = total = 0
    for text in _probe(texts):
        first = tokenizer.encode(text, add_special_tokens=False)
        if first.ids != tokenizer.encode(text, add_special_tokens=False).ids:
            raise DataError(
                f"{name} is random: the same text gives other tokens each time",
                where="data.tokenizer.path",
                remedy="turn sampling and dropout off in a copy of the file",
            )
        # (characters that are no white space, those of them that no known token stands for).
        kept = bytearray(len(text))
        for number, (start, stop) in zip(first.ids, first.offsets, strict=True):
            if number not in unknown:
                kept[start:stop] = b"\1" * (stop - start)
        places = [i for i, character in enumerate(text) if not character.isspace()]
        characters, gone = len(places), sum(1 for i in places if not kept[i])
        total, lost = total + characters, lost + gone
    share = lost / max(total, 1)
    sentence = f"{name} loses {share:.1%} of the text: it has no tokens for it"
    if share >= REFUSED_SHARE:
        raise DataError(
            sentence,
            where="data.tokenizer.path",
            remedy="name a tokenizer of this language, or leave it out to train one",
        )
    return [sentence] if share >= SAID_SHARE else []


def _probe(texts: Iterable[str]) -> Iterable[str]:
    left = PROBE_BYTES
    for text in islice(texts, PROBE_BYTES):
        for at in range(0, min(len(text), left), PIECE_CHARACTERS):
            yield text[at : min(at + PIECE_CHARACTERS, left + at)]
        left -= len(text)
        if left <= 0:
            return


def _unknown_ids(tokenizer: Tokenizer, path: Path) -> set[int]:
    """Ids of the unknown token, by what the model says."""
    model = json.loads(path.read_text(encoding="utf-8-sig")).get("model") or {}
    ids: set[int] = set()
    if isinstance(model.get("unk_id"), int):
        ids.add(model["unk_id"])
    name = model.get("unk_token")
    if isinstance(name, str) and (number := tokenizer.token_to_id(name)) is not None:
        ids.add(number)
    return ids
